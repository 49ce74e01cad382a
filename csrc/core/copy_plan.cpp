#include "core/copy_plan.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

namespace hscache {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
// No memory is as large, and up to here neither offsets nor the steps between them overflow.
constexpr std::int64_t kMostExtent = kMost / 4;

std::string text(std::int64_t n) { return std::to_string(n); }

struct Axis {
  std::int64_t size = 0;
  std::int64_t stride = 0;
};

// Whether rows of `row_bytes` along these axes lie within kMostExtent bytes.
bool fits(std::int64_t row_bytes, std::initializer_list<Axis> axes) {
  std::int64_t left = kMostExtent - row_bytes;
  for (const Axis& axis : axes) {
    std::int64_t reach = 0;
    if (axis.size < 2) continue;
    if (__builtin_mul_overflow(axis.size - 1, axis.stride, &reach)) return false;
    if (reach > left || reach < -left) return false;
    left -= reach < 0 ? -reach : reach;
  }
  return left >= 0;
}

// Makes a plan of pieces that come in order.
class Planner {
 public:
  void add(CopySpan next) {
    // Pieces without a gap on either side are one piece.
    if (next.count > 1 && next.paged_step == next.bytes && next.rows_step == next.bytes) {
      next.bytes *= next.count;
      next.count = 1;
    }
    if (next.count == 1) next.paged_step = next.rows_step = 0;
    const bool touches = next_.count == 1 && next.count == 1 &&
                         next.paged_offset == next_.paged_offset + next_.bytes &&
                         next.rows_offset == next_.rows_offset + next_.bytes;
    if (touches) {
      next_.bytes += next.bytes;
      return;
    }
    flush();
    next_ = next;
  }

  std::vector<CopySpan> finish() {
    flush();
    return std::move(plan_);
  }

 private:
  // Puts `next_`, which has its final length now, into the plan: it makes the last span longer
  // where the two describe one pattern. Not earlier, or a step would part what lies side by side.
  void flush() {
    if (next_.count == 0) return;
    if (!plan_.empty() && plan_.back().bytes == next_.bytes) {
      CopySpan& last = plan_.back();
      const std::int64_t paged_gap = next_.paged_offset - last.paged_offset;
      const std::int64_t rows_gap = next_.rows_offset - last.rows_offset;
      // A lone piece takes on the step of what it joins.
      const CopySpan& stepped = last.count > 1 ? last : next_;
      const bool both_lone = stepped.count == 1;
      const std::int64_t paged_step = both_lone ? paged_gap : stepped.paged_step;
      const std::int64_t rows_step = both_lone ? rows_gap : stepped.rows_step;
      const bool continues =
          paged_gap == last.count * paged_step && rows_gap == last.count * rows_step &&
          (next_.count == 1 || (next_.paged_step == paged_step && next_.rows_step == rows_step));
      if (continues) {
        last.paged_step = paged_step;
        last.rows_step = rows_step;
        last.count += next_.count;
        return;
      }
    }
    plan_.push_back(next_);
  }

  std::vector<CopySpan> plan_;
  CopySpan next_{.count = 0};  // may grow
};

// One pass over the blocks for `row_bytes` at a fixed place in each token.
void plan_pass(Planner& plan, const PagedView& view, const BlockTable& blocks, std::int64_t start,
               std::int64_t length, const RowsView& rows, std::int64_t layer,
               std::int64_t row_bytes) {
  std::int64_t token = start;
  while (token < start + length) {
    const std::int64_t in_block = token % view.block_size;
    const std::int64_t take = std::min(view.block_size - in_block, start + length - token);
    const std::int64_t block = blocks[token / view.block_size];
    plan.add({.paged_offset = view.offset(block, layer, in_block),
              .rows_offset = rows.offset(token - start, layer),
              .bytes = row_bytes,
              .count = take,
              .paged_step = view.token_stride,
              .rows_step = rows.token_stride});
    token += take;
  }
}

}  // namespace

void check_reach(const PagedView& view, std::int64_t num_ids, std::int64_t start,
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
  // A view of stride 0 may claim any block size, and start + length may overflow too.
  const std::int64_t covered =
      num_ids > kMost / view.block_size ? kMost : num_ids * view.block_size;
  if (start > covered || length > covered - start) {
    throw std::out_of_range("start " + text(start) + " and length " + text(length) +
                            " reach beyond the " + text(covered) + " tokens of a table of " +
                            text(num_ids) + " blocks of " + text(view.block_size) +
                            ": pass a longer block table or a shorter range");
  }
  if (view.num_layers > 0 && !fits(view.row_bytes, {{view.num_blocks, view.block_stride},
                                                    {view.num_layers, view.layer_stride},
                                                    {view.block_size, view.token_stride}})) {
    throw std::invalid_argument("paged view with strides of " + text(view.block_stride) + ", " +
                                text(view.layer_stride) + " and " + text(view.token_stride) +
                                " bytes reaches beyond " + text(kMostExtent) +
                                " bytes: pass the strides of memory that exists");
  }
}

void check_range(const PagedView& view, const BlockTable& blocks, std::int64_t start,
                 std::int64_t length) {
  check_reach(view, blocks.size(), start, length);
  if (length == 0) return;
  const std::int64_t last = (start + length - 1) / view.block_size;
  for (std::int64_t i = start / view.block_size; i <= last; ++i) {
    const std::int64_t block = blocks[i];
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
  if (length == 0 || view.num_layers == 0) return {};
  // Strides of 0 may claim any number of rows, on both sides.
  if (length > kMostExtent / view.row_bytes / view.num_layers) {
    throw std::invalid_argument("length " + text(length) + " of " + text(view.num_layers) +
                                " layers of " + text(view.row_bytes) + "-byte rows is more than " +
                                text(kMostExtent) + " bytes: pass a shorter range");
  }
  if (!fits(view.row_bytes, {{length, rows.token_stride}, {view.num_layers, rows.layer_stride}})) {
    throw std::invalid_argument("rows with strides of " + text(rows.token_stride) + " and " +
                                text(rows.layer_stride) + " bytes reach beyond " +
                                text(kMostExtent) +
                                " bytes: pass the strides of memory that exists");
  }
  Planner plan;
  const bool layers_touch = view.num_layers == 1 || (view.layer_stride == view.row_bytes &&
                                                     rows.layer_stride == view.row_bytes);
  if (layers_touch) {
    // A token's layers lie side by side on both sides: a token is one row.
    plan_pass(plan, view, blocks, start, length, rows, 0, view.row_bytes * view.num_layers);
    return plan.finish();
  }
  for (std::int64_t layer = 0; layer < view.num_layers; ++layer) {
    plan_pass(plan, view, blocks, start, length, rows, layer, view.row_bytes);
  }
  return plan.finish();
}

}  // namespace hscache
