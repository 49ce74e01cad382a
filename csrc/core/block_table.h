// The block ids of one request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/paged_view.h"

namespace hscache {

// The block ids of one request in token order, as 32 or 64 bit integers. Does not own them.
class BlockTable {
 public:
  constexpr BlockTable() = default;
  explicit constexpr BlockTable(std::span<const std::int64_t> ids)
      : ids64_(ids.data()), size_(static_cast<std::int64_t>(ids.size())) {}
  explicit constexpr BlockTable(std::span<const std::int32_t> ids)
      : ids32_(ids.data()), size_(static_cast<std::int64_t>(ids.size())) {}

  HSCACHE_HOST_DEVICE constexpr std::int64_t operator[](std::int64_t i) const {
    return ids64_ != nullptr ? ids64_[i] : ids32_[i];
  }
  HSCACHE_HOST_DEVICE constexpr std::int64_t size() const { return size_; }
  constexpr const void* data() const {
    return ids64_ != nullptr ? static_cast<const void*>(ids64_) : ids32_;
  }

 private:
  const std::int64_t* ids64_ = nullptr;
  const std::int32_t* ids32_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace hscache
