#include "core/slot_pool.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace hscache {
namespace {

std::int64_t slots_that_fit(const Arena& arena, std::int64_t slot_bytes) {
  if (slot_bytes <= 0) {
    throw std::invalid_argument("slot size is " + std::to_string(slot_bytes) +
                                " bytes, must be positive: it is chunk_size times a row's bytes");
  }
  if (slot_bytes > arena.bytes()) {
    throw std::invalid_argument("a slot of " + std::to_string(slot_bytes) +
                                " bytes does not fit a pool of " + std::to_string(arena.bytes()) +
                                " bytes: set hscache_pool_bytes higher");
  }
  return arena.bytes() / slot_bytes;
}

}  // namespace

SlotPool::SlotPool(std::shared_ptr<Arena> arena, std::int64_t slot_bytes)
    : owner_pid_(getpid()),
      arena_(std::move(arena)),
      table_(arena_->extents()),
      slot_bytes_(slot_bytes),
      num_slots_(slots_that_fit(*arena_, slot_bytes)),
      free_(num_slots_),
      used_(num_slots_),
      used_across_(static_cast<std::size_t>(table_.count()), 0) {
  const std::lock_guard lock(table_.mutex());
  from_beginning_ = table_.pools()++ == 0;
}

SlotPool::~SlotPool() {
  // In a forked child the lock may be held by a thread that is not there.
  if (getpid() != owner_pid_) return;
  const std::lock_guard lock(table_.mutex());
  --table_.pools();
  for (std::int64_t extent = 0; extent < table_.count(); ++extent) {
    if (table_.owner(extent) == this) table_.set_owner(extent, nullptr);
  }
}

std::optional<std::vector<std::int64_t>> SlotPool::allocate(std::int64_t count) {
  check_owner();
  if (count < 0) {
    throw std::invalid_argument("cannot allocate " + std::to_string(count) +
                                " slots: ask for 0 or more");
  }
  const std::lock_guard lock(table_.mutex());
  std::vector<std::int64_t> taken;
  if (free_.count() < count) {
    if (count_free() < count) return std::nullopt;
    while (free_.count() < count) {
      const std::vector<std::int64_t> more = grow();
      taken.insert(taken.end(), more.begin(), more.end());
    }
  }
  std::vector<std::int64_t> slots;
  slots.reserve(static_cast<std::size_t>(count));
  for (std::int64_t slot = 0; count > 0; --count) {
    slot = free_.next(slot);
    slots.push_back(slot);
    use(slot);
  }
  // Taken for slots behind those that were used in the end.
  for (const std::int64_t extent : taken) {
    if (used_across_[static_cast<std::size_t>(extent)] == 0) give_back(extent);
  }
  return slots;
}

std::optional<std::int64_t> SlotPool::allocate_run(std::int64_t count) {
  check_owner();
  if (count < 1) {
    throw std::invalid_argument("cannot allocate a run of " + std::to_string(count) +
                                " slots: ask for 1 or more");
  }
  const std::lock_guard lock(table_.mutex());
  const auto first = find_run(count);
  if (!first) return std::nullopt;
  for (std::int64_t slot = *first; slot < *first + count; ++slot) {
    take_extents(slot);
    use(slot);
  }
  return first;
}

void SlotPool::free(const std::vector<std::int64_t>& slots) {
  check_owner();
  const std::lock_guard lock(table_.mutex());
  std::size_t done = 0;
  std::string refusal;
  for (; done < slots.size(); ++done) {
    const std::int64_t slot = slots[done];
    if (slot < 0 || slot >= num_slots_) {
      refusal = "slot " + std::to_string(slot) + " is not of this pool of " +
                std::to_string(num_slots_) + " slots";
      break;
    }
    if (!used_.contains(slot)) {
      refusal = "slot " + std::to_string(slot) + " is not allocated: it was given back already";
      break;
    }
    used_.erase(slot);
  }
  if (!refusal.empty()) {
    while (done > 0) used_.insert(slots[--done]);
    throw std::invalid_argument(refusal);
  }
  for (const std::int64_t slot : slots) {
    free_.insert(slot);
    const Range extents = extents_of(slot);
    for (std::int64_t extent = extents.begin; extent < extents.end; ++extent) {
      if (--used_across_[static_cast<std::size_t>(extent)] == 0) give_back(extent);
    }
  }
}

PagedView SlotPool::view(std::int64_t row_bytes) const {
  check_owner();
  if (row_bytes <= 0 || row_bytes > slot_bytes_) {
    throw std::invalid_argument("a row of " + std::to_string(row_bytes) +
                                " bytes does not fit a slot of " + std::to_string(slot_bytes_) +
                                " bytes");
  }
  return {.data = arena_->data(),
          .num_blocks = num_slots_,
          .num_layers = 1,
          .block_size = slot_bytes_ / row_bytes,
          .row_bytes = row_bytes,
          .block_stride = slot_bytes_,
          .layer_stride = 0,
          .token_stride = row_bytes};
}

std::int64_t SlotPool::num_free() const {
  check_owner();
  const std::lock_guard lock(table_.mutex());
  return count_free();
}

SlotPoolStats SlotPool::stats() const {
  check_owner();
  const std::lock_guard lock(table_.mutex());
  SlotPoolStats stats{.slots = num_slots_,
                      .used = used_.count(),
                      .free = count_free(),
                      .largest_free_run = 0,
                      .extents = 0,
                      .extent_bytes = table_.extent_bytes()};
  for (const Range& run : free_runs()) {
    stats.largest_free_run = std::max(stats.largest_free_run, run.size());
  }
  for (std::int64_t extent = 0; extent < table_.count(); ++extent) {
    stats.extents += table_.owner(extent) == this;
  }
  return stats;
}

void SlotPool::check_owner() const {
  if (getpid() != owner_pid_) {
    throw std::runtime_error(
        "the slot pool belongs to the parent process: open a store after fork(), not before");
  }
}

SlotPool::Range SlotPool::extents_of(std::int64_t slot) const {
  return {slot * slot_bytes_ / table_.extent_bytes(),
          ((slot + 1) * slot_bytes_ - 1) / table_.extent_bytes() + 1};
}

// The slots that have a byte in it.
SlotPool::Range SlotPool::slots_across(std::int64_t extent) const {
  return {std::min(num_slots_, table_.begin(extent) / slot_bytes_),
          std::min(num_slots_, (table_.end(extent) - 1) / slot_bytes_ + 1)};
}

// The slots that have no byte outside of the extents from `first` to `last`.
SlotPool::Range SlotPool::slots_inside(std::int64_t first, std::int64_t last) const {
  return {(table_.begin(first) + slot_bytes_ - 1) / slot_bytes_, table_.end(last) / slot_bytes_};
}

bool SlotPool::within_reach(std::int64_t extent) const {
  return table_.owner(extent) == this || table_.owner(extent) == nullptr;
}

// Runs of slots all of whose extents are this pool's or nobody's.
std::vector<SlotPool::Range> SlotPool::reachable() const {
  std::vector<Range> runs;
  for (std::int64_t extent = 0; extent < table_.count(); ++extent) {
    if (!within_reach(extent)) continue;
    const std::int64_t first = extent;
    while (extent + 1 < table_.count() && within_reach(extent + 1)) ++extent;
    const Range slots = slots_inside(first, extent);
    if (slots.begin < slots.end) runs.push_back(slots);
  }
  return runs;
}

std::vector<SlotPool::Range> SlotPool::free_runs() const {
  std::vector<Range> runs;
  for (const Range& slots : reachable()) {
    for (std::int64_t slot = used_.next_absent(slots.begin); slot < slots.end;) {
      const std::int64_t end = std::min(slots.end, used_.next(slot));
      runs.push_back({slot, end});
      slot = used_.next_absent(end);
    }
  }
  return runs;
}

std::int64_t SlotPool::count_free() const {
  // A store with a full pool asks again after each chunk that it evicts.
  if (table_.unowned() == 0) return free_.count();
  std::int64_t slots = -used_.count();
  for (const Range& run : reachable()) slots += run.size();
  return slots;
}

// How many extents of a slot nobody has yet; more than there are where another pool has one.
std::int64_t SlotPool::missing_extents(std::int64_t slot) const {
  std::int64_t missing = 0;
  const Range extents = extents_of(slot);
  for (std::int64_t extent = extents.begin; extent < extents.end; ++extent) {
    if (!within_reach(extent)) return std::numeric_limits<std::int64_t>::max();
    missing += table_.owner(extent) == nullptr;
  }
  return missing;
}

std::optional<std::int64_t> SlotPool::find_run(std::int64_t count) const {
  // Without another extent where that is possible.
  for (std::int64_t slot = free_.next(0); slot < num_slots_;) {
    const std::int64_t end = free_.next_absent(slot);
    if (end - slot >= count) return slot;
    slot = free_.next(end);
  }
  std::optional<std::int64_t> found;
  for (const Range& run : free_runs()) {
    if (run.size() < count) continue;
    if (from_beginning_) return run.begin;
    found = run.end - count;
  }
  return found;
}

// Takes the extents of one more slot, which somebody has made sure that there is. Returns them.
std::vector<std::int64_t> SlotPool::grow() {
  const auto ours = [this](std::int64_t extent) {
    return extent >= 0 && extent < table_.count() && table_.owner(extent) == this;
  };
  for (const bool beside : {true, false}) {
    for (std::int64_t i = 0; i < table_.count(); ++i) {
      const std::int64_t extent = from_beginning_ ? i : table_.count() - 1 - i;
      if (table_.owner(extent) != nullptr) continue;
      if (beside && !ours(extent - 1) && !ours(extent + 1)) continue;
      // Of the slots across this extent the first and the last may need its neighbours, and where
      // any needs none the second is one.
      const Range slots = slots_across(extent);
      std::int64_t best = -1;
      std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
      for (const std::int64_t slot : {slots.begin, slots.begin + 1, slots.end - 1}) {
        if (slot < slots.begin || slot >= slots.end) continue;
        if (const std::int64_t missing = missing_extents(slot); missing < fewest) {
          best = slot;
          fewest = missing;
        }
      }
      if (best >= 0) return take_extents(best);
    }
  }
  throw std::logic_error("a slot pool found no extent for a slot that it counted as free");
}

// Takes what a slot lies in and is not this pool's yet. Returns that.
std::vector<std::int64_t> SlotPool::take_extents(std::int64_t slot) {
  std::vector<std::int64_t> taken;
  const Range extents = extents_of(slot);
  for (std::int64_t extent = extents.begin; extent < extents.end; ++extent) {
    if (table_.owner(extent) == nullptr) {
      table_.set_owner(extent, this);
      taken.push_back(extent);
    }
  }
  for (const std::int64_t extent : taken) {
    const Range across = slots_across(extent);
    const Range inside = slots_inside(extent, extent);
    free_.insert(inside.begin, inside.end);
    for (const std::int64_t edge : {across.begin, across.end - 1}) {
      if (edge >= across.begin && missing_extents(edge) == 0) free_.insert(edge, edge + 1);
    }
  }
  return taken;
}

void SlotPool::give_back(std::int64_t extent) {
  table_.set_owner(extent, nullptr);
  const Range slots = slots_across(extent);
  free_.erase(slots.begin, slots.end);
}

void SlotPool::use(std::int64_t slot) {
  free_.erase(slot);
  used_.insert(slot);
  const Range extents = extents_of(slot);
  for (std::int64_t extent = extents.begin; extent < extents.end; ++extent) {
    ++used_across_[static_cast<std::size_t>(extent)];
  }
}

}  // namespace hscache
