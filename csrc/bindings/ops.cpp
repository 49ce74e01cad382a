// torch.ops.hscache.*: stateless operators on torch's stable ABI, so that one build serves many
// versions of torch. They check their arguments and call the core.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/copy_plan.h"
#include "core/host_copy.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Below this a task costs more than the bytes that it moves.
constexpr std::int64_t kGrainBytes = 512 << 10;

std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

hscache::PagedView paged_view(const Tensor& paged) {
  if (paged.dim() != 4) {
    throw std::invalid_argument("paged has shape " + shape_of(paged) +
                                ", must be [num_blocks, num_layers, block_size, hidden]");
  }
  const auto item = static_cast<std::int64_t>(paged.element_size());
  if (item > 8) {
    throw std::invalid_argument("paged has elements of " + std::to_string(item) +
                                " bytes, the operator takes dtypes of 1, 2, 4 or 8 bytes: view it "
                                "as a real dtype");
  }
  if (paged.size(3) < 1) {
    throw std::invalid_argument("paged has shape " + shape_of(paged) +
                                ": hidden must be 1 or more");
  }
  if (paged.stride(3) != 1 && paged.size(3) > 1) {
    throw std::invalid_argument("paged's last dimension has stride " +
                                std::to_string(paged.stride(3)) +
                                ", must be contiguous (stride 1): pass the cache itself or a view "
                                "that keeps hidden last");
  }
  return {.data = static_cast<std::byte*>(paged.data_ptr()),
          .num_blocks = paged.size(0),
          .num_layers = paged.size(1),
          .block_size = paged.size(2),
          .row_bytes = paged.size(3) * item,
          .block_stride = paged.stride(0) * item,
          .layer_stride = paged.stride(1) * item,
          .token_stride = paged.stride(2) * item};
}

// Block ids on the host as 64 bit integers, in the caller's memory where they are that already.
class HostBlockIds {
 public:
  explicit HostBlockIds(const Tensor& ids) {
    if (ids.dim() != 1) {
      throw std::invalid_argument("block_ids has shape " + shape_of(ids) +
                                  ", must be one-dimensional");
    }
    const auto count = static_cast<std::size_t>(ids.size(0));
    const ScalarType dtype = ids.scalar_type();
    if (dtype != ScalarType::Int && dtype != ScalarType::Long) {
      throw std::invalid_argument(std::string("block_ids has dtype ") +
                                  torch::headeronly::toString(dtype) +
                                  ", must be int32 or int64: convert it with .to(torch.int64)");
    }
    if (dtype == ScalarType::Long && (ids.stride(0) == 1 || count < 2)) {
      ids_ = {static_cast<const std::int64_t*>(ids.data_ptr()), count};
      return;
    }
    copy_.reserve(count);
    const std::int64_t stride = ids.stride(0);
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t at = static_cast<std::int64_t>(i) * stride;
      copy_.push_back(dtype == ScalarType::Long
                          ? static_cast<const std::int64_t*>(ids.data_ptr())[at]
                          : static_cast<const std::int32_t*>(ids.data_ptr())[at]);
    }
    ids_ = copy_;
  }

  hscache::BlockTable table() const { return hscache::BlockTable{ids_}; }

 private:
  std::vector<std::int64_t> copy_;
  std::span<const std::int64_t> ids_;
};

Tensor gather_paged(Tensor paged, Tensor block_ids, std::int64_t start, std::int64_t length) {
  const hscache::PagedView view = paged_view(paged);
  const HostBlockIds ids(block_ids);
  const hscache::BlockTable table = ids.table();
  hscache::check_range(view, table, start, length);
  Tensor out = torch::stable::new_empty(paged, {length, view.num_layers, paged.size(3)});
  const std::int64_t token_bytes = view.num_layers * view.row_bytes;
  if (length == 0 || token_bytes == 0) return out;
  auto* const data = static_cast<std::byte*>(out.data_ptr());
  torch::stable::parallel_for(
      0, length, std::max<std::int64_t>(1, kGrainBytes / token_bytes),
      [&](std::int64_t begin, std::int64_t end) {
        const hscache::RowsView rows{data + begin * token_bytes, token_bytes, view.row_bytes};
        hscache::copy_to_rows(view, rows,
                              hscache::plan_copy(view, table, start + begin, end - begin, rows));
      });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(hscache, m) {
  m.def("gather_paged(Tensor paged, Tensor block_ids, SymInt start, SymInt length) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hscache, CPU, m) { m.impl("gather_paged", TORCH_BOX(&gather_paged)); }
