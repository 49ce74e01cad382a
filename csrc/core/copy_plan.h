// From a token range and a block table to the fewest copies.
#pragma once

#include <cstdint>
#include <vector>

#include "core/block_table.h"
#include "core/paged_view.h"

namespace hscache {

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

// Checks that tokens `[start, start + length)` lie inside a table of `num_ids` blocks. Throws
// std::invalid_argument (negative start or length, a view that makes no sense or is larger than any
// memory) or std::out_of_range.
void check_reach(const PagedView& view, std::int64_t num_ids, std::int64_t start,
                 std::int64_t length);

// As check_reach(), and checks that every block that the tokens touch lies inside `view`.
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
