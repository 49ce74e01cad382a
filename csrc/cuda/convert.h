// The kernels that look at elements: casts, scales, a count of rows that are not finite.
#pragma once

#include <cuda_runtime_api.h>

#include "core/rows_task.h"

namespace hscache::cuda {

// Enqueues a task whose conversion looks at elements and which is not empty. As move_rows().
cudaError_t convert_rows(Direction direction, const RowsTask& task, cudaStream_t stream,
                         unsigned max_blocks);

}  // namespace hscache::cuda
