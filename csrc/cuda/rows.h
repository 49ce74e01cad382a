// The row kernels: between scattered paged rows and rows in token order.
#pragma once

#include <cuda_runtime_api.h>

#include "core/rows_task.h"

namespace hscache::cuda {

// Enqueues a task on `stream`: see RowsTask for where its ids, scales and counters lie, and
// core/move_rows.h for what becomes of padding and bad ids. `max_blocks` bounds the grid (0: as
// large as it pays). Returns CUDA's error, cudaErrorInvalidValue for a negative start or length.
cudaError_t move_rows(Direction direction, const RowsTask& task, cudaStream_t stream,
                      unsigned max_blocks = 0);

}  // namespace hscache::cuda
