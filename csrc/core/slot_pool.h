// Slots of one size, carved out of an arena.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/arena.h"
#include "core/paged_view.h"
#include "core/slot_set.h"

namespace hscache {

// A snapshot of a pool.
struct SlotPoolStats {
  std::int64_t slots = 0;  // as many as the whole arena has room for
  std::int64_t used = 0;
  std::int64_t free = 0;              // that can be allocated now
  std::int64_t largest_free_run = 0;  // of neighbours
  std::int64_t extents = 0;           // that are this pool's, each of extent_bytes
  std::int64_t extent_bytes = 0;

  // The share of the free slots that lie outside of the largest run; 0 where none is free.
  double fragmentation() const {
    return free == 0 ? 0.0
                     : 1.0 - static_cast<double>(largest_free_run) / static_cast<double>(free);
  }
};

// Fixed-size slots in an arena that pools with slots of other sizes may share: slot i lies
// `i * slot_bytes` behind its beginning. A pool takes an extent of the arena when it needs room,
// beside one that it has where it can, and gives it back when all slots in it are free. The first
// pool grows from the arena's beginning, the others from its end. A slot across the boundary of two
// extents is there while the pool has both.
//
// Thread-safe. A slot takes a few steps to allocate or free; an extent that is taken or given back
// takes time in proportion to its slots, 64 a step, and to the arena's extents. In a forked child,
// which shares the memory, all but slot_bytes(), num_slots() and the destructor throw
// std::runtime_error.
class SlotPool {
 public:
  // Throws std::invalid_argument when `slot_bytes` is not positive or no slot fits the arena.
  SlotPool(std::shared_ptr<Arena> arena, std::int64_t slot_bytes);
  // Whatever is allocated counts as given back.
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // All `count` slots or none: returns nullopt when fewer are free. Those in the extents that the
  // pool has come first, in address order, so that a request's chunks lie side by side in a fresh
  // pool. Throws std::invalid_argument when `count` is negative.
  std::optional<std::vector<std::int64_t>> allocate(std::int64_t count);

  // `count` neighbours: returns the first of them, or nullopt where no run is as long. Takes time
  // in proportion to the pool's slots, 64 a step, at worst. Throws std::invalid_argument when
  // `count` is below 1.
  std::optional<std::int64_t> allocate_run(std::int64_t count);

  // Gives slots back, all or none. Throws std::invalid_argument for a slot that is not of this
  // pool or not allocated (given back twice).
  void free(const std::vector<std::int64_t>& slots);

  // The slots as paged memory of one layer: slot i is block i of `slot_bytes / row_bytes` tokens.
  // Throws std::invalid_argument when `row_bytes` does not fit a slot.
  PagedView view(std::int64_t row_bytes) const;

  std::int64_t slot_bytes() const { return slot_bytes_; }
  std::int64_t num_slots() const { return num_slots_; }
  // Slots that can be allocated now: those in extents that are this pool's or nobody's.
  std::int64_t num_free() const;
  SlotPoolStats stats() const;

 private:
  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::int64_t size() const { return end - begin; }
  };

  void check_owner() const;
  Range extents_of(std::int64_t slot) const;
  Range slots_across(std::int64_t extent) const;
  Range slots_inside(std::int64_t first, std::int64_t last) const;
  bool within_reach(std::int64_t extent) const;
  std::vector<Range> reachable() const;
  std::vector<Range> free_runs() const;
  std::int64_t count_free() const;
  std::int64_t missing_extents(std::int64_t slot) const;
  std::optional<std::int64_t> find_run(std::int64_t count) const;

  // These change what there is.
  std::vector<std::int64_t> grow();
  std::vector<std::int64_t> take_extents(std::int64_t slot);
  void give_back(std::int64_t extent);
  void use(std::int64_t slot);

  const int owner_pid_;
  const std::shared_ptr<Arena> arena_;
  ExtentTable& table_;  // the arena's; its mutex guards all that follows
  const std::int64_t slot_bytes_;
  const std::int64_t num_slots_;
  bool from_beginning_ = true;
  SlotSet free_;                           // in extents that are ours
  SlotSet used_;                           // an extent that is ours has at least one
  std::vector<std::int64_t> used_across_;  // by extent
};

}  // namespace hscache
