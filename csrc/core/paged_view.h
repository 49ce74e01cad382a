// The index arithmetic of a paged cache, shared by host and device code.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define HSCACHE_HOST_DEVICE __host__ __device__
#else
#define HSCACHE_HOST_DEVICE
#endif

namespace hscache {

// A strided view of paged memory: `[num_blocks, num_layers, block_size]` rows of `row_bytes`
// contiguous bytes. Strides are in bytes and arbitrary (an engine may lay its cache out
// token-major or layer-major, and may pad its pages). Does not own the memory.
struct PagedView {
  std::byte* data = nullptr;
  std::int64_t num_blocks = 0;
  std::int64_t num_layers = 0;
  std::int64_t block_size = 0;  // tokens in a block
  std::int64_t row_bytes = 0;
  std::int64_t block_stride = 0;
  std::int64_t layer_stride = 0;
  std::int64_t token_stride = 0;

  // Byte offset from `data` of the row of one token of one layer.
  HSCACHE_HOST_DEVICE constexpr std::int64_t offset(std::int64_t block, std::int64_t layer,
                                                    std::int64_t token_in_block) const {
    return block * block_stride + layer * layer_stride + token_in_block * token_stride;
  }

  // The same memory seen as `count` of its layers, from `first` on.
  constexpr PagedView layers(std::size_t first, std::size_t count) const {
    PagedView view = *this;
    view.data += static_cast<std::int64_t>(first) * layer_stride;
    view.num_layers = static_cast<std::int64_t>(count);
    return view;
  }
};

// A strided view of rows in token order: `[tokens, layers]` rows. Strides are in bytes.
struct RowsView {
  std::byte* data = nullptr;
  std::int64_t token_stride = 0;
  std::int64_t layer_stride = 0;

  HSCACHE_HOST_DEVICE constexpr std::int64_t offset(std::int64_t token, std::int64_t layer) const {
    return token * token_stride + layer * layer_stride;
  }
};

}  // namespace hscache
