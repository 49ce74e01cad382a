#include "core/slot_pool.h"

#include <stdexcept>
#include <string>

namespace hscache {

SlotPool::SlotPool(std::shared_ptr<Arena> arena, std::int64_t slot_bytes)
    : arena_(std::move(arena)), slot_bytes_(slot_bytes) {
  if (slot_bytes <= 0) {
    throw std::invalid_argument("slot size is " + std::to_string(slot_bytes) +
                                " bytes, must be positive: it is chunk_size times a row's bytes");
  }
  const std::int64_t count = arena_->bytes() / slot_bytes;
  if (count == 0) {
    throw std::invalid_argument("a slot of " + std::to_string(slot_bytes) +
                                " bytes does not fit a pool of " + std::to_string(arena_->bytes()) +
                                " bytes: set hscache_pool_bytes higher");
  }
  allocated_.resize(static_cast<std::size_t>(count), false);
  free_.reserve(static_cast<std::size_t>(count));
  for (std::int64_t slot = count - 1; slot >= 0; --slot) free_.push_back(slot);
}

std::optional<std::vector<std::int64_t>> SlotPool::allocate(std::int64_t count) {
  if (count < 0) {
    throw std::invalid_argument("cannot allocate " + std::to_string(count) +
                                " slots: ask for 0 or more");
  }
  const std::lock_guard lock(mutex_);
  if (static_cast<std::size_t>(count) > free_.size()) return std::nullopt;
  std::vector<std::int64_t> slots(free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - static_cast<std::size_t>(count));
  for (const std::int64_t slot : slots) allocated_[static_cast<std::size_t>(slot)] = true;
  return slots;
}

void SlotPool::free(const std::vector<std::int64_t>& slots) {
  const std::lock_guard lock(mutex_);
  std::size_t done = 0;
  std::string refusal;
  for (; done < slots.size(); ++done) {
    const std::int64_t slot = slots[done];
    if (slot < 0 || slot >= num_slots()) {
      refusal = "slot " + std::to_string(slot) + " is not of this pool of " +
                std::to_string(num_slots()) + " slots";
      break;
    }
    if (!allocated_[static_cast<std::size_t>(slot)]) {
      refusal = "slot " + std::to_string(slot) + " is not allocated: it was given back already";
      break;
    }
    allocated_[static_cast<std::size_t>(slot)] = false;
  }
  if (!refusal.empty()) {
    while (done > 0) allocated_[static_cast<std::size_t>(slots[--done])] = true;
    throw std::invalid_argument(refusal);
  }
  free_.insert(free_.end(), slots.rbegin(), slots.rend());
}

PagedView SlotPool::view(std::int64_t row_bytes) const {
  if (row_bytes <= 0 || row_bytes > slot_bytes_) {
    throw std::invalid_argument("a row of " + std::to_string(row_bytes) +
                                " bytes does not fit a slot of " + std::to_string(slot_bytes_) +
                                " bytes");
  }
  return {.data = arena_->data(),
          .num_blocks = num_slots(),
          .num_layers = 1,
          .block_size = slot_bytes_ / row_bytes,
          .row_bytes = row_bytes,
          .block_stride = slot_bytes_,
          .layer_stride = 0,
          .token_stride = row_bytes};
}

std::int64_t SlotPool::num_free() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(free_.size());
}

}  // namespace hscache
