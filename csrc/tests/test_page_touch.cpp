#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/host_mapping.h"
#include "core/page_touch.h"
#include "tests/child.h"
#include "tests/harness.h"

namespace hscache::test {
namespace {

constexpr std::int64_t kStep = 16 << 20;
constexpr std::int64_t kPage = 4096;

// Untouched memory, whatever else the machine has to do.
struct Memory {
  explicit Memory(std::int64_t size) : mapping(size, HugePages::kOff) {}

  std::int64_t backed_pages() const {
    std::vector<unsigned char> pages(static_cast<std::size_t>((mapping.bytes() - 1) / kPage + 1));
    mincore(mapping.data(), static_cast<std::size_t>(mapping.bytes()), pages.data());
    return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; });
  }

  HostMapping mapping;
};

PageTouchOptions plenty(int threads = 2) {
  PageTouchOptions options;
  options.threads = threads;
  options.available = [] { return std::numeric_limits<std::int64_t>::max(); };
  return options;
}

void wait_for_end(const PageTouch& touch) {
  while (touch.at_work()) std::this_thread::yield();
}

// A touch that touches nothing, so that any size will do.
PageTouchOptions pretended(int threads, std::function<int(std::byte*, std::int64_t)> touch) {
  PageTouchOptions options = plenty(threads);
  options.touch = std::move(touch);
  return options;
}

}  // namespace

TEST(page_touch, backs_all_pages_and_ends) {
  for (const auto way : {populate_pages, touch_each_page}) {
    const Memory memory(3 * kStep + 5 * kPage + 1);
    PageTouchOptions options = plenty();
    options.touch = way;
    CHECK_EQ(memory.backed_pages(), 0);
    const PageTouch touch(memory.mapping.data(), memory.mapping.bytes(), std::move(options));
    wait_for_end(touch);
    CHECK_EQ(touch.touched_bytes(), memory.mapping.bytes());
    CHECK_EQ(touch.refusal(), "");
    CHECK_EQ(memory.backed_pages(), 3 * kStep / kPage + 6);
  }
}

TEST(page_touch, leaves_what_is_written_before_and_meanwhile) {
  for (const auto way : {populate_pages, touch_each_page}) {
    const Memory memory(4 * kStep);
    auto* const bytes = reinterpret_cast<unsigned char*>(memory.mapping.data());
    // Atomically, because the thread sanitizer is right about bytes that two threads write.
    const auto mark = [](std::int64_t page) { return static_cast<unsigned char>(page % 251 + 1); };
    const auto write_pages = [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t page = from; page < to; ++page) {
        __atomic_store_n(bytes + page * kPage, mark(page), __ATOMIC_RELAXED);
      }
    };
    const std::int64_t pages = 4 * kStep / kPage;
    write_pages(0, pages / 2);
    PageTouchOptions options = plenty();
    options.touch = way;
    const PageTouch touch(memory.mapping.data(), memory.mapping.bytes(), std::move(options));
    write_pages(pages / 2, pages);
    wait_for_end(touch);
    std::int64_t wrong = 0;
    for (std::int64_t page = 0; page < pages; ++page) {
      wrong += __atomic_load_n(bytes + page * kPage, __ATOMIC_RELAXED) != mark(page);
    }
    CHECK_EQ(wrong, 0);
  }
}

TEST(page_touch, every_byte_is_touched_once_by_whichever_thread) {
  std::vector<std::atomic<int>> calls(64);
  std::byte* const base = nullptr;
  const PageTouch touch(base, 64 * (2 << 20), pretended(4, [&](std::byte* at, std::int64_t bytes) {
                          const auto place = reinterpret_cast<std::uintptr_t>(at);
                          calls[place / (2 << 20)] += bytes == 2 << 20 ? 1 : 100;
                          return 0;
                        }));
  wait_for_end(touch);
  CHECK(std::all_of(calls.begin(), calls.end(), [](const auto& count) { return count == 1; }));
}

TEST(page_touch, dies_at_once_however_much_is_left) {
  // To its end this would take a month.
  std::atomic<int> calls{0};
  {
    const PageTouch touch(nullptr, std::int64_t{1} << 52,
                          pretended(4, [&](std::byte*, std::int64_t) {
                            ++calls;
                            std::this_thread::sleep_for(std::chrono::milliseconds(1));
                            return 0;
                          }));
    while (calls < 8) std::this_thread::yield();
    CHECK(touch.at_work());
  }
  CHECK(calls >= 8);
}

TEST(page_touch, ends_before_memory_gets_short) {
  std::atomic<std::int64_t> left{100 * kStep};
  PageTouchOptions options = pretended(1, [&](std::byte*, std::int64_t bytes) {
    left -= bytes;
    return 0;
  });
  options.keep_free_bytes = 97 * kStep;
  options.available = [&] { return left.load(); };
  const PageTouch touch(nullptr, 50 * kStep, std::move(options));
  wait_for_end(touch);
  CHECK_EQ(touch.touched_bytes(), 3 * kStep);
  CHECK_EQ(touch.refusal(), "touching ended after " + std::to_string(3 * kStep) + " bytes: " +
                                std::to_string(97 * kStep) + " bytes of memory are left, and " +
                                std::to_string(97 * kStep) + " are kept for others");
}

TEST(page_touch, says_what_the_kernel_refused) {
  std::atomic<int> calls{0};
  const PageTouch touch(nullptr, 50 * kStep, pretended(1, [&](std::byte*, std::int64_t) {
                          return ++calls == 3 ? ENOMEM : 0;
                        }));
  wait_for_end(touch);
  CHECK_EQ(touch.touched_bytes(), 4 << 20);
  CHECK_EQ(touch.refusal(),
           "touching ended after 4194304 bytes: the kernel says Cannot allocate memory");
}

TEST(page_touch, tells_once_that_its_time_is_over_and_goes_on) {
  std::atomic<int> told{0};
  PageTouchOptions options = pretended(3, [](std::byte*, std::int64_t) { return 0; });
  options.limit = std::chrono::seconds(0);
  options.at_limit = [&](std::byte* rest, std::int64_t bytes) {
    ++told;
    CHECK_EQ(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rest)) + bytes, 9 * kStep);
  };
  const PageTouch touch(nullptr, 9 * kStep, std::move(options));
  wait_for_end(touch);
  CHECK_EQ(told.load(), 1);
  CHECK_EQ(touch.touched_bytes(), 9 * kStep);
}

TEST(page_touch, its_threads_stand_back_and_take_no_signals) {
  std::atomic<int> priority{0};
  std::atomic<bool> blocked{false};
  const PageTouch touch(nullptr, kPage, pretended(1, [&](std::byte*, std::int64_t) {
                          priority = getpriority(PRIO_PROCESS, static_cast<id_t>(gettid()));
                          sigset_t now;
                          pthread_sigmask(SIG_SETMASK, nullptr, &now);
                          blocked = sigismember(&now, SIGINT) == 1;
                          return 0;
                        }));
  wait_for_end(touch);
  CHECK(priority >= 10);
  CHECK(blocked.load());
  sigset_t ours;
  pthread_sigmask(SIG_SETMASK, nullptr, &ours);
  CHECK_EQ(sigismember(&ours, SIGINT), 0);
}

TEST(page_touch, dies_in_a_forked_child_that_has_none_of_its_threads) {
  std::atomic<int> calls{0};
  auto touch = std::make_unique<PageTouch>(nullptr, std::int64_t{1} << 50,
                                           pretended(2, [&](std::byte*, std::int64_t) {
                                             ++calls;
                                             std::this_thread::yield();
                                             return 0;
                                           }));
  while (calls < 2) std::this_thread::yield();
  CHECK_EQ(in_child([&] {
             touch.reset();
             return "gone";
           }),
           "gone");
  CHECK(touch->at_work());
}

}  // namespace hscache::test
