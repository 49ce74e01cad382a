// What the row kernels share: one warp a row, rows dealt out over the grid.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/rows_task.h"
#include "cuda/launch.h"

namespace hscache::cuda {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarp = 32;
// Enough to fill any GPU of today; beyond it the grid-stride loop takes over.
constexpr std::int64_t kMaxBlocks = 4096;

inline dim3 grid_for(const RowsTask& task, unsigned max_blocks) {
  const std::int64_t per_block = kThreads / kWarp;
  const std::int64_t wanted = (task.length * task.paged.num_layers + per_block - 1) / per_block;
  const std::int64_t cap = max_blocks > 0 ? max_blocks : kMaxBlocks;
  return dim3(static_cast<unsigned>(std::min(wanted, cap)));
}

// Calls `move(token, layer, place)` for every row of this warp, by all of its threads. An id
// outside the cache is reported on the way.
template <class Move>
__device__ __forceinline__ void for_each_row(const RowsTask& task, Move move) {
  using Kind = TokenMap::Place::Kind;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / kWarp);
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const std::int64_t total = task.length * task.paged.num_layers;
  for (std::int64_t row = first; row < total; row += warps) {
    const std::int64_t token = row / task.paged.num_layers;
    const std::int64_t layer = row - token * task.paged.num_layers;
    const TokenMap::Place place = task.tokens.place(task.paged, token);
    if (place.kind == Kind::kBad && threadIdx.x % kWarp == 0) {
      // The host takes the first word for the sign that both are there.
      task.tokens.bad_id[1] = task.tokens.num_ids(task.paged);
      __threadfence_system();
      task.tokens.bad_id[0] = task.tokens.id(task.paged, token);
    }
    move(token, layer, place);
  }
}

}  // namespace hscache::cuda
