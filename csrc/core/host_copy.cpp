#include "core/host_copy.h"

#include <cstring>

namespace hscache {

void copy_to_rows(const PagedView& paged, const RowsView& rows, std::span<const CopySpan> plan) {
  for (const CopySpan& span : plan) {
    const std::byte* from = paged.data + span.paged_offset;
    std::byte* to = rows.data + span.rows_offset;
    for (std::int64_t i = 0; i < span.count; ++i) {
      std::memcpy(to, from, static_cast<std::size_t>(span.bytes));
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
      std::memcpy(to, from, static_cast<std::size_t>(span.bytes));
      to += span.paged_step;
      from += span.rows_step;
    }
  }
}

}  // namespace hscache
