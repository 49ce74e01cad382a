#include "core/slot_set.h"

#include <set>

#include "tests/harness.h"
#include "tests/layouts.h"

namespace hscache::test {
namespace {

std::int64_t first_member(const std::set<std::int64_t>& naive, std::int64_t from,
                          std::int64_t size) {
  const auto found = naive.lower_bound(from);
  return found == naive.end() ? size : *found;
}

std::int64_t first_absent(const std::set<std::int64_t>& naive, std::int64_t from,
                          std::int64_t size) {
  while (from < size && naive.contains(from)) ++from;
  return from;
}

}  // namespace

TEST(slot_set, an_empty_one_has_no_member) {
  for (const std::int64_t size : {1, 63, 64, 65, 4096, 4097, 300'000}) {
    const SlotSet slots(size);
    CHECK_EQ(slots.count(), 0);
    CHECK_EQ(slots.next(0), size);
    CHECK_EQ(slots.next(size), size);
    CHECK_EQ(slots.next_absent(0), 0);
    CHECK_EQ(slots.next_absent(size), size);
  }
}

TEST(slot_set, finds_a_member_across_all_levels) {
  SlotSet slots(20'000'000);
  slots.insert(19'999'999);
  CHECK_EQ(slots.next(0), 19'999'999);
  slots.insert(3);
  CHECK_EQ(slots.next(0), 3);
  CHECK_EQ(slots.next(4), 19'999'999);
  slots.erase(19'999'999);
  CHECK_EQ(slots.next(4), 20'000'000);
}

TEST(slot_set, answers_as_a_plain_set_does) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Random random(seed);
    const std::int64_t size = random.pick({1, 64, 65, 200, 4'100, 9'000});
    SlotSet slots(size);
    std::set<std::int64_t> naive;
    for (int step = 0; step < 100; ++step) {
      const std::int64_t slot = random.in(0, size - 1);
      const std::int64_t end = random.in(slot, std::min(size, slot + random.pick({1, 70, 9'000})));
      if (random.chance(30)) {
        slots.insert(slot, end);
        for (std::int64_t i = slot; i < end; ++i) naive.insert(i);
      } else if (random.chance(40)) {
        slots.erase(slot, end);
        naive.erase(naive.lower_bound(slot), naive.lower_bound(end));
      } else if (naive.contains(slot)) {
        slots.erase(slot);
        naive.erase(slot);
      } else {
        slots.insert(slot);
        naive.insert(slot);
      }
      const std::int64_t from = random.in(0, size);
      const bool same = CHECK_EQ(slots.count(), static_cast<std::int64_t>(naive.size())) &&
                        CHECK_EQ(slots.contains(slot), naive.contains(slot)) &&
                        CHECK_EQ(slots.next(from), first_member(naive, from, size)) &&
                        CHECK_EQ(slots.next(0), first_member(naive, 0, size)) &&
                        CHECK_EQ(slots.next_absent(from), first_absent(naive, from, size));
      if (!same) return;
    }
  }
}

}  // namespace hscache::test
