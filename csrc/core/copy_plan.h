// From a token range and a block table to the fewest copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/paged_view.h"

namespace hscache {

// The block ids of one request in token order, as 32 or 64 bit integers. Does not own them.
class BlockTable {
 public:
  explicit BlockTable(std::span<const std::int64_t> ids) : ids64_(ids.data()), size_(ids.size()) {}
  explicit BlockTable(std::span<const std::int32_t> ids) : ids32_(ids.data()), size_(ids.size()) {}

  std::int64_t operator[](std::size_t i) const { return ids64_ != nullptr ? ids64_[i] : ids32_[i]; }
  std::int64_t size() const { return static_cast<std::int64_t>(size_); }

 private:
  const std::int64_t* ids64_ = nullptr;
  const std::int32_t* ids32_ = nullptr;
  std::size_t size_ = 0;
};

// `count` pieces of `bytes` contiguous bytes each, at a constant step on either side. Offsets are
// relative to the data pointers of the two views that were planned.
struct CopySpan {
  std::int64_t paged_offset = 0;
  std::int64_t rows_offset = 0;
  std::int64_t bytes = 0;
  std::int64_t count = 1;
  std::int64_t paged_step = 0;
  std::int64_t rows_step = 0;

  bool operator==(const CopySpan&) const = default;
};

// Checks that tokens `[start, start + length)` lie inside `blocks` and that every block that they
// touch lies inside `view`. Throws std::invalid_argument (negative start or length, a view that
// makes no sense or is larger than any memory) or std::out_of_range (table too short, block id
// outside the view).
void check_range(const PagedView& view, const BlockTable& blocks, std::int64_t start,
                 std::int64_t length);

// Plans the copy between tokens `[start, start + length)` of a request in `view`, all layers, and
// `rows`, where the first of these tokens is row 0. The same plan serves both directions.
//
// Rows that lie side by side on both sides become one piece, also across neighbouring blocks;
// pieces at a constant step become one span. Checks its arguments as check_range() does, and the
// strides of `rows` and the bytes to copy likewise.
// Thread-safe. Memory: at most one span for each block and layer, 48 bytes each.
std::vector<CopySpan> plan_copy(const PagedView& view, const BlockTable& blocks, std::int64_t start,
                                std::int64_t length, const RowsView& rows);

}  // namespace hscache
