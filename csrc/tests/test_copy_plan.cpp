#include <cstdint>
#include <limits>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/copy_plan.h"
#include "core/host_copy.h"
#include "tests/harness.h"
#include "tests/layouts.h"

namespace hscache {

std::ostream& operator<<(std::ostream& out, const CopySpan& span) {
  return out << "{" << span.paged_offset << ">" << span.rows_offset << " " << span.bytes << "x"
             << span.count << " +" << span.paged_step << "/" << span.rows_step << "}";
}

std::ostream& operator<<(std::ostream& out, const std::vector<CopySpan>& plan) {
  for (const CopySpan& span : plan) out << span;
  return out;
}

namespace test {
namespace {

using Ids = std::vector<std::int64_t>;
using Plan = std::vector<CopySpan>;

constexpr std::int64_t kRow = 8;
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// 16 blocks of 4 tokens and 3 layers: `[block, token, layer]` in memory.
PagedView token_major() { return {nullptr, 16, 3, 4, kRow, 4 * 3 * kRow, kRow, 3 * kRow}; }
// `[block, layer, token]`.
PagedView layer_major() { return {nullptr, 16, 3, 4, kRow, 3 * 4 * kRow, 4 * kRow, kRow}; }
// `[layer, block, token]`: the layer is the outermost axis.
PagedView layers_outermost() { return {nullptr, 16, 3, 4, kRow, 4 * kRow, 16 * 4 * kRow, kRow}; }

RowsView packed(const PagedView& view) {
  return {nullptr, view.num_layers * view.row_bytes, view.row_bytes};
}

Plan plan_of(const PagedView& view, const Ids& ids, std::int64_t start, std::int64_t length) {
  return plan_copy(view, BlockTable{std::span<const std::int64_t>(ids)}, start, length,
                   packed(view));
}

// Whether the plan's author missed that `next` goes on where `last` ends.
bool joinable(const CopySpan& last, const CopySpan& next) {
  const std::int64_t paged_gap = next.paged_offset - last.paged_offset;
  const std::int64_t rows_gap = next.rows_offset - last.rows_offset;
  if (last.count == 1 && next.count == 1) return last.bytes == next.bytes;
  const CopySpan& stepped = last.count > 1 ? last : next;
  return last.bytes == next.bytes && paged_gap == last.count * stepped.paged_step &&
         rows_gap == last.count * stepped.rows_step &&
         (next.count == 1 ||
          (next.paged_step == stepped.paged_step && next.rows_step == stepped.rows_step));
}

// Runs of rows that lie side by side on both sides, rows taken in the order of the plan.
std::int64_t runs_of_rows(const Plan& plan, std::int64_t row_bytes) {
  std::int64_t runs = 0;
  std::int64_t paged_end = -1;
  std::int64_t rows_end = -1;
  for (const CopySpan& span : plan) {
    for (std::int64_t piece = 0; piece < span.count; ++piece) {
      for (std::int64_t byte = 0; byte < span.bytes; byte += row_bytes) {
        const std::int64_t from = span.paged_offset + piece * span.paged_step + byte;
        const std::int64_t to = span.rows_offset + piece * span.rows_step + byte;
        if (from != paged_end || to != rows_end) ++runs;
        paged_end = from + row_bytes;
        rows_end = to + row_bytes;
      }
    }
  }
  return runs;
}

}  // namespace

TEST(copy_plan, token_major_block_is_one_piece) {
  CHECK_EQ(plan_of(token_major(), {5}, 0, 4), (Plan{{5 * 96, 0, 96, 1, 0, 0}}));
}

TEST(copy_plan, neighbouring_blocks_are_one_piece) {
  CHECK_EQ(plan_of(token_major(), {5, 6, 7}, 0, 12), (Plan{{5 * 96, 0, 3 * 96, 1, 0, 0}}));
}

TEST(copy_plan, blocks_at_a_constant_step_are_one_span) {
  CHECK_EQ(plan_of(token_major(), {1, 4, 7}, 0, 12), (Plan{{96, 0, 96, 3, 3 * 96, 96}}));
}

TEST(copy_plan, a_step_does_not_part_blocks_that_touch) {
  // Blocks 2, 3 and 4 lie side by side; that 0 and 2 make a step must not take 2 out of the run.
  CHECK_EQ(plan_of(token_major(), {0, 2, 3, 4}, 0, 16),
           (Plan{{0, 0, 96, 1, 0, 0}, {2 * 96, 96, 3 * 96, 1, 0, 0}}));
}

TEST(copy_plan, pairs_of_blocks_at_a_constant_step_are_one_span) {
  CHECK_EQ(plan_of(token_major(), {0, 1, 6, 7, 12, 13}, 0, 24),
           (Plan{{0, 0, 2 * 96, 3, 6 * 96, 2 * 96}}));
}

TEST(copy_plan, first_and_last_block_are_taken_in_part) {
  CHECK_EQ(plan_of(token_major(), {3, 9}, 2, 3),
           (Plan{{3 * 96 + 2 * 24, 0, 48, 1, 0, 0}, {9 * 96, 48, 24, 1, 0, 0}}));
}

TEST(copy_plan, layer_major_block_is_one_span_for_each_layer) {
  CHECK_EQ(plan_of(layer_major(), {2}, 0, 4), (Plan{{192, 0, kRow, 4, kRow, 24},
                                                    {192 + 32, 8, kRow, 4, kRow, 24},
                                                    {192 + 64, 16, kRow, 4, kRow, 24}}));
}

TEST(copy_plan, outermost_layer_joins_neighbouring_blocks_of_a_layer) {
  CHECK_EQ(plan_of(layers_outermost(), {2, 3}, 0, 8), (Plan{{64, 0, kRow, 8, kRow, 24},
                                                            {64 + 512, 8, kRow, 8, kRow, 24},
                                                            {64 + 1024, 16, kRow, 8, kRow, 24}}));
}

TEST(copy_plan, one_layer_of_outermost_layers_is_one_piece) {
  CHECK_EQ(plan_of(layers_outermost().layers(0, 1), {2, 3}, 1, 7),
           (Plan{{64 + kRow, 0, 7 * kRow, 1, 0, 0}}));
}

TEST(copy_plan, padded_pages_are_one_span) {
  PagedView view = token_major();
  view.block_stride += 40;
  CHECK_EQ(plan_of(view, {1, 2, 3}, 0, 12), (Plan{{136, 0, 96, 3, 136, 96}}));
}

TEST(copy_plan, padded_tokens_go_on_into_the_next_block) {
  PagedView view = token_major().layers(0, 1);  // 8 of every 24 bytes
  CHECK_EQ(plan_of(view, {1, 2}, 0, 8), (Plan{{96, 0, kRow, 8, 24, kRow}}));
}

TEST(copy_plan, one_token_head_and_tail_take_on_the_step) {
  PagedView view = token_major().layers(0, 1);
  CHECK_EQ(plan_of(view, {1, 2, 3}, 3, 6), (Plan{{96 + 72, 0, kRow, 6, 24, kRow}}));
}

TEST(copy_plan, one_token_joins_its_layers_at_their_step) {
  CHECK_EQ(plan_of(layer_major(), {2}, 1, 1), (Plan{{192 + kRow, 0, kRow, 3, 32, kRow}}));
}

TEST(copy_plan, two_pieces_do_not_lend_their_step_to_a_block_with_another) {
  // One layer's last token and the next one's first are 272 and 8 bytes apart, and twice that from
  // a block whose own tokens are 16 and 8 apart.
  const PagedView view{nullptr, 4, 2, 4, kRow, 160, 64, 16};
  const Ids ids{1, 3, 0};
  CHECK_EQ(plan_copy(view, BlockTable{std::span<const std::int64_t>(ids)}, 3, 6,
                     {nullptr, kRow, 6 * kRow}),
           (Plan{{208, 0, kRow, 1, 0, 0},
                 {480, 8, kRow, 4, 16, 8},
                 {0, 40, kRow, 2, 272, 8},
                 {544, 56, kRow, 4, 16, 8},
                 {64, 88, kRow, 1, 0, 0}}));
}

TEST(copy_plan, block_size_one) {
  PagedView view{nullptr, 16, 1, 1, kRow, kRow, 0, kRow};
  CHECK_EQ(plan_of(view, {4, 5, 6, 7}, 1, 3), (Plan{{5 * kRow, 0, 3 * kRow, 1, 0, 0}}));
  CHECK_EQ(plan_of(view, {9, 6, 3}, 0, 3), (Plan{{9 * kRow, 0, kRow, 3, -3 * kRow, kRow}}));
}

TEST(copy_plan, repeated_block_is_read_again) {
  CHECK_EQ(plan_of(token_major(), {5, 5}, 0, 8), (Plan{{5 * 96, 0, 96, 2, 0, 96}}));
}

TEST(copy_plan, nothing_to_copy_is_an_empty_plan) {
  CHECK(plan_of(token_major(), {5}, 4, 0).empty());
  CHECK(plan_of(token_major(), {}, 0, 0).empty());
  PagedView view = token_major();
  view.num_layers = 0;
  CHECK(plan_of(view, {5}, 0, 4).empty());
}

TEST(copy_plan, int32_and_int64_ids_plan_the_same) {
  const std::vector<std::int32_t> narrow{3, 4, 9};
  const PagedView view = layer_major();
  CHECK_EQ(plan_copy(view, BlockTable{std::span<const std::int32_t>(narrow)}, 1, 10, packed(view)),
           plan_of(view, {3, 4, 9}, 1, 10));
}

TEST(copy_plan, refuses_negative_start_and_length) {
  CHECK_THROWS(std::invalid_argument, "start is -1", plan_of(token_major(), {5}, -1, 1));
  CHECK_THROWS(std::invalid_argument, "length is -2", plan_of(token_major(), {5}, 0, -2));
}

TEST(copy_plan, refuses_a_range_beyond_the_table) {
  CHECK_THROWS(std::out_of_range, "start 1 and length 4 reach beyond the 4 tokens",
               plan_of(token_major(), {5}, 1, 4));
  CHECK_THROWS(std::out_of_range, "reach beyond", plan_of(token_major(), {5}, 5, 1));
  CHECK_THROWS(std::out_of_range, "reach beyond", plan_of(token_major(), {}, 0, 1));
}

TEST(copy_plan, refuses_a_range_whose_end_overflows) {
  CHECK_THROWS(std::out_of_range, "reach beyond", plan_of(token_major(), {5}, 1, kMost));
  CHECK_THROWS(std::out_of_range, "reach beyond", plan_of(token_major(), {5}, kMost, kMost));
}

TEST(copy_plan, tokens_of_a_table_may_overflow) {
  // Views with a stride of 0 can claim any block size.
  PagedView view{nullptr, 16, 1, kMost / 2, kRow, 0, 0, 0};
  CHECK_EQ(plan_of(view, {5, 5, 5, 5}, 0, 1).size(), 1U);
  CHECK_EQ(plan_of(view, {5, 5, 5, 5}, kMost - 1, 1).size(), 1U);
}

TEST(copy_plan, refuses_a_block_outside_the_cache) {
  CHECK_THROWS(std::out_of_range, "block_ids[1] is 16, outside the paged cache's 16 blocks",
               plan_of(token_major(), {5, 16}, 0, 5));
  CHECK_THROWS(std::out_of_range, "block_ids[0] is -1", plan_of(token_major(), {-1}, 0, 1));
  const std::vector<std::int32_t> narrow{-1};
  CHECK_THROWS(std::out_of_range, "block_ids[0] is -1",
               check_range(token_major(), BlockTable{std::span<const std::int32_t>(narrow)}, 0, 1));
}

TEST(copy_plan, ids_that_the_range_does_not_touch_may_be_anything) {
  CHECK_EQ(plan_of(token_major(), {-7, 5, 99}, 4, 4).size(), 1U);
}

TEST(copy_plan, refuses_a_view_that_makes_no_sense) {
  PagedView view = token_major();
  view.block_size = 0;
  CHECK_THROWS(std::invalid_argument, "block_size and row bytes", plan_of(view, {5}, 0, 0));
  view = token_major();
  view.row_bytes = 0;
  CHECK_THROWS(std::invalid_argument, "0-byte rows", plan_of(view, {5}, 0, 0));
  view = token_major();
  view.num_blocks = -1;
  CHECK_THROWS(std::invalid_argument, "[-1 blocks", plan_of(view, {5}, 0, 0));
}

TEST(copy_plan, refuses_strides_beyond_any_memory) {
  // Their sums and differences would overflow, and wrap around to an offset that looks right.
  for (std::int64_t PagedView::* stride :
       {&PagedView::block_stride, &PagedView::layer_stride, &PagedView::token_stride}) {
    for (const std::int64_t bytes : {kMost, -kMost - 1, kMost / 4}) {
      PagedView view = token_major();
      view.*stride = bytes;
      CHECK_THROWS(std::invalid_argument, "reaches beyond 2305843009213693951 bytes",
                   plan_of(view, {5}, 0, 1));
    }
  }
  const Ids ids{5};
  const BlockTable blocks{std::span<const std::int64_t>(ids)};
  CHECK_THROWS(std::invalid_argument, "rows with strides of -9223372036854775807 and 8 bytes",
               plan_copy(token_major(), blocks, 0, 4, {nullptr, -kMost, kRow}));
  // A stride that no second row needs may be anything.
  CHECK_EQ(plan_copy(token_major(), blocks, 0, 1, {nullptr, kMost, kRow}).size(), 1U);
}

TEST(copy_plan, refuses_more_rows_than_any_memory) {
  const PagedView view{nullptr, 16, 3, kMost / 3, kRow, 0, 0, 0};
  const Ids ids{5, 5, 5};
  const BlockTable blocks{std::span<const std::int64_t>(ids)};
  CHECK_THROWS(std::invalid_argument, "of 3 layers of 8-byte rows is more than",
               plan_copy(view, blocks, 0, kMost / 3 * 3, {nullptr, 0, 0}));
}

TEST(copy_plan, random_layouts_equal_a_copy_row_by_row) {
  Random random(20261130);
  int exact = 0;
  for (int round = 0; round < 24'000; ++round) {
    Layout layout = draw_layout(random, 1, 5);
    Buffer paged(layout.paged_bytes);
    paged.fill();
    Buffer ours(layout.rows_bytes);
    Buffer expected(layout.rows_bytes);
    layout.paged.data = paged.data();
    layout.rows.data = ours.data();
    const std::vector<std::int32_t> narrow(layout.block_ids.begin(), layout.block_ids.end());
    const BlockTable blocks = random.chance(50)
                                  ? BlockTable{std::span<const std::int64_t>(layout.block_ids)}
                                  : BlockTable{std::span<const std::int32_t>(narrow)};
    const Plan plan = plan_copy(layout.paged, blocks, layout.start, layout.length, layout.rows);
    copy_to_rows(layout.paged, layout.rows, plan);
    naive_gather(layout, paged.data(), expected.data());

    // Blocks whose rows are apart stay whole; everything else is parted only where it must be.
    const bool blocks_are_rows = layout.paged.block_size == 1 ||
                                 (layout.paged.token_stride == layout.rows.token_stride &&
                                  !plan.empty() && plan[0].bytes % layout.paged.token_stride == 0);
    std::int64_t pieces = 0;
    bool tight = true;
    for (std::size_t i = 0; i < plan.size(); ++i) {
      pieces += plan[i].count;
      tight &= i == 0 || !joinable(plan[i - 1], plan[i]);
    }
    bool sound = CHECK(ours == expected) && CHECK(tight);
    if (blocks_are_rows) {
      ++exact;
      sound &= CHECK_EQ(pieces, runs_of_rows(plan, layout.paged.row_bytes));
    }
    if (!sound) {
      report_failure(__FILE__, __LINE__, "round " + std::to_string(round) + ": " + layout.text());
      return;
    }
  }
  CHECK(exact > 5'000);
}

}  // namespace test
}  // namespace hscache
