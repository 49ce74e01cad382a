#include "tests/requests.h"

#include <utility>

namespace hscache::test {
namespace {

constexpr std::byte kUntouched{0xEE};

// Memory for the rows of a piece, and a byte more: there is an address also where there are no
// rows.
std::vector<std::byte> room_for(std::int64_t length) {
  return std::vector<std::byte>(static_cast<std::size_t>(length * kRowBytes + 1), kUntouched);
}

std::size_t layer_of(std::size_t piece) { return piece % kLayers; }

}  // namespace

Cache::Cache() : memory_(kBlocks * kLayers * kBlockSize * kRowBytes) { memory_.fill(); }

PagedView Cache::view() {
  return {.data = memory_.data(),
          .num_blocks = kBlocks,
          .num_layers = kLayers,
          .block_size = kBlockSize,
          .row_bytes = kRowBytes,
          .block_stride = kLayers * kBlockSize * kRowBytes,
          .layer_stride = kBlockSize * kRowBytes,
          .token_stride = kRowBytes};
}

void Cache::overwrite() {
  for (std::int64_t i = 0; i < kBlocks * kLayers * kBlockSize * kRowBytes; ++i) {
    memory_.data()[i] ^= std::byte{0x5A};
  }
}

Request::Request(Cache& cache, std::vector<std::int64_t> block_ids, std::int64_t start,
                 const std::vector<std::int64_t>& lengths)
    : view_(cache.view()), block_ids_(std::move(block_ids)) {
  for (const std::int64_t length : lengths) {
    destinations_.push_back(room_for(length));
    RowsPiece piece{.start = start, .length = length, .layers = {}};
    piece.layers.resize(kLayers, nullptr);
    piece.layers[layer_of(pieces_.size())] = destinations_.back().data();
    pieces_.push_back(std::move(piece));
    start += length;
  }
}

bool Request::holds_its_rows() const {
  std::vector<std::vector<std::byte>> expected;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const RowsPiece& piece = pieces_[i];
    expected.push_back(room_for(piece.length));
    Layout layout;
    layout.paged = view_.layers(layer_of(i), 1);
    layout.block_ids = block_ids_;
    layout.start = piece.start;
    layout.length = piece.length;
    layout.rows.token_stride = kRowBytes;
    naive_gather(layout, layout.paged.data, expected.back().data());
  }
  return expected == destinations_;
}

bool Request::is_untouched() const {
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (destinations_[i] != room_for(pieces_[i].length)) return false;
  }
  return true;
}

Request draw_request(Cache& cache, Random& random) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(random.in(1, 6)));
  const std::int64_t start = random.in(0, 5);
  std::int64_t tokens = start;
  for (std::int64_t& length : lengths) tokens += length = random.in(0, 9);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(tokens / kBlockSize + 1));
  for (std::int64_t& id : ids) id = random.in(0, kBlocks - 1);
  return Request(cache, std::move(ids), start, lengths);
}

}  // namespace hscache::test
