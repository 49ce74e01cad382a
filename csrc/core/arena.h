// One big mapping of host memory that everything pooled is carved from.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "core/extent_table.h"
#include "core/host_mapping.h"
#include "core/memory.h"
#include "core/page_touch.h"

namespace hscache {

// A snapshot. A refusal says why something asked for was not had; empty where it was.
struct ArenaStats {
  std::int64_t bytes = 0;
  std::int64_t touched_bytes = 0;  // by the background threads
  bool touching = false;           // they are still at it
  std::string touch_refusal;
  HugePages huge_pages = HugePages::kOff;
  std::string huge_pages_refusal;
  std::optional<int> numa_node;
  std::string numa_refusal;
};

// A private, memfd-backed mapping of `bytes` host memory. Pages are backed by the kernel when they
// are first touched, so that making one takes the same time at any size. Unmapped when it dies.
//
// Thread-safe. In a forked child, which shares the memory, everything but data(), bytes(),
// extents() and the destructor throws std::runtime_error.
class Arena {
 public:
  // Throws std::invalid_argument when `bytes` is not positive or exceeds `memory_limit` (what the
  // machine has; 0 asks the machine), std::system_error when the kernel refuses the mapping. Huge
  // pages that cannot be had are none: see stats().
  explicit Arena(std::int64_t bytes, std::int64_t memory_limit = 0,
                 HugePages huge_pages = HugePages::kOff);
  // Stops touching at once.
  ~Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return mapping_.data(); }
  std::int64_t bytes() const { return mapping_.bytes(); }

  // The memory for other processes to read with ArenaReader: none can write to it or resize it.
  // Closed with the arena. Throws std::runtime_error where the kernel cannot share that way.
  int fd() const;

  // Has pages that are not backed yet come from this NUMA node, as far as the kernel does: see
  // stats().
  void prefer_numa_node(int node);

  // Starts to touch all pages in the background, with a few threads that end by themselves. Less
  // than 32 MiB are not worth a thread. Advised huge pages are made for at most
  // `huge_pages_limit` (finding room for them may take the kernel long); what is not touched by
  // then gets plain ones. Ends, and says so, before memory gets short. The second call does
  // nothing.
  void touch_in_background(std::chrono::duration<double> huge_pages_limit);

  ArenaStats stats() const;

  // Which slot pool has which part of it.
  ExtentTable& extents() { return extents_; }

 private:
  void check_owner() const;

  const int owner_pid_;
  const HostMapping mapping_;
  ExtentTable extents_;
  mutable std::mutex mutex_;
  std::optional<int> numa_node_;
  std::string numa_refusal_;
  std::unique_ptr<PageTouch> touch_;  // dies before the mapping does
};

}  // namespace hscache
