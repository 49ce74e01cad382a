#include "core/host_copy.h"

#include <cstddef>
#include <cstdint>
#include <vector>

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

}  // namespace hscache::test
