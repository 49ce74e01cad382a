// Running a copy plan on the calling thread.
#pragma once

#include <span>

#include "core/copy_plan.h"

namespace hscache {

// Copies the spans of a plan from `paged` to `rows`. The two must not overlap.
void copy_to_rows(const PagedView& paged, const RowsView& rows, std::span<const CopySpan> plan);

// The same way backwards, from `rows` to `paged`.
void copy_to_paged(const PagedView& paged, const RowsView& rows, std::span<const CopySpan> plan);

}  // namespace hscache
