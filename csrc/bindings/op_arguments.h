// From tensors to a RowsTask: what the operators check, on any device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "core/rows_task.h"

namespace hscache::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// All throw std::invalid_argument with the value, the limit and the remedy.

// `[num_blocks, num_layers, block_size, hidden]`, hidden contiguous, elements of 1 to 8 bytes.
PagedView paged_view(const Tensor& paged);

// `[tokens, num_layers, hidden]` of the paged tensor's device, hidden contiguous.
RowsView rows_view(const Tensor& rows, const Tensor& paged);

// One-dimensional int32 or int64, contiguous.
BlockTable block_table(const Tensor& ids, const char* name);

// The rows' dtype where it is another than the paged tensor's.
std::optional<ScalarType> other_dtype(const Tensor& rows, const Tensor& paged);

// What it takes between the paged tensor's elements and rows of another dtype: nothing where there
// is none. `scales` are `[tokens, num_layers]` float32, given where, and only where, the rows alone
// are float8_e4m3fn: a paged cache has no place for scales.
Conversion conversion(const Tensor& paged, std::optional<ScalarType> rows,
                      const std::optional<Tensor>& scales, std::int64_t tokens,
                      const char* scales_name);

}  // namespace hscache::ops
