// Which pool has which part of an arena.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace hscache {

class SlotPool;

// An arena cut into extents of one size, the last of which may be shorter. Each belongs to one pool
// or to none, so that pools with slots of different sizes share one arena without a fixed division.
// Everything but the sizes is for who holds the mutex, which guards what the pools keep about their
// extents as well.
class ExtentTable {
 public:
  // An extent is a 64th of the arena, but 2 MiB at least and 64 MiB at most.
  explicit ExtentTable(std::int64_t arena_bytes);

  std::int64_t count() const { return static_cast<std::int64_t>(owners_.size()); }
  std::int64_t extent_bytes() const { return extent_bytes_; }
  // Where an extent begins and ends in the arena, in bytes.
  std::int64_t begin(std::int64_t extent) const { return extent * extent_bytes_; }
  std::int64_t end(std::int64_t extent) const;

  std::mutex& mutex() { return mutex_; }
  // Null where nobody has it.
  const SlotPool* owner(std::int64_t extent) const {
    return owners_[static_cast<std::size_t>(extent)];
  }
  void set_owner(std::int64_t extent, const SlotPool* pool);
  // Extents that nobody has.
  std::int64_t unowned() const { return unowned_; }
  // Pools there are.
  std::int64_t& pools() { return pools_; }

 private:
  const std::int64_t arena_bytes_;
  const std::int64_t extent_bytes_;
  std::mutex mutex_;
  std::vector<const SlotPool*> owners_;
  std::int64_t unowned_;
  std::int64_t pools_ = 0;
};

}  // namespace hscache
