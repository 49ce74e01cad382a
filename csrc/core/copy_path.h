// The choice between packing rows by a kernel and moving them by the copy engine alone.
#pragma once

#include <cstdint>
#include <span>

#include "core/copy_plan.h"

namespace hscache {

// From here on the copy engine alone is chosen. An estimate that no GPU has measured yet: a copy
// costs the engine about a microsecond to begin, which is a tenth of 256 KiB at 25 GB/s.
constexpr std::int64_t kDmaSpanBytes = 256 << 10;

enum class CopyPath { kKernel, kDma };

// Chooses for rows that are moved bit for bit, by the bytes of a contiguous piece in the mean.
CopyPath choose_path(std::span<const CopySpan> plan, std::int64_t dma_span_bytes);

}  // namespace hscache
