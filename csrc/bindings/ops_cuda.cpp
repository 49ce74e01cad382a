#include "bindings/ops_cuda.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "core/move_rows.h"
#include "cuda/bad_ids.h"
#include "cuda/error.h"
#include "cuda/rows.h"

#if !defined(HSCACHE_OPS_ON_HOST)
#include <dlfcn.h>
#endif

namespace hscache::ops {
namespace {

#if defined(HSCACHE_OPS_ON_HOST)

struct OnDevice {
  explicit OnDevice(const Tensor&) {}
};
cudaStream_t current_stream(const Tensor&) { return nullptr; }
bool on_device(const Tensor&, const Tensor&) { return true; }

#else

struct OnDevice {
  explicit OnDevice(const Tensor& tensor) : guard(tensor.get_device_index()) {}
  torch::stable::accelerator::DeviceGuard guard;
};

// torch's current stream. Looked up by name: a torch without CUDA does not have it, and this
// library loads there all the same.
cudaStream_t current_stream(const Tensor& tensor) {
  using CurrentStream = AOTITorchError (*)(std::int32_t, void**);
  static const auto ask = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const found =
        library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<CurrentStream>(found);
  }();
  void* stream = nullptr;
  if (ask == nullptr || ask(tensor.get_device_index(), &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error(
        "torch does not tell its current CUDA stream: install a torch with "
        "CUDA, version 2.10 or newer");
  }
  return static_cast<cudaStream_t>(stream);
}

// Whether the ids lie on the device of the paged tensor; throws where they lie on another one.
bool on_device(const Tensor& ids, const Tensor& paged) {
  if (ids.is_cpu()) return false;
  if (!ids.is_cuda() || ids.get_device_index() != paged.get_device_index()) {
    throw std::invalid_argument(
        "the ids are on another device than paged: move them to paged's device or to the CPU");
  }
  return true;
}

#endif

void raise_what_kernels_found(const Tensor& paged) {
  std::optional<cuda::BadId> bad;
  cuda::check(cuda::take_bad_id(current_stream(paged), &bad),
              "looking for ids that kernels refused");
  if (!bad) return;
  throw std::out_of_range(
      "an earlier operator on this device met id " + std::to_string(bad->id) +
      " among block_ids or slot_mapping, outside the " + std::to_string(bad->num_ids) +
      " that its paged cache has: rows that it gathered for such ids hold bytes 0xFF, nothing was "
      "written for them. Pass ids from 0 to " +
      std::to_string(bad->num_ids - 1));
}

}  // namespace

Cuda::Tokens Cuda::tokens(const PagedView& view, const Tensor& paged, const Tensor& ids,
                          const char* name, std::int64_t start, std::int64_t length, bool slots) {
  const OnDevice here(paged);
  static_cast<void>(block_table(ids, name));  // its shape, before it is copied
  raise_what_kernels_found(paged);
  Tensor flat = torch::stable::contiguous(ids);
  TokenMap map{.ids = block_table(flat, name), .start = start, .slots = slots};
  if (!on_device(ids, paged)) {
    check_tokens(view, map, length);
    flat = torch::stable::to(flat, paged.device());
    map.ids = block_table(flat, name);
    return {map, flat};
  }
  check_reach(view, map, length);
  if (length > 0 && map.num_ids(view) == 0) {
    throw std::out_of_range("paged has no blocks, and " + std::to_string(length) +
                            " tokens are asked for: pass a length of 0");
  }
  cuda::check(cuda::bad_id_words(&map.bad_id), "making room for ids that kernels refuse");
  return {map, flat};
}

void Cuda::move(Direction direction, const RowsTask& task, const Tensor& paged) {
  const OnDevice here(paged);
  cuda::check(cuda::move_rows(direction, task, current_stream(paged)), "launching a row kernel");
}

}  // namespace hscache::ops
