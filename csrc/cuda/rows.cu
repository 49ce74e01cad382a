#include "cuda/rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cuda/convert.h"
#include "cuda/row_loop.cuh"

namespace hscache::cuda {
namespace {

using Kind = TokenMap::Place::Kind;

// By all threads of a warp.
template <class Word>
__device__ __forceinline__ void copy_words(const Word* from, Word* to, std::int64_t words) {
  // Several loads on their way before the first store: the compiler may not move a load over a
  // store that could change what it reads.
  constexpr int kBatch = 4;
#pragma unroll 1
  for (std::int64_t first = threadIdx.x % kWarp; first < words; first += kBatch * kWarp) {
    Word batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kWarp < words) batch[i] = from[first + i * kWarp];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kWarp < words) to[first + i * kWarp] = batch[i];
    }
  }
}

// Moves rows bit for bit, in words as wide as every address in play allows.
template <Direction kDirection, class Word>
__global__ void __launch_bounds__(kThreads) rows_kernel(RowsTask task) {
  const std::int64_t words = task.paged.row_bytes / static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t lane = threadIdx.x % kWarp;
  for_each_row(task, [&](std::int64_t token, std::int64_t layer, const TokenMap::Place& place) {
    auto* const packed = reinterpret_cast<Word*>(task.rows.data + task.rows.offset(token, layer));
    if (place.kind != Kind::kRow) {
      if (kDirection == Direction::kScatter) return;
      Word fill;
      memset(&fill, place.kind == Kind::kBad ? 0xFF : 0, sizeof(fill));
#pragma unroll 1
      for (std::int64_t word = lane; word < words; word += kWarp) packed[word] = fill;
      return;
    }
    auto* const scattered = reinterpret_cast<Word*>(
        task.paged.data + task.paged.offset(place.block, layer, place.token_in_block));
    const Word* const from = kDirection == Direction::kGather ? scattered : packed;
    Word* const to = kDirection == Direction::kGather ? packed : scattered;
    copy_words(from, to, words);
  });
}

template <Direction kDirection>
cudaError_t launch_rows(const RowsTask& task, cudaStream_t stream, unsigned max_blocks) {
  const dim3 grid = grid_for(task, max_blocks);
  const auto launch_in = [&](void (*kernel)(RowsTask)) {
    return launch(kernel, grid, dim3(kThreads), stream, task);
  };
  const PagedView& paged = task.paged;
  // The lowest bit set anywhere tells the widest word that divides everything.
  const auto bits = reinterpret_cast<std::uintptr_t>(paged.data) |
                    reinterpret_cast<std::uintptr_t>(task.rows.data) |
                    static_cast<std::uintptr_t>(paged.row_bytes | paged.block_stride |
                                                paged.layer_stride | paged.token_stride |
                                                task.rows.token_stride | task.rows.layer_stride);
  switch (std::min(std::countr_zero(bits), 4)) {
    case 4:
      return launch_in(rows_kernel<kDirection, uint4>);
    case 3:
      return launch_in(rows_kernel<kDirection, uint2>);
    case 2:
      return launch_in(rows_kernel<kDirection, std::uint32_t>);
    case 1:
      return launch_in(rows_kernel<kDirection, std::uint16_t>);
    default:
      return launch_in(rows_kernel<kDirection, std::uint8_t>);
  }
}

}  // namespace

cudaError_t move_rows(Direction direction, const RowsTask& task, cudaStream_t stream,
                      unsigned max_blocks) {
  if (task.tokens.start < 0 || task.length < 0) return cudaErrorInvalidValue;
  if (task.length == 0 || task.paged.num_layers == 0) return cudaSuccess;
  if (task.conversion.looks_at_elements()) return convert_rows(direction, task, stream, max_blocks);
  return direction == Direction::kGather
             ? launch_rows<Direction::kGather>(task, stream, max_blocks)
             : launch_rows<Direction::kScatter>(task, stream, max_blocks);
}

}  // namespace hscache::cuda
