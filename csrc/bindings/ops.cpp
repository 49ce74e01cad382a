// torch.ops.hscache.*: stateless operators on torch's stable ABI, so that one build serves many
// versions of torch. They check their arguments and call the core, or launch on the current stream.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "bindings/op_arguments.h"
#include "core/move_rows.h"

#if defined(HSCACHE_WITH_CUDA) || defined(HSCACHE_OPS_ON_HOST)
#include "bindings/ops_cuda.h"
#endif

namespace hscache::ops {
namespace {

// Below this a task costs more than the bytes that it moves.
constexpr std::int64_t kGrainBytes = 512 << 10;

// Rows in host memory, moved by torch's intra-op threads.
struct Host {
  // Where the tokens lie, and what owns the ids. Checks them.
  struct Tokens {
    TokenMap map;
    Tensor ids;
  };
  static Tokens tokens(const PagedView& paged, const Tensor&, const Tensor& ids, const char* name,
                       std::int64_t start, std::int64_t length, bool slots) {
    static_cast<void>(block_table(ids, name));  // its shape, before it is copied
    const Tensor flat = torch::stable::contiguous(ids);
    const TokenMap map{.ids = block_table(flat, name), .start = start, .slots = slots};
    check_tokens(paged, map, length);
    return {map, flat};
  }

  static void move(Direction direction, const RowsTask& task, const Tensor&) {
    const std::int64_t token_bytes =
        std::max<std::int64_t>(1, task.paged.num_layers * task.paged.row_bytes);
    torch::stable::parallel_for(
        0, task.length, std::max<std::int64_t>(1, kGrainBytes / token_bytes),
        [&](std::int64_t begin, std::int64_t end) {
          RowsTask part = task;
          part.tokens.start += begin;
          part.length = end - begin;
          part.rows.data += begin * task.rows.token_stride;
          if (part.conversion.scales != nullptr) {
            part.conversion.scales += begin * task.conversion.scale_token_stride;
          }
          move_rows(direction, part);
        });
  }
};

template <class Backend>
Tensor gather(const Tensor& paged, const Tensor& ids, const char* name, std::int64_t start,
              std::int64_t length, bool slots, std::optional<ScalarType> dtype,
              const std::optional<Tensor>& scales_out) {
  RowsTask task{.paged = paged_view(paged)};
  const auto tokens = Backend::tokens(task.paged, paged, ids, name, start, length, slots);
  task.conversion = conversion(paged, dtype, scales_out, length, "scales_out");
  Tensor out =
      torch::stable::new_empty(paged, {length, task.paged.num_layers, paged.size(3)}, dtype);
  if (length == 0 || task.paged.num_layers == 0) return out;
  task.tokens = tokens.map;
  task.length = length;
  task.rows = rows_view(out, paged);
  Backend::move(Direction::kGather, task, paged);
  return out;
}

template <class Backend>
void scatter(const Tensor& paged, const Tensor& ids, const char* name, std::int64_t start,
             bool slots, const Tensor& rows, const std::optional<Tensor>& scales) {
  RowsTask task{.paged = paged_view(paged)};
  task.rows = rows_view(rows, paged);
  task.length = rows.size(0);
  const auto tokens = Backend::tokens(task.paged, paged, ids, name, start, task.length, slots);
  task.tokens = tokens.map;
  task.conversion = conversion(paged, other_dtype(rows, paged), scales, task.length, "scales");
  if (task.length == 0 || task.paged.num_layers == 0) return;
  Backend::move(Direction::kScatter, task, paged);
}

template <class Backend>
Tensor gather_paged(Tensor paged, Tensor block_ids, std::int64_t start, std::int64_t length,
                    std::optional<ScalarType> dtype) {
  return gather<Backend>(paged, block_ids, "block_ids", start, length, false, dtype, std::nullopt);
}

template <class Backend>
Tensor gather_paged_scaled(Tensor paged, Tensor block_ids, std::int64_t start, std::int64_t length,
                           ScalarType dtype, Tensor scales_out) {
  return gather<Backend>(paged, block_ids, "block_ids", start, length, false, dtype, scales_out);
}

template <class Backend>
void scatter_paged(Tensor paged, Tensor block_ids, std::int64_t start, Tensor rows,
                   std::optional<Tensor> scales) {
  scatter<Backend>(paged, block_ids, "block_ids", start, false, rows, scales);
}

std::int64_t tokens_of(const Tensor& slot_mapping) {
  return slot_mapping.dim() == 1 ? slot_mapping.size(0) : 0;  // other shapes are refused later
}

template <class Backend>
Tensor gather_slots(Tensor paged, Tensor slot_mapping, std::optional<ScalarType> dtype) {
  return gather<Backend>(paged, slot_mapping, "slot_mapping", 0, tokens_of(slot_mapping), true,
                         dtype, std::nullopt);
}

template <class Backend>
Tensor gather_slots_scaled(Tensor paged, Tensor slot_mapping, ScalarType dtype, Tensor scales_out) {
  return gather<Backend>(paged, slot_mapping, "slot_mapping", 0, tokens_of(slot_mapping), true,
                         dtype, scales_out);
}

template <class Backend>
void write_slots(Tensor paged, Tensor slot_mapping, Tensor rows, std::optional<Tensor> scales) {
  scatter<Backend>(paged, slot_mapping, "slot_mapping", 0, true, rows, scales);
}

}  // namespace
}  // namespace hscache::ops

// Scales come as an overload: an optional argument that is written would have torch.compile take
// every gather for one that writes.
#define HSCACHE_SCHEMAS(library)                                                                  \
  (library).def(                                                                                  \
      "gather_paged(Tensor paged, Tensor block_ids, SymInt start, SymInt length, "                \
      "ScalarType? dtype=None) -> Tensor");                                                       \
  (library).def(                                                                                  \
      "gather_paged.scaled(Tensor paged, Tensor block_ids, SymInt start, SymInt length, "         \
      "ScalarType dtype, *, Tensor(a!) scales_out) -> Tensor");                                   \
  (library).def(                                                                                  \
      "scatter_paged_(Tensor(a!) paged, Tensor block_ids, SymInt start, Tensor rows, *, "         \
      "Tensor? scales=None) -> ()");                                                              \
  (library).def(                                                                                  \
      "gather_slots(Tensor paged, Tensor slot_mapping, ScalarType? dtype=None) -> Tensor");       \
  (library).def(                                                                                  \
      "gather_slots.scaled(Tensor paged, Tensor slot_mapping, ScalarType dtype, *, "              \
      "Tensor(a!) scales_out) -> Tensor");                                                        \
  (library).def(                                                                                  \
      "write_slots_(Tensor(a!) paged, Tensor slot_mapping, Tensor rows, *, Tensor? scales=None) " \
      "-> ()")

#define HSCACHE_IMPLEMENTATIONS(library, Backend)                                                \
  (library).impl("gather_paged", TORCH_BOX(&hscache::ops::gather_paged<Backend>));               \
  (library).impl("gather_paged.scaled", TORCH_BOX(&hscache::ops::gather_paged_scaled<Backend>)); \
  (library).impl("scatter_paged_", TORCH_BOX(&hscache::ops::scatter_paged<Backend>));            \
  (library).impl("gather_slots", TORCH_BOX(&hscache::ops::gather_slots<Backend>));               \
  (library).impl("gather_slots.scaled", TORCH_BOX(&hscache::ops::gather_slots_scaled<Backend>)); \
  (library).impl("write_slots_", TORCH_BOX(&hscache::ops::write_slots<Backend>))

#if defined(HSCACHE_OPS_ON_HOST)
// For tests: what runs on a GPU, its kernels as plain C++, on tensors in host memory.
STABLE_TORCH_LIBRARY(hscache_on_host, m) { HSCACHE_SCHEMAS(m); }
STABLE_TORCH_LIBRARY_IMPL(hscache_on_host, CPU, m) {
  HSCACHE_IMPLEMENTATIONS(m, hscache::ops::Cuda);
}
#else
STABLE_TORCH_LIBRARY(hscache, m) { HSCACHE_SCHEMAS(m); }
STABLE_TORCH_LIBRARY_IMPL(hscache, CPU, m) { HSCACHE_IMPLEMENTATIONS(m, hscache::ops::Host); }
#if defined(HSCACHE_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(hscache, CUDA, m) { HSCACHE_IMPLEMENTATIONS(m, hscache::ops::Cuda); }
#endif
#endif
