#include "core/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/numa.h"

namespace hscache {
namespace {

constexpr std::int64_t kBytesPerThread = 32LL << 20;
// Zeroing pages is bound by memory, which a few cores exhaust, and the engine's own need some.
constexpr int kMostThreads = 8;
// The share of memory that touching leaves to others.
constexpr std::int64_t kKeptFree = 8;

int touching_threads(std::int64_t bytes) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const int most = std::clamp(cores / 2, 1, kMostThreads);
  return static_cast<int>(std::min<std::int64_t>(bytes / kBytesPerThread, most));
}

std::int64_t checked_size(std::int64_t bytes, std::int64_t memory_limit) {
  if (bytes <= 0) {
    throw std::invalid_argument("pool size is " + std::to_string(bytes) +
                                " bytes, must be positive: set hscache_pool_bytes");
  }
  const std::int64_t limit = memory_limit > 0 ? memory_limit : machine_memory_bytes();
  if (bytes > limit) {
    throw std::invalid_argument("pool size is " + std::to_string(bytes) +
                                " bytes, more than this machine's " + std::to_string(limit) +
                                " bytes of memory: set hscache_pool_bytes lower");
  }
  return bytes;
}

}  // namespace

Arena::Arena(std::int64_t bytes, std::int64_t memory_limit, HugePages huge_pages)
    : owner_pid_(getpid()),
      mapping_(checked_size(bytes, memory_limit), huge_pages),
      extents_(bytes) {}

int Arena::fd() const {
  check_owner();
  return mapping_.fd();
}

void Arena::prefer_numa_node(int node) {
  check_owner();
  const std::lock_guard lock(mutex_);
  numa_refusal_ = hscache::prefer_numa_node(data(), mapping_.mapped_bytes(), node);
  if (numa_refusal_.empty()) numa_node_ = node;
}

void Arena::touch_in_background(std::chrono::duration<double> huge_pages_limit) {
  check_owner();
  const std::lock_guard lock(mutex_);
  const int threads = touching_threads(bytes());
  if (threads == 0 || touch_) return;
  PageTouchOptions options;
  options.threads = threads;
  if (mapping_.huge_pages() == HugePages::kHugetlb) {
    // Set aside for this arena already: nobody else could have them.
    options.available = [] { return std::numeric_limits<std::int64_t>::max(); };
  } else {
    options.keep_free_bytes = machine_memory_bytes() / kKeptFree;
  }
  if (mapping_.huge_pages() == HugePages::kAdvise) {
    options.limit = huge_pages_limit;
    options.at_limit = [](std::byte* rest, std::int64_t rest_bytes) {
      static_cast<void>(madvise(rest, static_cast<std::size_t>(rest_bytes), MADV_NOHUGEPAGE));
    };
  }
  touch_ = std::make_unique<PageTouch>(data(), bytes(), std::move(options));
}

ArenaStats Arena::stats() const {
  check_owner();
  const std::lock_guard lock(mutex_);
  ArenaStats stats{.bytes = bytes(),
                   .touched_bytes = 0,
                   .touching = false,
                   .touch_refusal = {},
                   .huge_pages = mapping_.huge_pages(),
                   .huge_pages_refusal = mapping_.huge_pages_refusal(),
                   .numa_node = numa_node_,
                   .numa_refusal = numa_refusal_};
  if (touch_) {
    // In this order: what has ended is whole in the numbers read after it.
    stats.touching = touch_->at_work();
    stats.touched_bytes = touch_->touched_bytes();
    stats.touch_refusal = touch_->refusal();
  }
  return stats;
}

void Arena::check_owner() const {
  if (getpid() != owner_pid_) {
    throw std::runtime_error(
        "the arena belongs to the parent process: open a store after fork(), not before");
  }
}

}  // namespace hscache
