// An arena's division into slots of one size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/arena.h"
#include "core/paged_view.h"

namespace hscache {

// Fixed-size slots carved out of an arena. Slots are numbered from 0 in address order. All methods
// are thread-safe; allocate and free take time in proportion to the slots asked for.
class SlotPool {
 public:
  // Throws std::invalid_argument when `slot_bytes` is not positive or no slot fits the arena.
  SlotPool(std::shared_ptr<Arena> arena, std::int64_t slot_bytes);

  // All `count` slots or none: returns nullopt when fewer are free. Slots never used before come
  // in address order, so that a request's chunks lie side by side in a fresh pool. Throws
  // std::invalid_argument when `count` is negative.
  std::optional<std::vector<std::int64_t>> allocate(std::int64_t count);

  // Gives slots back, all or none. Throws std::invalid_argument for a slot that is not of this
  // pool or not allocated (given back twice).
  void free(const std::vector<std::int64_t>& slots);

  // The slots as paged memory of one layer: slot i is block i of `slot_bytes / row_bytes` tokens.
  // Throws std::invalid_argument when `row_bytes` does not fit a slot.
  PagedView view(std::int64_t row_bytes) const;

  std::int64_t slot_bytes() const { return slot_bytes_; }
  std::int64_t num_slots() const { return static_cast<std::int64_t>(allocated_.size()); }
  std::int64_t num_free() const;

 private:
  const std::shared_ptr<Arena> arena_;
  const std::int64_t slot_bytes_;
  mutable std::mutex mutex_;
  std::vector<bool> allocated_;
  std::vector<std::int64_t> free_;  // last one is handed out next
};

}  // namespace hscache
