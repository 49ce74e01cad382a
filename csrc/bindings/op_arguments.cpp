#include "bindings/op_arguments.h"

#include <span>
#include <stdexcept>
#include <string>
#include <utility>

namespace hscache::ops {
namespace {

std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

std::string dtype_name(ScalarType dtype) { return torch::headeronly::toString(dtype); }

bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
}

// The bytes from a tensor's first element to its last.
std::pair<std::uintptr_t, std::uintptr_t> extent(const Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) == 0) return {0, 0};
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  return {begin, begin + static_cast<std::uintptr_t>(last + 1) * tensor.element_size()};
}

// Rows that are read while others are written over them would come out wrong.
void check_apart(const Tensor& tensor, const Tensor& paged, const char* name) {
  const auto [begin, end] = extent(tensor);
  const auto [paged_begin, paged_end] = extent(paged);
  if (begin < paged_end && paged_begin < end) {
    throw std::invalid_argument(std::string(name) +
                                " lies in paged's own memory: pass a clone of it");
  }
}

void check_hidden(const Tensor& tensor, const char* name) {
  const std::int64_t last = tensor.dim() - 1;
  if (tensor.stride(last) != 1 && tensor.size(last) > 1) {
    throw std::invalid_argument(std::string(name) + "'s last dimension has stride " +
                                std::to_string(tensor.stride(last)) +
                                ", must be contiguous (stride 1): pass the whole tensor or a view "
                                "that keeps hidden last");
  }
}

Element element_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return Element::kFloat32;
    case ScalarType::Half:
      return Element::kFloat16;
    case ScalarType::BFloat16:
      return Element::kBFloat16;
    case ScalarType::Float8_e4m3fn:
      return Element::kFloat8;
    default:
      return Element::kAny;
  }
}

}  // namespace

PagedView paged_view(const Tensor& paged) {
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
  check_hidden(paged, "paged");
  return {.data = static_cast<std::byte*>(paged.data_ptr()),
          .num_blocks = paged.size(0),
          .num_layers = paged.size(1),
          .block_size = paged.size(2),
          .row_bytes = paged.size(3) * item,
          .block_stride = paged.stride(0) * item,
          .layer_stride = paged.stride(1) * item,
          .token_stride = paged.stride(2) * item};
}

RowsView rows_view(const Tensor& rows, const Tensor& paged) {
  if (rows.dim() != 3 || rows.size(1) != paged.size(1) || rows.size(2) != paged.size(3)) {
    throw std::invalid_argument(
        "rows has shape " + shape_of(rows) + ", must be [tokens, " + std::to_string(paged.size(1)) +
        ", " + std::to_string(paged.size(3)) + "] for paged of shape " + shape_of(paged));
  }
  if (!same_device(rows, paged)) {
    throw std::invalid_argument(
        "rows and paged are on different devices: move rows to paged's device");
  }
  check_hidden(rows, "rows");
  check_apart(rows, paged, "rows");
  const auto item = static_cast<std::int64_t>(rows.element_size());
  return {static_cast<std::byte*>(rows.data_ptr()), rows.stride(0) * item, rows.stride(1) * item};
}

BlockTable block_table(const Tensor& ids, const char* name) {
  if (ids.dim() != 1) {
    throw std::invalid_argument(std::string(name) + " has shape " + shape_of(ids) +
                                ", must be one-dimensional");
  }
  const auto count = static_cast<std::size_t>(ids.size(0));
  switch (ids.scalar_type()) {
    case ScalarType::Long:
      return BlockTable{std::span(static_cast<const std::int64_t*>(ids.data_ptr()), count)};
    case ScalarType::Int:
      return BlockTable{std::span(static_cast<const std::int32_t*>(ids.data_ptr()), count)};
    default:
      throw std::invalid_argument(std::string(name) + " has dtype " +
                                  dtype_name(ids.scalar_type()) +
                                  ", must be int32 or int64: convert it with .to(torch.int64)");
  }
}

std::optional<ScalarType> other_dtype(const Tensor& rows, const Tensor& paged) {
  // As torch's own numbers: its stable ABI has no name for some dtypes that are moved bit for bit.
  std::int32_t ours = 0;
  std::int32_t stored = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(rows.get(), &ours));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(paged.get(), &stored));
  return ours == stored ? std::nullopt : std::optional(rows.scalar_type());
}

Conversion conversion(const Tensor& paged, std::optional<ScalarType> rows_dtype,
                      const std::optional<Tensor>& scales, std::int64_t tokens,
                      const char* scales_name) {
  const std::string name = scales_name;
  const bool same = !rows_dtype.has_value() || *rows_dtype == paged.scalar_type();
  if (scales.has_value() && (same || *rows_dtype != ScalarType::Float8_e4m3fn)) {
    throw std::invalid_argument(name +
                                " is given, but only rows of float8_e4m3fn and a paged cache "
                                "of another dtype need it: leave it out");
  }
  if (same) return {};
  const ScalarType rows = *rows_dtype;
  const ScalarType stored = paged.scalar_type();
  Conversion found{.paged = element_of(stored), .rows = element_of(rows)};
  if (found.paged == Element::kAny || found.rows == Element::kAny ||
      found.paged == Element::kFloat8) {
    throw std::invalid_argument(
        "rows of " + dtype_name(rows) + " and a paged cache of " + dtype_name(stored) +
        ": caches of float32, float16 and bfloat16 are converted to and from rows of these and of "
        "float8_e4m3fn; use the cache's dtype and convert the rows");
  }
  if (found.rows != Element::kFloat8) return found;
  if (!scales.has_value()) {
    throw std::invalid_argument(name +
                                " is missing: float8 rows have one float32 scale each, pass "
                                "a tensor of shape [tokens, num_layers]");
  }
  if (scales->dim() != 2 || scales->size(0) != tokens || scales->size(1) != paged.size(1) ||
      scales->scalar_type() != ScalarType::Float || !same_device(*scales, paged)) {
    throw std::invalid_argument(name + " has shape " + shape_of(*scales) + " and dtype " +
                                dtype_name(scales->scalar_type()) + ", must be [" +
                                std::to_string(tokens) + ", " + std::to_string(paged.size(1)) +
                                "] float32 on paged's device");
  }
  check_apart(*scales, paged, scales_name);
  found.scales = static_cast<float*>(scales->data_ptr());
  found.scale_token_stride = scales->stride(0);
  found.scale_layer_stride = scales->stride(1);
  return found;
}

}  // namespace hscache::ops
