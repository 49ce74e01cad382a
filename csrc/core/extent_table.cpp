#include "core/extent_table.h"

#include <algorithm>

namespace hscache {
namespace {

constexpr std::int64_t kLeastBytes = 2LL << 20;
constexpr std::int64_t kMostBytes = 64LL << 20;
constexpr std::int64_t kParts = 64;

}  // namespace

ExtentTable::ExtentTable(std::int64_t arena_bytes)
    : arena_bytes_(arena_bytes),
      // A multiple of the least size, so that huge pages are not shared.
      extent_bytes_(
          std::clamp(arena_bytes / kParts / kLeastBytes * kLeastBytes, kLeastBytes, kMostBytes)),
      owners_(static_cast<std::size_t>((arena_bytes - 1) / extent_bytes_ + 1), nullptr),
      unowned_(count()) {}

std::int64_t ExtentTable::end(std::int64_t extent) const {
  return std::min(begin(extent + 1), arena_bytes_);
}

void ExtentTable::set_owner(std::int64_t extent, const SlotPool* pool) {
  unowned_ += (pool == nullptr) - (owner(extent) == nullptr);
  owners_[static_cast<std::size_t>(extent)] = pool;
}

}  // namespace hscache
