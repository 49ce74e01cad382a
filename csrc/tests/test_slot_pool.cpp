#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/slot_pool.h"
#include "tests/harness.h"
#include "tests/layouts.h"

namespace hscache::test {
namespace {

using Slots = std::vector<std::int64_t>;

// `slots` slots of 64 bytes, and a rest too small for one.
SlotPool make_pool(std::int64_t slots) {
  return SlotPool(std::make_shared<Arena>(slots * 64 + 63), 64);
}

}  // namespace

TEST(slot_pool, holds_as_many_slots_as_fit) {
  const SlotPool pool = make_pool(5);
  CHECK_EQ(pool.num_slots(), 5);
  CHECK_EQ(pool.num_free(), 5);
  CHECK_EQ(pool.slot_bytes(), 64);
}

TEST(slot_pool, refuses_slots_that_do_not_fit) {
  const auto arena = std::make_shared<Arena>(63);
  CHECK_THROWS(std::invalid_argument, "a slot of 64 bytes does not fit a pool of 63 bytes",
               SlotPool(arena, 64));
  CHECK_THROWS(std::invalid_argument, "slot size is 0 bytes", SlotPool(arena, 0));
}

TEST(slot_pool, fresh_slots_come_in_address_order) {
  SlotPool pool = make_pool(6);
  CHECK(pool.allocate(2) == Slots({0, 1}));
  CHECK(pool.allocate(3) == Slots({2, 3, 4}));
}

TEST(slot_pool, gives_all_or_none) {
  SlotPool pool = make_pool(4);
  CHECK(pool.allocate(3).has_value());
  CHECK(!pool.allocate(2).has_value());
  CHECK_EQ(pool.num_free(), 1);
  CHECK(pool.allocate(1) == Slots({3}));
  CHECK(!pool.allocate(1).has_value());
  CHECK(pool.allocate(0) == Slots{});
}

TEST(slot_pool, refuses_a_negative_count) {
  SlotPool pool = make_pool(4);
  CHECK_THROWS(std::invalid_argument, "cannot allocate -1 slots", pool.allocate(-1));
}

TEST(slot_pool, freed_slots_are_handed_out_again) {
  SlotPool pool = make_pool(4);
  pool.allocate(4);
  pool.free({2, 0});
  CHECK_EQ(pool.num_free(), 2);
  Slots again = pool.allocate(2).value();
  std::sort(again.begin(), again.end());
  CHECK(again == Slots({0, 2}));
}

TEST(slot_pool, refuses_a_slot_given_back_twice) {
  SlotPool pool = make_pool(4);
  pool.allocate(2);
  pool.free({1});
  CHECK_THROWS(std::invalid_argument, "slot 1 is not allocated", pool.free({1}));
  CHECK_THROWS(std::invalid_argument, "slot 0 is not allocated", pool.free({0, 0}));
}

TEST(slot_pool, refuses_a_slot_of_another_pool) {
  SlotPool pool = make_pool(4);
  CHECK_THROWS(std::invalid_argument, "slot 4 is not of this pool of 4 slots", pool.free({4}));
  CHECK_THROWS(std::invalid_argument, "slot -1 is not of this pool", pool.free({-1}));
}

TEST(slot_pool, a_refused_free_gives_nothing_back) {
  SlotPool pool = make_pool(4);
  pool.allocate(3);
  for (const Slots& bad : {Slots{0, 1, 4}, Slots{0, 3}, Slots{2, 2}}) {
    CHECK_THROWS(std::invalid_argument, "slot", pool.free(bad));
  }
  CHECK_EQ(pool.num_free(), 1);
  pool.free({0, 1, 2});  // all of them are still allocated
  CHECK_EQ(pool.num_free(), 4);
}

TEST(slot_pool, view_places_rows_inside_slots) {
  const SlotPool pool = make_pool(4);
  const PagedView view = pool.view(24);
  CHECK_EQ(view.num_blocks, 4);
  CHECK_EQ(view.num_layers, 1);
  CHECK_EQ(view.block_size, 2);
  CHECK_EQ(view.offset(3, 0, 1), 3 * 64 + 24);
  CHECK_THROWS(std::invalid_argument, "a row of 65 bytes does not fit a slot of 64", pool.view(65));
  CHECK_THROWS(std::invalid_argument, "a row of 0 bytes", pool.view(0));
}

TEST(slot_pool, threads_never_share_a_slot) {
  constexpr int kThreads = 4;
  SlotPool pool = make_pool(16);
  const PagedView view = pool.view(64);
  std::atomic<int> shared{0};
  std::vector<std::thread> threads;
  for (int id = 1; id <= kThreads; ++id) {
    threads.emplace_back([&, id] {
      Random random(static_cast<std::uint64_t>(id));
      for (int round = 0; round < 2'000; ++round) {
        const auto slots = pool.allocate(random.in(1, 6));
        if (!slots) continue;
        // The thread sanitizer sees a slot in two hands as a race, others as a foreign mark.
        for (const std::int64_t slot : *slots) {
          std::memset(view.data + view.offset(slot, 0, 0), id, 64);
        }
        for (const std::int64_t slot : *slots) {
          for (int byte = 0; byte < 64; ++byte) {
            shared += view.data[view.offset(slot, 0, 0) + byte] != static_cast<std::byte>(id);
          }
        }
        pool.free(*slots);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(shared.load(), 0);
  CHECK_EQ(pool.num_free(), 16);
}

}  // namespace hscache::test
