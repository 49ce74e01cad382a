#include "core/result_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
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

using Buffers = std::vector<std::shared_ptr<ResultBuffer>>;

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kMapped = 1 << 20;  // large enough not to come from malloc

// The size of a buffer for `bytes`, found by trying all of them.
std::int64_t naive_size(std::int64_t bytes, std::int64_t max_bytes) {
  for (std::int64_t power = kPage;; power *= 2) {
    for (std::int64_t quarter = 0; quarter < 4; ++quarter) {
      const std::int64_t size = power + quarter * (power / 4);
      if (bytes <= size) return std::min(size, max_bytes);
    }
  }
}

// One list for all, walked from end to end.
class NaivePool {
 public:
  explicit NaivePool(std::int64_t max_bytes) { stats_.max_bytes = max_bytes; }

  // Where the buffer must be, null where fresh memory is due, nothing where none is.
  std::optional<std::byte*> take(std::int64_t bytes) {
    const std::int64_t size = naive_size(bytes, stats_.max_bytes);
    for (std::size_t i = idle_.size(); i-- > 0;) {
      if (idle_[i].second != size) continue;
      std::byte* const data = idle_[i].first;
      idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(i));
      ++stats_.hits;
      stats_.in_use_bytes += size;
      return data;
    }
    if (bytes > stats_.max_bytes || stats_.in_use_bytes + size > stats_.max_bytes) {
      ++stats_.fallbacks;
      return std::nullopt;
    }
    ++stats_.misses;
    stats_.in_use_bytes += size;
    while (stats_.in_use_bytes + idle_bytes() > stats_.max_bytes) idle_.erase(idle_.begin());
    return nullptr;
  }

  void give_back(std::byte* data, std::int64_t bytes) {
    const std::int64_t size = naive_size(bytes, stats_.max_bytes);
    idle_.emplace_back(data, size);
    stats_.in_use_bytes -= size;
  }

  bool agrees(const ResultPoolStats& stats) const {
    return CHECK_EQ(stats.max_bytes, stats_.max_bytes) &&
           CHECK_EQ(stats.in_use_bytes, stats_.in_use_bytes) &&
           CHECK_EQ(stats.idle_bytes, idle_bytes()) && CHECK_EQ(stats.hits, stats_.hits) &&
           CHECK_EQ(stats.misses, stats_.misses) && CHECK_EQ(stats.fallbacks, stats_.fallbacks) &&
           CHECK(stats.in_use_bytes + stats.idle_bytes <= stats.max_bytes);
  }

 private:
  std::int64_t idle_bytes() const {
    std::int64_t bytes = 0;
    for (const auto& [data, size] : idle_) bytes += size;
    return bytes;
  }

  std::vector<std::pair<std::byte*, std::int64_t>> idle_;  // in the order in which they came back
  ResultPoolStats stats_;
};

bool overlap(const ResultBuffer& a, const ResultBuffer& b) {
  return a.data() < b.data() + b.bytes() && b.data() < a.data() + a.bytes();
}

// Whether all bytes are the mark.
bool holds(const ResultBuffer& buffer, int mark) {
  return std::all_of(buffer.data(), buffer.data() + buffer.bytes(),
                     [&](std::byte byte) { return byte == static_cast<std::byte>(mark); });
}

}  // namespace

TEST(result_pool, recycles_the_memory_of_a_buffer_that_died) {
  ResultPool pool(4 * kMapped);
  for (const std::int64_t bytes : {std::int64_t{1}, kPage + 1, kMapped}) {
    auto buffer = pool.take(bytes);
    CHECK_EQ(buffer->bytes(), bytes);
    std::byte* const data = buffer->data();
    std::memset(data, 7, static_cast<std::size_t>(bytes));
    buffer.reset();
    const auto again = pool.take(bytes);
    CHECK_EQ(again->data(), data);
    CHECK(holds(*again, 7));
  }
  CHECK_EQ(pool.stats().hits, 3);
  CHECK_EQ(pool.stats().misses, 3);
}

TEST(result_pool, recycles_the_buffer_that_came_back_last) {
  ResultPool pool(4 * kMapped);
  auto first = pool.take(kMapped);
  auto last = pool.take(kMapped);
  std::byte* const warmest = last->data();
  first.reset();
  last.reset();
  CHECK_EQ(pool.take(kMapped)->data(), warmest);
}

TEST(result_pool, recycles_for_a_request_that_fits_well_and_no_other) {
  ResultPool pool(1 << 30);
  pool.take(8 * kMapped);
  CHECK(pool.take(7 * kMapped + 1) != nullptr);
  CHECK_EQ(pool.stats().hits, 1);
  CHECK(pool.take(7 * kMapped) != nullptr);  // would leave an eighth of it unused, but has a size
  CHECK(pool.take(8 * kMapped + 1) != nullptr);
  CHECK_EQ(pool.stats().misses, 3);
}

TEST(result_pool, adds_at_most_a_quarter_to_what_is_asked_for) {
  ResultPool pool(std::int64_t{1} << 31);
  for (std::int64_t bytes = kPage; bytes < std::int64_t{1} << 30; bytes += bytes / 9 + 1) {
    const auto buffer = pool.take(bytes);
    const std::int64_t whole = pool.stats().in_use_bytes;
    if (!CHECK(whole >= bytes && 4 * (whole - bytes) <= bytes)) CHECK_EQ(bytes, whole);
  }
}

TEST(result_pool, refuses_what_does_not_fit_the_limit_and_counts_it) {
  ResultPool pool(3 * kPage);
  CHECK(pool.take(3 * kPage + 1) == nullptr);
  const auto one = pool.take(2 * kPage);
  CHECK(pool.take(kPage + 1) == nullptr);
  CHECK(pool.take(kPage) != nullptr);
  CHECK_EQ(pool.stats().fallbacks, 2);
  CHECK_EQ(pool.stats().in_use_bytes, 2 * kPage);
  CHECK_EQ(pool.stats().idle_bytes, kPage);
}

TEST(result_pool, does_not_refuse_for_its_own_rounding_what_fits_the_limit) {
  ResultPool pool(9 * kPage);  // a buffer for 9 pages has 10 elsewhere
  for (int round = 0; round < 2; ++round) {
    const auto buffer = pool.take(9 * kPage - round);
    REQUIRE(buffer != nullptr);
    CHECK_EQ(pool.stats().in_use_bytes, 9 * kPage);
  }
  CHECK_EQ(pool.stats().hits, 1);
}

TEST(result_pool, idle_buffers_of_other_sizes_make_room_the_oldest_first) {
  ResultPool pool(8 * kPage);
  auto oldest = pool.take(2 * kPage);
  auto newest = pool.take(4 * kPage);
  oldest.reset();
  newest.reset();
  const auto needs_room = pool.take(3 * kPage);
  CHECK(needs_room != nullptr);
  CHECK_EQ(pool.stats().idle_bytes, 4 * kPage);
  CHECK(pool.take(8 * kPage) == nullptr);  // what is in use does not
  CHECK_EQ(pool.stats().idle_bytes, 4 * kPage);
}

TEST(result_pool, a_mix_of_sizes_that_is_over_keeps_nobody_from_the_whole_limit) {
  ResultPool pool(64 * kPage);
  {
    Buffers mix;
    for (std::int64_t pages = 1; auto buffer = pool.take(pages * kPage); ++pages) {
      mix.push_back(std::move(buffer));
    }
  }
  CHECK(pool.take(64 * kPage) != nullptr);
}

TEST(result_pool, with_a_limit_of_nothing_refuses_all) {
  ResultPool pool(0);
  CHECK(pool.take(1) == nullptr);
  CHECK_EQ(pool.stats().fallbacks, 1);
}

TEST(result_pool, refuses_numbers_that_make_no_sense) {
  CHECK_THROWS(std::invalid_argument,
               "the result pool's limit is -1 bytes: set hscache_result_bytes to 0 or more",
               ResultPool(-1));
  ResultPool pool(kPage);
  CHECK_THROWS(std::invalid_argument, "cannot take 0 bytes", pool.take(0));
  CHECK_THROWS(std::invalid_argument, "cannot take -5 bytes", pool.take(-5));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which end the process
TEST(result_pool, what_the_kernel_refuses_is_not_counted_as_in_use) {
  ResultPool pool(std::int64_t{1} << 62);
  CHECK_THROWS(std::bad_alloc, "", pool.take(std::int64_t{1} << 61));
  CHECK_EQ(pool.stats().in_use_bytes, 0);
}
#endif

TEST(result_pool, buffers_outlive_the_pool) {
  auto pool = std::make_unique<ResultPool>(4 * kMapped);
  const auto small = pool->take(kPage);
  const auto large = pool->take(kMapped);
  pool->take(2 * kMapped);
  pool.reset();
  std::memset(small->data(), 1, kPage);
  std::memset(large->data(), 2, kMapped);
  CHECK(holds(*small, 1));
  CHECK(holds(*large, 2));
}

TEST(result_pool, fresh_results_of_any_size_are_memory_of_their_own) {
  std::vector<std::shared_ptr<ResultBuffer>> held;
  for (const std::int64_t bytes : {std::int64_t{1}, kPage, kMapped - 1, kMapped + 1, 2 * kMapped,
                                   2 * kMapped + 1, 5 * kMapped + 777, 8 * kMapped, 8 * kMapped}) {
    auto buffer = fresh_result(bytes);
    CHECK_EQ(buffer->bytes(), bytes);
    for (const auto& other : held) CHECK(!overlap(*buffer, *other));
    std::memset(buffer->data(), static_cast<int>(held.size()), static_cast<std::size_t>(bytes));
    held.push_back(std::move(buffer));
  }
  for (std::size_t i = 0; i < held.size(); ++i) CHECK(holds(*held[i], static_cast<int>(i)));
  CHECK_THROWS(std::invalid_argument, "cannot take 0 bytes", fresh_result(0));
}

TEST(result_pool, large_memory_begins_where_a_huge_page_may_and_goes_back_whole) {
  const auto mapped_pages = [] {
    std::int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages;
  };
  fresh_result(8 * kMapped);  // whatever is mapped once
  const std::int64_t before = mapped_pages();
  for (const std::int64_t bytes : {2 * kMapped, 3 * kMapped + 1, 8 * kMapped}) {
    const auto buffer = fresh_result(bytes);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % (2 * kMapped), 0U);
    CHECK_EQ(mapped_pages() - before, (bytes + kPage - 1) / kPage);
  }
  CHECK_EQ(mapped_pages(), before);
}

TEST(result_pool, answers_as_a_naive_one_does) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const std::int64_t max_bytes = random.in(1, 200) * kPage + random.pick({0, 0, 1, 777});
    ResultPool pool(max_bytes);
    NaivePool naive(max_bytes);
    Buffers held;
    for (int step = 0; step < 300; ++step) {
      bool fine = true;
      if (random.chance(60)) {
        const std::int64_t bytes = random.in(1, std::int64_t{1} << random.in(1, 20));
        const auto expected = naive.take(bytes);
        auto buffer = pool.take(bytes);
        fine = CHECK_EQ(buffer != nullptr, expected.has_value());
        if (buffer != nullptr && expected) {
          fine = fine && CHECK_EQ(buffer->bytes(), bytes) &&
                 CHECK_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 64, 0U) &&
                 (*expected == nullptr || CHECK_EQ(buffer->data(), *expected));
          for (const auto& other : held) fine = fine && CHECK(!overlap(*buffer, *other));
          std::memset(buffer->data(), 1, static_cast<std::size_t>(bytes));
          held.push_back(std::move(buffer));
        }
      } else if (!held.empty()) {
        random.shuffle(held);
        naive.give_back(held.back()->data(), held.back()->bytes());
        held.pop_back();
      }
      if (!fine || !naive.agrees(pool.stats())) {
        CHECK_EQ(seed, 0U);
        return;
      }
    }
  }
}

TEST(result_pool, threads_never_share_a_buffer_nor_pass_the_limit) {
  constexpr int kThreads = 4;
  constexpr std::int64_t kLimit = 20 * kPage;
  ResultPool pool(kLimit);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int id = 1; id <= kThreads; ++id) {
    threads.emplace_back([&, id] {
      Random random(static_cast<std::uint64_t>(id));
      Buffers held;
      for (int round = 0; round < 1'000; ++round) {
        // The thread sanitizer sees a buffer in two hands as a race, others as a foreign mark.
        if (auto buffer = pool.take(random.in(1, 8 * kPage))) {
          std::memset(buffer->data(), id, static_cast<std::size_t>(buffer->bytes()));
          held.push_back(std::move(buffer));
        }
        const ResultPoolStats stats = pool.stats();
        wrong += stats.in_use_bytes + stats.idle_bytes > kLimit;
        if (held.empty() || random.chance(50)) continue;
        random.shuffle(held);
        wrong += !holds(*held.back(), id);
        held.pop_back();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(pool.stats().in_use_bytes, 0);
}

TEST(result_pool, a_buffer_may_die_in_one_thread_while_the_pool_does_in_another) {
  for (int round = 0; round < 200; ++round) {
    auto pool = std::make_unique<ResultPool>(4 * kPage);
    auto buffer = pool->take(kPage);
    std::thread other([&] { buffer.reset(); });
    pool.reset();
    other.join();
  }
}

TEST(result_pool, a_forked_child_is_told_whose_it_is_and_keeps_its_copies) {
  const std::string forked =
      "threw: the result pool belongs to the parent process: open a store after fork(), not before";
  auto pool = std::make_unique<ResultPool>(64 * kPage);
  auto held = pool->take(kPage);
  std::memset(held->data(), 1, kPage);
  const std::vector<std::function<void()>> calls = {[&] { pool->take(1); }, [&] { pool->stats(); }};
  for (const auto& call : calls) {
    CHECK_EQ(in_child([&] {
               call();
               return "answered";
             }),
             forked);
  }
  // fork() at any moment: the lock may be held then, and a list half-way changed.
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    Random random(1);
    while (!stop) pool->take(random.in(1, 32) * kPage);
  });
  for (int round = 0; round < 20; ++round) {
    CHECK_EQ(in_child([&] {
               const bool readable = holds(*held, 1);
               std::memset(held->data(), 2, kPage);
               held.reset();
               pool.reset();
               return readable ? "gone" : "changed";
             }),
             "gone");
  }
  stop = true;
  busy.join();
  CHECK(holds(*held, 1));
  held.reset();
  CHECK_EQ(pool->stats().in_use_bytes, 0);
}

}  // namespace hscache::test
