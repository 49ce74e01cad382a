#include "core/copy_path.h"

namespace hscache {

CopyPath choose_path(std::span<const CopySpan> plan, std::int64_t dma_span_bytes) {
  std::int64_t bytes = 0;
  std::int64_t pieces = 0;
  for (const CopySpan& span : plan) {
    bytes += span.bytes * span.count;
    pieces += span.count;
  }
  return pieces > 0 && bytes / pieces >= dma_span_bytes ? CopyPath::kDma : CopyPath::kKernel;
}

}  // namespace hscache
