// The row kernels: between scattered paged rows and rows in token order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/paged_view.h"

namespace hscache::cuda {

// Enqueues on `stream` the copy of tokens `[start, start + length)`, all layers, from `paged` to
// `rows` (row 0 is token `start`). `block_ids` lies in memory that the device can read and holds
// every block that the range touches; ids are not checked. `max_blocks` bounds the grid (0: as
// large as it pays). Returns CUDA's error, cudaErrorInvalidValue for a negative start or length.
cudaError_t gather_rows(const PagedView& paged, const std::int64_t* block_ids, std::int64_t start,
                        std::int64_t length, const RowsView& rows, cudaStream_t stream,
                        unsigned max_blocks = 0);

// The same way backwards, from `rows` to `paged`. No block may be in the range twice.
cudaError_t scatter_rows(const PagedView& paged, const std::int64_t* block_ids, std::int64_t start,
                         std::int64_t length, const RowsView& rows, cudaStream_t stream,
                         unsigned max_blocks = 0);

}  // namespace hscache::cuda
