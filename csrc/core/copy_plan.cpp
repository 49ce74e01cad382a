#include "core/copy_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hscache {
namespace {

std::string text(std::int64_t n) { return std::to_string(n); }

// Appends `next` to the plan, growing the last span instead where the two describe one pattern.
void append(std::vector<CopySpan>& plan, CopySpan next) {
  // Pieces without a gap on either side are one piece.
  if (next.count > 1 && next.paged_step == next.bytes && next.rows_step == next.bytes) {
    next.bytes *= next.count;
    next.count = 1;
  }
  if (plan.empty()) {
    plan.push_back(next);
    return;
  }
  CopySpan& last = plan.back();
  const std::int64_t paged_gap = next.paged_offset - last.paged_offset;
  const std::int64_t rows_gap = next.rows_offset - last.rows_offset;
  if (last.count == 1 && next.count == 1 && paged_gap == last.bytes && rows_gap == last.bytes) {
    last.bytes += next.bytes;
    return;
  }
  if (last.bytes == next.bytes) {
    // A lone piece takes on the step of what it joins.
    const std::int64_t paged_step = last.count > 1   ? last.paged_step
                                    : next.count > 1 ? next.paged_step
                                                     : paged_gap;
    const std::int64_t rows_step = last.count > 1   ? last.rows_step
                                   : next.count > 1 ? next.rows_step
                                                    : rows_gap;
    const bool continues = paged_gap == last.count * paged_step &&
                           rows_gap == last.count * rows_step &&
                           (next.count == 1 ||
                            (next.paged_step == paged_step && next.rows_step == rows_step));
    if (continues) {
      last.paged_step = paged_step;
      last.rows_step = rows_step;
      last.count += next.count;
      return;
    }
  }
  plan.push_back(next);
}

// One pass over the blocks for `row_bytes` at a fixed place in each token.
void plan_pass(std::vector<CopySpan>& plan, const PagedView& view, const BlockTable& blocks,
               std::int64_t start, std::int64_t length, const RowsView& rows, std::int64_t layer,
               std::int64_t row_bytes) {
  std::int64_t token = start;
  while (token < start + length) {
    const std::int64_t in_block = token % view.block_size;
    const std::int64_t take = std::min(view.block_size - in_block, start + length - token);
    const std::int64_t block = blocks[static_cast<std::size_t>(token / view.block_size)];
    append(plan, {.paged_offset = view.offset(block, layer, in_block),
                  .rows_offset = rows.offset(token - start, layer),
                  .bytes = row_bytes,
                  .count = take,
                  .paged_step = take > 1 ? view.token_stride : 0,
                  .rows_step = take > 1 ? rows.token_stride : 0});
    token += take;
  }
}

}  // namespace

void check_range(const PagedView& view, const BlockTable& blocks, std::int64_t start,
                 std::int64_t length) {
  if (view.num_blocks < 0 || view.num_layers < 0 || view.block_size < 1 || view.row_bytes < 1) {
    throw std::invalid_argument(
        "paged view [" + text(view.num_blocks) + " blocks, " + text(view.num_layers) + " layers, " +
        text(view.block_size) + " tokens] of " + text(view.row_bytes) +
        "-byte rows: block_size and row bytes must be at least 1 and the rest not negative");
  }
  if (start < 0) {
    throw std::invalid_argument("start is " + text(start) +
                                ", must be 0 or more: pass the first token's position");
  }
  if (length < 0) {
    throw std::invalid_argument("length is " + text(length) +
                                ", must be 0 or more: pass the number of tokens");
  }
  if (length == 0) return;
  // Compared this way round because start + length may overflow.
  const std::int64_t covered = blocks.size() * view.block_size;
  if (start > covered || length > covered - start) {
    throw std::out_of_range("start " + text(start) + " and length " + text(length) +
                            " reach beyond the " + text(covered) + " tokens of a table of " +
                            text(blocks.size()) + " blocks of " + text(view.block_size) +
                            ": pass a longer block table or a shorter range");
  }
  const std::int64_t last = (start + length - 1) / view.block_size;
  for (std::int64_t i = start / view.block_size; i <= last; ++i) {
    const std::int64_t block = blocks[static_cast<std::size_t>(i)];
    if (block < 0 || block >= view.num_blocks) {
      throw std::out_of_range("block_ids[" + text(i) + "] is " + text(block) +
                              ", outside the paged cache's " + text(view.num_blocks) +
                              " blocks: pass ids from 0 to " + text(view.num_blocks - 1));
    }
  }
}

std::vector<CopySpan> plan_copy(const PagedView& view, const BlockTable& blocks, std::int64_t start,
                                std::int64_t length, const RowsView& rows) {
  check_range(view, blocks, start, length);
  std::vector<CopySpan> plan;
  if (length == 0 || view.num_layers == 0) return plan;
  const bool layers_touch =
      view.num_layers == 1 ||
      (view.layer_stride == view.row_bytes && rows.layer_stride == view.row_bytes);
  if (layers_touch) {
    // A token's layers lie side by side on both sides: a token is one row.
    plan_pass(plan, view, blocks, start, length, rows, 0, view.row_bytes * view.num_layers);
    return plan;
  }
  for (std::int64_t layer = 0; layer < view.num_layers; ++layer) {
    plan_pass(plan, view, blocks, start, length, rows, layer, view.row_bytes);
  }
  return plan;
}

}  // namespace hscache
