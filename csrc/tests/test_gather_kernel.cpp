#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "cuda/rows.h"
#include "tests/harness.h"
#include "tests/launch_at_once.h"
#include "tests/layouts.h"

namespace hscache::test {
namespace {

using cuda::gather_rows;
using cuda::host::latest_launch;

const cudaStream_t kStream = reinterpret_cast<cudaStream_t>(std::uintptr_t{0x51});

}  // namespace

TEST(gather_kernel, random_layouts_equal_a_copy_row_by_row) {
  Random random(20261130);
  std::set<const void*> kernels;
  for (int round = 0; round < 10'000; ++round) {
    const std::int64_t unit = random.pick<std::int64_t>({1, 2, 4, 8, 16});
    // Rows of more words than a warp has threads, at times.
    Layout layout = draw_layout(random, unit, random.chance(20) ? 70 : 5);
    Buffer paged(layout.paged_bytes, layout.misaligned);
    paged.fill();
    const std::int64_t rows_misaligned = random.chance(50) ? unit % 16 : 0;
    Buffer ours(layout.rows_bytes, rows_misaligned);
    Buffer expected(layout.rows_bytes, rows_misaligned);
    layout.paged.data = paged.data();
    layout.rows.data = ours.data();
    cuda::host::set_order(static_cast<std::uint64_t>(round));
    const unsigned max_blocks = random.pick({0U, 1U, 2U});
    const cudaError_t answer = gather_rows(layout.paged, layout.block_ids.data(), layout.start,
                                           layout.length, layout.rows, kStream, max_blocks);
    naive_gather(layout, paged.data(), expected.data());
    bool sound = CHECK_EQ(answer, cudaSuccess) && CHECK(ours == expected);
    if (layout.length > 0) {
      kernels.insert(latest_launch().kernel);
      sound &= CHECK(max_blocks == 0 || latest_launch().blocks <= max_blocks) &&
               CHECK_EQ(latest_launch().stream, kStream);
    }
    if (!sound) {
      report_failure(__FILE__, __LINE__,
                     "round " + std::to_string(round) + ", unit " + std::to_string(unit) + ": " +
                         layout.text());
      return;
    }
  }
  CHECK_EQ(kernels.size(), 5U);  // words of 1, 2, 4, 8 and 16 bytes were all at work
}

TEST(gather_kernel, a_grid_of_two_blocks_goes_round_many_times) {
  // 300 tokens of 3 layers, 16 rows at a time.
  Layout layout;
  layout.paged = {nullptr, 40, 3, 8, 32, 3 * 8 * 32, 8 * 32, 32};
  layout.paged_bytes = 40 * 3 * 8 * 32;
  for (std::int64_t i = 0; i < 38; ++i) layout.block_ids.push_back((i * 17) % 40);
  layout.start = 3;
  layout.length = 300;
  layout.rows = {nullptr, 3 * 32, 32};
  Buffer paged(layout.paged_bytes);
  paged.fill();
  Buffer ours(300 * 3 * 32);
  Buffer expected(300 * 3 * 32);
  layout.paged.data = paged.data();
  layout.rows.data = ours.data();
  CHECK_EQ(gather_rows(layout.paged, layout.block_ids.data(), 3, 300, layout.rows, kStream, 2),
           cudaSuccess);
  naive_gather(layout, paged.data(), expected.data());
  CHECK_EQ(latest_launch().blocks, 2U);
  CHECK(ours == expected);
}

TEST(gather_kernel, uses_the_widest_word_that_divides_every_address) {
  // One launch for each number of bytes that row and addresses share; equal widths share a kernel.
  std::vector<const void*> kernels;
  for (const std::int64_t unit : {1, 2, 4, 8, 16, 32}) {
    Buffer paged(4 * 2 * unit);
    Buffer rows(2 * unit);
    const PagedView view{paged.data(), 4, 1, 2, unit, 2 * unit, 2 * unit, unit};
    const std::int64_t block = 3;
    CHECK_EQ(gather_rows(view, &block, 0, 2, {rows.data(), unit, unit}, kStream), cudaSuccess);
    kernels.push_back(latest_launch().kernel);
  }
  CHECK_EQ(std::set<const void*>(kernels.begin(), kernels.end()).size(), 5U);
  CHECK_EQ(kernels[4], kernels[5]);
}

TEST(gather_kernel, any_address_limits_the_word) {
  Buffer paged(4096);
  Buffer rows(4096);
  const PagedView view{paged.data(), 4, 2, 2, 16, 128, 64, 32};
  const RowsView to{rows.data(), 64, 32};
  const std::int64_t block = 3;
  const auto kernel_for = [&](const PagedView& from, const RowsView& into) {
    CHECK_EQ(gather_rows(from, &block, 0, 2, into, kStream), cudaSuccess);
    return latest_launch().kernel;
  };
  PagedView narrow = view;
  narrow.row_bytes = 4;
  const void* const words_of_4 = kernel_for(narrow, to);
  CHECK(kernel_for(view, to) != words_of_4);
  for (std::int64_t PagedView::* stride :
       {&PagedView::block_stride, &PagedView::layer_stride, &PagedView::token_stride}) {
    PagedView odd = view;
    odd.*stride += 4;
    CHECK_EQ(kernel_for(odd, to), words_of_4);
  }
  for (std::int64_t RowsView::* stride : {&RowsView::token_stride, &RowsView::layer_stride}) {
    RowsView odd = to;
    odd.*stride += 4;
    CHECK_EQ(kernel_for(view, odd), words_of_4);
  }
  PagedView odd_paged = view;
  odd_paged.data += 4;
  CHECK_EQ(kernel_for(odd_paged, to), words_of_4);
  RowsView odd_rows = to;
  odd_rows.data += 4;
  CHECK_EQ(kernel_for(view, odd_rows), words_of_4);
}

TEST(gather_kernel, nothing_to_gather_launches_nothing) {
  const PagedView view{nullptr, 4, 1, 2, 16, 32, 32, 16};
  const std::int64_t before = latest_launch().number;
  CHECK_EQ(gather_rows(view, nullptr, 5, 0, {}, kStream), cudaSuccess);
  PagedView no_layers = view;
  no_layers.num_layers = 0;
  CHECK_EQ(gather_rows(no_layers, nullptr, 0, 7, {}, kStream), cudaSuccess);
  CHECK_EQ(latest_launch().number, before);
}

TEST(gather_kernel, refuses_negative_start_and_length) {
  const PagedView view{nullptr, 4, 1, 2, 16, 32, 32, 16};
  CHECK_EQ(gather_rows(view, nullptr, -1, 1, {}, kStream), cudaErrorInvalidValue);
  CHECK_EQ(gather_rows(view, nullptr, 0, -1, {}, kStream), cudaErrorInvalidValue);
}

}  // namespace hscache::test
