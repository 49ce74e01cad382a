#include "core/host_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hscache {
namespace {

#if defined(__SSE2__)

void copy_past_the_cache(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  const std::size_t head =
      std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + at);
    auto* const target = reinterpret_cast<__m128i*>(to + at);
    const __m128i words[] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1),
                             _mm_loadu_si128(source + 2), _mm_loadu_si128(source + 3)};
    for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, words[i]);
  }
  std::memcpy(to + at, from + at, bytes - at);
  // Such stores are in no order with others until now.
  _mm_sfence();
}

#endif

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t count) {
  const auto bytes = static_cast<std::size_t>(count);
#if defined(__SSE2__)
  if (count >= kPastCacheBytes) {
    copy_past_the_cache(to, from, bytes);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

void copy_to_rows(const PagedView& paged, const RowsView& rows, std::span<const CopySpan> plan) {
  for (const CopySpan& span : plan) {
    const std::byte* from = paged.data + span.paged_offset;
    std::byte* to = rows.data + span.rows_offset;
    for (std::int64_t i = 0; i < span.count; ++i) {
      copy_bytes(to, from, span.bytes);
      from += span.paged_step;
      to += span.rows_step;
    }
  }
}

void copy_to_paged(const PagedView& paged, const RowsView& rows, std::span<const CopySpan> plan) {
  for (const CopySpan& span : plan) {
    std::byte* to = paged.data + span.paged_offset;
    const std::byte* from = rows.data + span.rows_offset;
    for (std::int64_t i = 0; i < span.count; ++i) {
      copy_bytes(to, from, span.bytes);
      to += span.paged_step;
      from += span.rows_step;
    }
  }
}

}  // namespace hscache
