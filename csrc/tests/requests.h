// A small paged cache, and gathers out of it whose rows can be checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/transfer_engine.h"
#include "tests/layouts.h"

namespace hscache::test {

constexpr std::int64_t kRowBytes = 16;
constexpr std::int64_t kBlocks = 8;
constexpr std::int64_t kLayers = 2;
constexpr std::int64_t kBlockSize = 4;

// `[block, layer, token]` rows.
class Cache {
 public:
  Cache();
  PagedView view();
  // What a producer writes late: other rows everywhere.
  void overwrite();

 private:
  Buffer memory_;
};

// One gather and the memory that its pieces go to.
class Request {
 public:
  // Pieces of `lengths` tokens, one behind the other from token `start`, of layers in turn.
  Request(Cache& cache, std::vector<std::int64_t> block_ids, std::int64_t start,
          const std::vector<std::int64_t>& lengths);

  TransferRequest gather() const { return {Direction::kGather, view_, block_ids_, pieces_, 0}; }
  const std::byte* destination(std::size_t piece) const { return destinations_[piece].data(); }
  const std::vector<std::vector<std::byte>>& destinations() const { return destinations_; }

  // Whether every destination holds the rows that the cache holds now.
  bool holds_its_rows() const;
  bool is_untouched() const;

 private:
  PagedView view_;
  std::vector<std::int64_t> block_ids_;
  std::vector<std::vector<std::byte>> destinations_;
  std::vector<RowsPiece> pieces_;
};

// 1 to 6 pieces of 0 to 9 tokens, over random blocks.
Request draw_request(Cache& cache, Random& random);

}  // namespace hscache::test
