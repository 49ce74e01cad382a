// Has the kernel back a mapping's pages in the background, before somebody needs them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/memory.h"

namespace hscache {

// Has the kernel back `bytes` from `data` on, a page boundary, and leaves what is written there as
// it is, also when somebody writes meanwhile. Returns 0, or the errno of a refusal.
int populate_pages(std::byte* data, std::int64_t bytes);
// The same for kernels that cannot be asked (before Linux 5.14), by adding 0 to a byte of each
// page.
int touch_each_page(std::byte* data, std::int64_t bytes);

struct PageTouchOptions {
  int threads = 1;
  // Touching ends where less than this would be left for others: an untouched page costs its first
  // writer a fault, one page too many costs somebody their life.
  std::int64_t keep_free_bytes = 0;
  // After so long `at_limit` is called once, by the thread that notices, with all that lies behind
  // the place where touching has come to.
  std::optional<std::chrono::duration<double>> limit;
  std::function<void(std::byte* rest, std::int64_t bytes)> at_limit;
  std::function<int(std::byte* data, std::int64_t bytes)> touch = populate_pages;
  std::function<std::int64_t()> available = [] { return available_memory_bytes(); };
};

// Touches memory from its beginning on, with a few threads of low priority that end when all is
// touched. The memory must outlive it. Thread-safe. In a forked child it may only die.
class PageTouch {
 public:
  PageTouch(std::byte* data, std::int64_t bytes, PageTouchOptions options);
  // Stops at once: waits for what a thread touches in one call, 2 MiB. In a forked child it leaks
  // on purpose: the threads that use what it holds are not there to end.
  ~PageTouch();
  PageTouch(const PageTouch&) = delete;
  PageTouch& operator=(const PageTouch&) = delete;

  std::int64_t touched_bytes() const;
  // Whether a thread is still at it.
  bool at_work() const;
  // Why touching ended before all was touched; empty otherwise.
  std::string refusal() const;

 private:
  struct Work;

  const int owner_pid_;
  std::unique_ptr<Work> work_;
};

}  // namespace hscache
