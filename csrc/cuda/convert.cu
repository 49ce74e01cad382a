#include "cuda/convert.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <math.h>

#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "cuda/row_loop.cuh"

namespace hscache::cuda {
namespace {

using Kind = TokenMap::Place::Kind;

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
// Elements that a thread moves at once where addresses allow.
constexpr std::int64_t kVector = 8;

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__nv_fp8_e4m3 value) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(value.__x, __NV_E4M3)));
}

template <class To>
__device__ __forceinline__ To narrow(float value);
template <>
__device__ __forceinline__ float narrow(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half narrow(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __nv_fp8_e4m3 narrow(float value) {
  __nv_fp8_e4m3 code;
  // Rounding after the division may leave the range by less than half a step: never to NaN. An
  // infinity has no code of its own and stays visible as NaN.
  code.__x = isfinite(value) ? __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3)
                             : static_cast<__nv_fp8_storage_t>(signbit(value) ? 0xFF : 0x7F);
  return code;
}

template <class Type>
constexpr bool kScaled = false;
template <>
constexpr bool kScaled<__nv_fp8_e4m3> = true;

template <class Type>
struct alignas(sizeof(Type) == 1 ? 8 : 16) Vector {
  Type elements[kVector];
};

// Stores what `change(element)` makes of this thread's share of a row, vector by vector where
// addresses allow.
template <class From, class To, class Change>
__device__ __forceinline__ void change_row(const From* __restrict__ from, To* __restrict__ to,
                                           std::int64_t count, bool vectors, Change change) {
  const std::int64_t lane = threadIdx.x % kWarp;
  std::int64_t done = 0;
  if (vectors) {
    done = count / kVector * kVector;
#pragma unroll 2
    for (std::int64_t i = lane * kVector; i < done; i += kWarp * kVector) {
      const auto vector = *reinterpret_cast<const Vector<From>*>(from + i);
      Vector<To> changed;
#pragma unroll
      for (std::int64_t j = 0; j < kVector; ++j) {
        changed.elements[j] = change(vector.elements[j]);
      }
      *reinterpret_cast<Vector<To>*>(to + i) = changed;
    }
  }
  for (std::int64_t i = done + lane; i < count; i += kWarp) to[i] = change(from[i]);
}

// Calls `look(element)` for this thread's share of a row.
template <class From, class Look>
__device__ __forceinline__ void look_at_row(const From* __restrict__ from, std::int64_t count,
                                            bool vectors, Look look) {
  const std::int64_t lane = threadIdx.x % kWarp;
  std::int64_t done = 0;
  if (vectors) {
    done = count / kVector * kVector;
#pragma unroll 2
    for (std::int64_t i = lane * kVector; i < done; i += kWarp * kVector) {
      const auto vector = *reinterpret_cast<const Vector<From>*>(from + i);
#pragma unroll
      for (std::int64_t j = 0; j < kVector; ++j) look(vector.elements[j]);
    }
  }
  for (std::int64_t i = done + lane; i < count; i += kWarp) look(from[i]);
}

// The largest of what the threads of a warp hold.
__device__ __forceinline__ float warp_largest(float value) {
  for (unsigned step = kWarp / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, static_cast<int>(step)));
  }
  return value;
}

// Converts one row by all threads of a warp.
template <class From, class To>
__device__ __forceinline__ void convert_row(const From* from, To* to, std::int64_t count,
                                            bool vectors, float* scale,
                                            std::uint32_t* non_finite_rows) {
  constexpr bool kSameType = std::is_same_v<From, To>;
  constexpr bool kQuantizes = kScaled<To> && !kSameType;
  float largest = 0.0F;  // among the finite
  if (kQuantizes || non_finite_rows != nullptr) {
    bool finite = true;
    look_at_row(from, count, vectors, [&](From element) {
      const float value = widen(element);
      const bool is_finite = isfinite(value);
      finite = finite && is_finite;
      largest = fmaxf(largest, is_finite ? fabsf(value) : 0.0F);
    });
    if (non_finite_rows != nullptr) {
      const bool counts = warp_largest(finite ? 0.0F : 1.0F) != 0.0F;
      if (counts && threadIdx.x % kWarp == 0) atomicAdd(non_finite_rows, 1U);
    }
  }
  if constexpr (kSameType) {
    change_row(from, to, count, vectors, [](From element) { return element; });
  } else if constexpr (kQuantizes) {
    const float divisor = float8_scale(warp_largest(largest));
    if (threadIdx.x % kWarp == 0) *scale = divisor;
    change_row(from, to, count, vectors,
               [=](From element) { return narrow<To>(widen(element) / divisor); });
  } else if constexpr (kScaled<From>) {
    const float factor = *scale;
    change_row(from, to, count, vectors,
               [=](From element) { return narrow<To>(widen(element) * factor); });
  } else {
    change_row(from, to, count, vectors, [](From element) { return narrow<To>(widen(element)); });
  }
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(RowsTask task, bool gathers, bool vectors) {
  const Conversion& conversion = task.conversion;
  const std::int64_t count = task.row_elements();
  for_each_row(task, [&](std::int64_t token, std::int64_t layer, const TokenMap::Place& place) {
    std::byte* const packed = task.rows.data + task.rows.offset(token, layer);
    float* const scale = conversion.scales == nullptr
                             ? nullptr
                             : conversion.scales + token * conversion.scale_token_stride +
                                   layer * conversion.scale_layer_stride;
    if (place.kind == Kind::kRow) {
      std::byte* const scattered =
          task.paged.data + task.paged.offset(place.block, layer, place.token_in_block);
      convert_row(reinterpret_cast<const From*>(gathers ? scattered : packed),
                  reinterpret_cast<To*>(gathers ? packed : scattered), count, vectors, scale,
                  conversion.non_finite_rows);
      return;
    }
    if (!gathers) return;
    const int fill = place.kind == Kind::kBad ? 0xFF : 0;
    const std::int64_t lane = threadIdx.x % kWarp;
    for (std::int64_t i = lane; i < task.rows_row_bytes(); i += kWarp) {
      packed[i] = static_cast<std::byte>(fill);
    }
    if (scale != nullptr && lane == 0) memset(scale, fill, sizeof(*scale));
  });
}

bool divides(std::size_t alignment, const std::byte* data,
             std::initializer_list<std::int64_t> strides) {
  auto bits = reinterpret_cast<std::uintptr_t>(data);
  for (const std::int64_t stride : strides) bits |= static_cast<std::uintptr_t>(stride);
  return bits % alignment == 0;
}

template <class Paged, class Rows>
cudaError_t launch_between(Direction direction, const RowsTask& task, cudaStream_t stream,
                           unsigned max_blocks) {
  const PagedView& paged = task.paged;
  const bool vectors = divides(alignof(Vector<Paged>), paged.data,
                               {paged.block_stride, paged.layer_stride, paged.token_stride}) &&
                       divides(alignof(Vector<Rows>), task.rows.data,
                               {task.rows.token_stride, task.rows.layer_stride});
  const bool gathers = direction == Direction::kGather;
  return launch_collective(gathers ? convert_kernel<Paged, Rows> : convert_kernel<Rows, Paged>,
                           grid_for(task, max_blocks), dim3(kThreads), stream, task, gathers,
                           vectors);
}

template <class Paged>
cudaError_t launch_from(Direction direction, const RowsTask& task, cudaStream_t stream,
                        unsigned max_blocks) {
  switch (task.conversion.rows) {
    case Element::kFloat32:
      return launch_between<Paged, float>(direction, task, stream, max_blocks);
    case Element::kFloat16:
      return launch_between<Paged, __half>(direction, task, stream, max_blocks);
    case Element::kBFloat16:
      return launch_between<Paged, __nv_bfloat16>(direction, task, stream, max_blocks);
    case Element::kFloat8:
      return launch_between<Paged, __nv_fp8_e4m3>(direction, task, stream, max_blocks);
    case Element::kAny:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t convert_rows(Direction direction, const RowsTask& task, cudaStream_t stream,
                         unsigned max_blocks) {
  const Conversion& conversion = task.conversion;
  const bool scaled =
      (conversion.paged == Element::kFloat8) != (conversion.rows == Element::kFloat8);
  if (scaled && conversion.scales == nullptr) return cudaErrorInvalidValue;
  switch (conversion.paged) {
    case Element::kFloat32:
      return launch_from<float>(direction, task, stream, max_blocks);
    case Element::kFloat16:
      return launch_from<__half>(direction, task, stream, max_blocks);
    case Element::kBFloat16:
      return launch_from<__nv_bfloat16>(direction, task, stream, max_blocks);
    case Element::kFloat8:
      return launch_from<__nv_fp8_e4m3>(direction, task, stream, max_blocks);
    case Element::kAny:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace hscache::cuda
