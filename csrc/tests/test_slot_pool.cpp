#include "core/slot_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/child.h"
#include "tests/harness.h"
#include "tests/layouts.h"

namespace hscache::test {
namespace {

using Slots = std::vector<std::int64_t>;

constexpr std::int64_t kExtent = 2 << 20;  // of all arenas below 256 MiB

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

TEST(slot_pool, gives_neighbours_where_there_are_as_many) {
  SlotPool pool = make_pool(10);
  CHECK_EQ(pool.allocate_run(4).value(), 0);
  CHECK(pool.allocate(3) == Slots({4, 5, 6}));
  pool.free({1, 2, 5});
  CHECK_EQ(pool.allocate_run(2).value(), 1);
  CHECK(!pool.allocate_run(4).has_value());  // four are free: 5, 7, 8 and 9
  CHECK_EQ(pool.num_free(), 4);
  CHECK_EQ(pool.allocate_run(3).value(), 7);
  CHECK(pool.allocate(1) == Slots({5}));
  CHECK_THROWS(std::invalid_argument, "a run of 0 slots", pool.allocate_run(0));
}

TEST(slot_pool, says_how_full_and_how_fragmented_it_is) {
  SlotPool pool = make_pool(10);
  CHECK_EQ(pool.stats().largest_free_run, 10);
  CHECK_EQ(pool.stats().fragmentation(), 0.0);
  CHECK_EQ(pool.stats().extents, 0);
  pool.allocate(10);
  CHECK_EQ(pool.stats().fragmentation(), 0.0);
  pool.free({0, 2, 3, 9});
  const SlotPoolStats stats = pool.stats();
  CHECK_EQ(stats.slots, 10);
  CHECK_EQ(stats.used, 6);
  CHECK_EQ(stats.free, 4);
  CHECK_EQ(stats.largest_free_run, 2);
  CHECK_EQ(stats.fragmentation(), 0.5);
  CHECK_EQ(stats.extents, 1);
  CHECK_EQ(stats.extent_bytes, kExtent);
}

TEST(slot_pool, pools_with_different_slots_share_an_arena_without_overlap) {
  const auto arena = std::make_shared<Arena>(8 * kExtent);
  SlotPool small(arena, kExtent / 4);
  SlotPool large(arena, kExtent / 2);
  CHECK_EQ(small.num_free(), 32);
  CHECK_EQ(large.num_free(), 16);
  CHECK(small.allocate(5) == Slots({0, 1, 2, 3, 4}));  // two extents
  CHECK(large.allocate(3) == Slots({12, 13, 14}));     // the last two
  CHECK_EQ(small.num_free(), 6 * 4 - 5);
  CHECK_EQ(large.num_free(), 6 * 2 - 3);
  CHECK(large.allocate(9).has_value());
  CHECK_EQ(small.num_free(), 3);
  CHECK(!small.allocate(4).has_value());
  CHECK_EQ(small.num_free(), 3);
}

TEST(slot_pool, an_extent_goes_back_with_its_last_slot) {
  const auto arena = std::make_shared<Arena>(2 * kExtent);
  SlotPool small(arena, kExtent / 2);
  SlotPool large(arena, 2 * kExtent);
  const Slots slots = small.allocate(4).value();
  CHECK(!large.allocate(1).has_value());
  small.free({0, 1, 2});
  CHECK(!large.allocate(1).has_value());
  CHECK_EQ(small.stats().extents, 1);
  small.free({3});
  CHECK(large.allocate(1) == Slots({0}));
  CHECK(!small.allocate(1).has_value());
}

TEST(slot_pool, a_slot_across_two_extents_is_there_while_both_are) {
  const auto arena = std::make_shared<Arena>(2 * kExtent);
  SlotPool pool(arena, kExtent / 3 * 2);  // 0 in the first extent, 1 across, 2 in the second
  CHECK_EQ(pool.num_slots(), 3);
  {
    SlotPool other(arena, kExtent);
    CHECK(other.allocate(1) == Slots({1}));
    CHECK(pool.allocate(1) == Slots({0}));
    CHECK(!pool.allocate(1).has_value());
  }
  // The other pool gave its extent back when it died.
  CHECK(pool.allocate(2) == Slots({1, 2}));
  pool.free({0, 2});
  CHECK_EQ(pool.stats().extents, 2);  // for the one in the middle
}

TEST(slot_pool, slots_may_be_larger_than_an_extent) {
  const auto arena = std::make_shared<Arena>(10 * kExtent);
  SlotPool large(arena, kExtent * 5 / 2);
  SlotPool small(arena, kExtent);
  CHECK(small.allocate(1) == Slots({9}));
  CHECK_EQ(large.num_free(), 3);
  CHECK_EQ(large.allocate_run(3).value(), 0);
  CHECK_EQ(large.stats().extents, 8);
  CHECK(small.allocate(1) == Slots({8}));
  CHECK(!small.allocate(1).has_value());
}

TEST(slot_pool, any_arena_size_is_divided) {
  for (const std::int64_t bytes : {std::int64_t{1} << 20, std::int64_t{1} << 39 | 12'345}) {
    const auto arena = std::make_shared<Arena>(bytes, bytes);
    SlotPool pool(arena, 1 << 19);
    CHECK_EQ(pool.num_free(), bytes >> 19);
    CHECK_EQ(pool.allocate_run(bytes >> 19).value(), 0);
    CHECK_EQ(pool.stats().used, bytes >> 19);
    CHECK_EQ(pool.num_free(), 0);
  }
}

TEST(slot_pool, answers_as_a_naive_model_does) {
  // The arena as bytes with an owner each would be large: it is held in units of a quarter extent,
  // of which every slot has a whole number.
  constexpr std::int64_t kUnit = kExtent / 4;
  constexpr std::int64_t kUnits = 41;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Random random(seed);
    const auto arena = std::make_shared<Arena>(kUnits * kUnit + random.in(0, kUnit - 1));
    std::vector<std::unique_ptr<SlotPool>> pools;
    std::vector<std::int64_t> sizes;  // in units
    for (int i = 0; i < 3; ++i) {
      sizes.push_back(random.pick({1, 2, 3, 5, 9}));
      pools.push_back(std::make_unique<SlotPool>(arena, sizes.back() * kUnit));
    }
    std::vector<std::pair<int, std::int64_t>> units(kUnits, {-1, -1});  // pool and slot
    std::vector<Slots> held(3);
    const auto units_of = [&](int pool, std::int64_t slot) {
      return std::span(units).subspan(static_cast<std::size_t>(slot * sizes[pool]),
                                      static_cast<std::size_t>(sizes[pool]));
    };
    // Free for a pool: whole, and no unit of its extents used by another.
    const auto is_free = [&](int pool, std::int64_t slot) {
      const std::int64_t begin = slot * sizes[pool] / 4 * 4;
      const std::int64_t end = ((slot + 1) * sizes[pool] + 3) / 4 * 4;
      for (std::int64_t unit = begin; unit < std::min(end, kUnits); ++unit) {
        const auto& [owner, what] = units[static_cast<std::size_t>(unit)];
        if (owner >= 0 && (owner != pool || what == slot)) return false;
      }
      return true;
    };
    const auto hold = [&](int pool, std::int64_t slot) {
      bool fine = is_free(pool, slot);
      for (auto& unit : units_of(pool, slot)) unit = {pool, slot};
      held[pool].push_back(slot);
      return fine;
    };
    for (int step = 0; step < 120; ++step) {
      const int id = static_cast<int>(random.in(0, 2));
      SlotPool& pool = *pools[id];
      std::int64_t free = 0;
      std::int64_t run = 0;
      std::int64_t longest = 0;
      for (std::int64_t slot = 0; slot < pool.num_slots(); ++slot) {
        const bool one = is_free(id, slot);
        free += one;
        run = one ? run + 1 : 0;
        longest = std::max(longest, run);
      }
      const SlotPoolStats stats = pool.stats();
      bool fine = CHECK_EQ(stats.free, free) && CHECK_EQ(pool.num_free(), free) &&
                  CHECK_EQ(stats.largest_free_run, longest) &&
                  CHECK_EQ(stats.used, static_cast<std::int64_t>(held[id].size()));
      const std::int64_t count = random.in(1, 6);
      if (random.chance(40)) {
        const auto slots = pool.allocate(count);
        fine = fine && CHECK_EQ(slots.has_value(), count <= free);
        for (const std::int64_t slot : slots.value_or(Slots{}))
          fine = CHECK(hold(id, slot)) && fine;
      } else if (random.chance(30)) {
        const auto first = pool.allocate_run(count);
        fine = fine && CHECK_EQ(first.has_value(), count <= longest);
        for (std::int64_t i = 0; first && i < count; ++i)
          fine = CHECK(hold(id, *first + i)) && fine;
      } else {
        random.shuffle(held[id]);
        Slots back;
        for (std::int64_t i = 0; i < count && !held[id].empty(); ++i) {
          back.push_back(held[id].back());
          held[id].pop_back();
        }
        pool.free(back);
        for (const std::int64_t slot : back) {
          for (auto& unit : units_of(id, slot)) unit = {-1, -1};
        }
      }
      if (!fine) {
        CHECK_EQ(seed, 0U);
        return;
      }
    }
  }
}

TEST(slot_pool, a_forked_child_is_told_whose_it_is_and_may_drop_it) {
  const std::string forked =
      "threw: the slot pool belongs to the parent process: open a store after fork(), not before";
  auto pool = std::make_unique<SlotPool>(std::make_shared<Arena>(640), 64);
  const Slots held = pool->allocate(2).value();
  const std::vector<std::function<void()>> calls = {
      [&] { pool->allocate(1); }, [&] { pool->allocate_run(1); }, [&] { pool->free(held); },
      [&] { pool->view(8); },     [&] { pool->num_free(); },      [&] { pool->stats(); }};
  for (const auto& call : calls) {
    CHECK_EQ(in_child([&] {
               call();
               return "answered";
             }),
             forked);
  }
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) pool->free(pool->allocate(3).value());
  });
  for (int round = 0; round < 20; ++round) {
    CHECK_EQ(in_child([&] {
               pool.reset();
               return "gone";
             }),
             "gone");
  }
  stop = true;
  busy.join();
  CHECK_EQ(pool->num_free(), 8);
}

TEST(slot_pool, threads_with_pools_of_one_arena_never_share_a_byte) {
  const auto arena = std::make_shared<Arena>(6 * kExtent);
  std::atomic<int> shared{0};
  std::vector<std::thread> threads;
  for (int id = 1; id <= 3; ++id) {
    threads.emplace_back([&, id] {
      Random random(static_cast<std::uint64_t>(id));
      SlotPool pool(arena, kExtent / (id + 1));
      const PagedView view = pool.view(64);
      for (int round = 0; round < 3'000; ++round) {
        const auto slots = pool.allocate(random.in(1, 4));
        if (!slots) continue;
        for (const std::int64_t slot : *slots) {
          for (const std::int64_t row : {std::int64_t{0}, view.block_size - 1}) {
            std::memset(view.data + view.offset(slot, 0, row), id, 64);
          }
        }
        for (const std::int64_t slot : *slots) {
          for (const std::int64_t row : {std::int64_t{0}, view.block_size - 1}) {
            shared += view.data[view.offset(slot, 0, row)] != static_cast<std::byte>(id);
          }
        }
        pool.free(*slots);
        shared += pool.stats().used != 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(shared.load(), 0);
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
