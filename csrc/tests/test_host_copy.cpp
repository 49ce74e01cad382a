#include "core/host_copy.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/move_rows.h"
#include "tests/harness.h"
#include "tests/layouts.h"

namespace hscache::test {
namespace {

bool copies(std::int64_t bytes, std::int64_t from_at, std::int64_t to_at) {
  Buffer from(bytes, from_at);
  from.fill();
  Buffer to(bytes, to_at);
  Buffer expected(bytes, to_at);
  for (std::int64_t i = 0; i < bytes; ++i) expected.data()[i] = from.data()[i];
  copy_bytes(to.data(), from.data(), bytes);
  return to == expected;
}

}  // namespace

TEST(host_copy, any_size_between_any_addresses) {
  // Around the size from which stores go past the cache, and around whole cache lines.
  std::vector<std::int64_t> sizes;
  for (std::int64_t bytes = 0; bytes <= 200; ++bytes) sizes.push_back(bytes);
  for (std::int64_t bytes = (64 << 10) - 3; bytes <= (64 << 10) + 130; ++bytes) {
    sizes.push_back(bytes);
  }
  for (const std::int64_t bytes : sizes) {
    for (const std::int64_t to_at : {0, 1, 8, 15}) {
      if (!CHECK(copies(bytes, bytes % 16, to_at))) return;
    }
  }
  for (std::int64_t to_at = 0; to_at < 64; ++to_at) CHECK(copies(70'001, 3, to_at));
}

TEST(host_copy, long_pieces_both_ways) {
  // Two pieces of 80,000 bytes at a step of 100,000 on one side.
  const std::vector<CopySpan> plan{{.paged_offset = 7,
                                    .rows_offset = 0,
                                    .bytes = 80'000,
                                    .count = 2,
                                    .paged_step = 100'000,
                                    .rows_step = 80'000}};
  Buffer paged(180'007);
  paged.fill();
  Buffer rows(160'000);
  PagedView view;
  view.data = paged.data();
  copy_to_rows(view, {.data = rows.data()}, plan);
  for (std::int64_t i = 0; i < 160'000; ++i) {
    const std::int64_t at = 7 + i / 80'000 * 100'000 + i % 80'000;
    if (!CHECK(rows.data()[i] == paged.data()[at])) return;
  }
  Buffer back(180'007);
  view.data = back.data();
  copy_to_paged(view, {.data = rows.data()}, plan);
  for (std::int64_t i = 0; i < 180'007; ++i) {
    const bool written = i >= 7 && (i - 7) % 100'000 < 80'000;
    if (!CHECK(back.data()[i] == (written ? paged.data()[i] : std::byte{0xEE}))) return;
  }
}

TEST(host_copy, many_rows_are_converted_and_counted_as_few_are) {
  // 100 tokens in blocks of 8, 300 bfloat16 elements each, of which every tenth row has a NaN.
  constexpr std::int64_t kTokens = 100;
  constexpr std::int64_t kElements = 300;
  std::vector<std::uint16_t> stored(13 * 8 * kElements);
  for (std::size_t i = 0; i < stored.size(); ++i) {
    stored[i] = static_cast<std::uint16_t>(i * 7 % 0x7F80);
  }
  for (std::size_t row = 0; row < kTokens; row += 10) stored[row * kElements + 299] = 0x7FC0;
  std::vector<std::int64_t> ids(13);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  std::vector<std::uint32_t> rows(kTokens * kElements);
  std::uint32_t non_finite = 0;
  RowsTask task;
  task.paged.data = reinterpret_cast<std::byte*>(stored.data());
  task.paged.num_blocks = 13;
  task.paged.num_layers = 1;
  task.paged.block_size = 8;
  task.paged.row_bytes = kElements * 2;
  task.paged.token_stride = task.paged.row_bytes;
  task.paged.layer_stride = task.paged.block_stride = 8 * task.paged.row_bytes;
  task.tokens.ids = BlockTable{std::span<const std::int64_t>(ids)};
  task.rows = {reinterpret_cast<std::byte*>(rows.data()), kElements * 4, 0};
  task.conversion = {.paged = Element::kBFloat16, .rows = Element::kFloat32};
  task.conversion.non_finite_rows = &non_finite;
  // As one piece, which passes the size from which stores go past the cache.
  task.length = kTokens;
  move_rows(Direction::kGather, task);
  CHECK_EQ(non_finite, 10U);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!CHECK_EQ(rows[i], std::uint32_t{stored[i]} << 16)) return;
  }
}

}  // namespace hscache::test
