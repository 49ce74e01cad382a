#include "cuda/rows.h"

#include <algorithm>
#include <bit>

#include "cuda/launch.h"

namespace hscache::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarp = 32;
// Enough to fill any GPU of today; beyond it the grid-stride loop takes over.
constexpr std::int64_t kMaxBlocks = 4096;

enum class Way { kGather, kScatter };

// One warp copies one row at a time, in words as wide as every address in play allows.
template <Way kWay, class Word>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(PagedView paged, const std::int64_t* block_ids, std::int64_t start,
                std::int64_t length, RowsView rows) {
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / kWarp);
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const std::int64_t words = paged.row_bytes / static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t total = length * paged.num_layers;
  for (std::int64_t row = first; row < total; row += warps) {
    const std::int64_t token = row / paged.num_layers;
    const std::int64_t layer = row - token * paged.num_layers;
    const std::int64_t position = start + token;
    const std::int64_t block = block_ids[position / paged.block_size];
    auto* const scattered = reinterpret_cast<Word*>(
        paged.data + paged.offset(block, layer, position % paged.block_size));
    auto* const packed = reinterpret_cast<Word*>(rows.data + rows.offset(token, layer));
    const Word* const from = kWay == Way::kGather ? scattered : packed;
    Word* const to = kWay == Way::kGather ? packed : scattered;
    for (std::int64_t word = threadIdx.x % kWarp; word < words; word += kWarp) {
      to[word] = from[word];
    }
  }
}

template <Way kWay, class Word>
cudaError_t launch_rows(const PagedView& paged, const std::int64_t* block_ids, std::int64_t start,
                        std::int64_t length, const RowsView& rows, cudaStream_t stream,
                        unsigned max_blocks) {
  const std::int64_t per_block = kThreads / kWarp;
  const std::int64_t wanted = (length * paged.num_layers + per_block - 1) / per_block;
  const std::int64_t cap = max_blocks > 0 ? max_blocks : kMaxBlocks;
  return launch(rows_kernel<kWay, Word>, dim3(static_cast<unsigned>(std::min(wanted, cap))),
                dim3(kThreads), stream, paged, block_ids, start, length, rows);
}

template <Way kWay>
cudaError_t copy_rows(const PagedView& paged, const std::int64_t* block_ids, std::int64_t start,
                      std::int64_t length, const RowsView& rows, cudaStream_t stream,
                      unsigned max_blocks) {
  if (start < 0 || length < 0) return cudaErrorInvalidValue;
  if (length == 0 || paged.num_layers == 0) return cudaSuccess;
  // The lowest bit set anywhere tells the widest word that divides everything.
  const auto bits =
      reinterpret_cast<std::uintptr_t>(paged.data) | reinterpret_cast<std::uintptr_t>(rows.data) |
      static_cast<std::uintptr_t>(paged.row_bytes | paged.block_stride | paged.layer_stride |
                                  paged.token_stride | rows.token_stride | rows.layer_stride);
  switch (std::min(std::countr_zero(bits), 4)) {
    case 4:
      return launch_rows<kWay, uint4>(paged, block_ids, start, length, rows, stream, max_blocks);
    case 3:
      return launch_rows<kWay, uint2>(paged, block_ids, start, length, rows, stream, max_blocks);
    case 2:
      return launch_rows<kWay, std::uint32_t>(paged, block_ids, start, length, rows, stream,
                                              max_blocks);
    case 1:
      return launch_rows<kWay, std::uint16_t>(paged, block_ids, start, length, rows, stream,
                                              max_blocks);
    default:
      return launch_rows<kWay, std::uint8_t>(paged, block_ids, start, length, rows, stream,
                                             max_blocks);
  }
}

}  // namespace

cudaError_t gather_rows(const PagedView& paged, const std::int64_t* block_ids, std::int64_t start,
                        std::int64_t length, const RowsView& rows, cudaStream_t stream,
                        unsigned max_blocks) {
  return copy_rows<Way::kGather>(paged, block_ids, start, length, rows, stream, max_blocks);
}

cudaError_t scatter_rows(const PagedView& paged, const std::int64_t* block_ids, std::int64_t start,
                         std::int64_t length, const RowsView& rows, cudaStream_t stream,
                         unsigned max_blocks) {
  return copy_rows<Way::kScatter>(paged, block_ids, start, length, rows, stream, max_blocks);
}

}  // namespace hscache::cuda
