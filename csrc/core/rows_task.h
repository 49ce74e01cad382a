// One piece of work for whatever moves rows: a kernel, or a loop on the host.
#pragma once

#include <cstdint>

#include "core/block_table.h"
#include "core/element.h"
#include "core/paged_view.h"

namespace hscache {

enum class Direction { kGather, kScatter };  // paged memory -> rows, rows -> paged memory

// Where the tokens of a request lie in paged memory. Token i is found by `ids`, counted from
// `start`: in a block table at `(start + i) / block_size`, in a slot mapping at `start + i`, where
// a slot is `block * block_size + place in the block` and a negative one is padding.
struct TokenMap {
  BlockTable ids;  // in memory of whatever runs the task
  std::int64_t start = 0;
  bool slots = false;  // a slot mapping
  // Null where ids were checked before. Otherwise 2 words, 0 at first, in memory that host and
  // device reach: an id outside the cache touches no paged memory and puts {itself, the number of
  // ids that there are} here. Id 0 is inside every cache that has blocks at all.
  volatile std::int64_t* bad_id = nullptr;

  struct Place {
    std::int64_t block = 0;
    std::int64_t token_in_block = 0;
    enum class Kind { kRow, kPadding, kBad } kind = Kind::kRow;
  };

  HSCACHE_HOST_DEVICE constexpr Place place(const PagedView& paged, std::int64_t token) const {
    const std::int64_t position = start + token;
    Place found;
    if (slots) {
      const std::int64_t slot = ids[position];
      if (slot < 0) {
        found.kind = Place::Kind::kPadding;
        return found;
      }
      found.block = slot / paged.block_size;
      found.token_in_block = slot % paged.block_size;
    } else {
      found.block = ids[position / paged.block_size];
      found.token_in_block = position % paged.block_size;
    }
    if (bad_id != nullptr && (found.block < 0 || found.block >= paged.num_blocks)) {
      found.kind = Place::Kind::kBad;
    }
    return found;
  }

  // The id that names a token's place, and how many there are to choose from.
  HSCACHE_HOST_DEVICE constexpr std::int64_t id(const PagedView& paged, std::int64_t token) const {
    return ids[slots ? start + token : (start + token) / paged.block_size];
  }
  HSCACHE_HOST_DEVICE constexpr std::int64_t num_ids(const PagedView& paged) const {
    if (!slots) return paged.num_blocks;
    // A view of stride 0 may claim any size.
    constexpr std::int64_t kMost = INT64_MAX;
    return paged.num_blocks > kMost / paged.block_size ? kMost
                                                       : paged.num_blocks * paged.block_size;
  }
};

// What happens to the elements of rows on the way.
struct Conversion {
  // kAny on both sides: bit for bit. Otherwise neither is kAny.
  Element paged = Element::kAny;
  Element rows = Element::kAny;
  // Where one side is kFloat8: the scale of each of its rows, `[token, layer]` floats apart.
  float* scales = nullptr;
  std::int64_t scale_token_stride = 0;
  std::int64_t scale_layer_stride = 0;
  // Where it is asked for: counts the rows that hold an infinity or a NaN. Needs a known element.
  std::uint32_t* non_finite_rows = nullptr;

  HSCACHE_HOST_DEVICE constexpr bool looks_at_elements() const { return paged != Element::kAny; }
};

// Tokens of a request in `paged`, all its layers, and the rows that they are copied to or from; row
// 0 is the first token of `tokens`. No two tokens of a scatter have one place.
struct RowsTask {
  PagedView paged;
  TokenMap tokens;
  std::int64_t length = 0;
  RowsView rows;
  Conversion conversion = {};

  HSCACHE_HOST_DEVICE constexpr std::int64_t row_elements() const {
    return paged.row_bytes / element_bytes(conversion.paged);
  }
  HSCACHE_HOST_DEVICE constexpr std::int64_t rows_row_bytes() const {
    return row_elements() * element_bytes(conversion.rows);
  }
};

}  // namespace hscache
