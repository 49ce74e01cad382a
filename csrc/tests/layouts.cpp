#include "tests/layouts.h"

#include <algorithm>

namespace hscache::test {
namespace {

constexpr std::size_t kGuard = 64;
static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16);  // of a buffer's first byte

// Strides for axes of `sizes` around rows of `row_bytes`: any order of the axes, some of them
// padded by multiples of `unit`. Returns the bytes spanned.
std::int64_t draw_strides(Random& random, const std::vector<std::int64_t>& sizes,
                          std::int64_t row_bytes, std::int64_t unit,
                          std::vector<std::int64_t>& strides) {
  std::vector<std::size_t> inner_first;
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) inner_first.push_back(axis);
  random.shuffle(inner_first);
  strides.resize(sizes.size());
  std::int64_t extent = row_bytes;
  for (const std::size_t axis : inner_first) {
    if (random.chance(30)) extent += unit * random.in(1, 3);
    strides[axis] = extent;
    extent *= std::max<std::int64_t>(sizes[axis], 1);
  }
  return extent;
}

}  // namespace

// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
std::uint64_t Random::bits() {
  std::uint64_t z = state_ += 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

std::int64_t Random::in(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
}

Buffer::Buffer(std::int64_t bytes, std::int64_t misaligned)
    : memory_(static_cast<std::size_t>(bytes + misaligned) + 2 * kGuard, std::byte{0xEE}),
      begin_(kGuard + static_cast<std::size_t>(misaligned)) {}

void Buffer::fill() {
  std::uint32_t state = 1;
  for (std::byte& byte : memory_) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<std::byte>(state >> 24);
  }
}

std::string Layout::text() const {
  std::string out;
  const auto add = [&](const char* what, std::initializer_list<std::int64_t> numbers) {
    out += what;
    for (const std::int64_t number : numbers) out += " " + std::to_string(number);
    out += "; ";
  };
  add("blocks, layers, block_size", {paged.num_blocks, paged.num_layers, paged.block_size});
  add("row_bytes", {paged.row_bytes});
  add("paged strides", {paged.block_stride, paged.layer_stride, paged.token_stride});
  add("rows strides", {rows.token_stride, rows.layer_stride});
  add("start, length", {start, length});
  out += "ids";
  for (const std::int64_t id : block_ids) out += " " + std::to_string(id);
  return out;
}

Layout draw_layout(Random& random, std::int64_t unit, std::int64_t max_row_units) {
  Layout layout;
  PagedView& paged = layout.paged;
  paged.num_blocks = random.in(1, 8);
  paged.num_layers = random.in(1, 4);
  paged.block_size = random.in(1, 6);
  paged.row_bytes = unit * random.in(1, max_row_units);
  std::vector<std::int64_t> strides;
  layout.paged_bytes = draw_strides(random, {paged.num_blocks, paged.num_layers, paged.block_size},
                                    paged.row_bytes, unit, strides);
  paged.block_stride = strides[0];
  paged.layer_stride = strides[1];
  paged.token_stride = strides[2];

  // Runs of neighbouring blocks between random ones, as an allocator leaves them; some repeat.
  const std::int64_t table = random.in(1, 10);
  for (std::int64_t i = 0; i < table; ++i) {
    const bool next = i > 0 && random.chance(50);
    layout.block_ids.push_back(next ? (layout.block_ids.back() + 1) % paged.num_blocks
                                    : random.in(0, paged.num_blocks - 1));
  }
  const std::int64_t tokens = table * paged.block_size;
  layout.start = random.in(0, tokens);
  layout.length = random.in(0, tokens - layout.start);
  layout.rows_bytes =
      draw_strides(random, {layout.length, paged.num_layers}, paged.row_bytes, unit, strides);
  layout.rows.token_stride = strides[0];
  layout.rows.layer_stride = strides[1];
  layout.misaligned = random.chance(50) ? unit % 16 : 0;
  return layout;
}

namespace {

// Calls `move(paged offset, rows offset)` for every row.
template <class Move>
void for_each_row(const Layout& layout, Move move) {
  for (std::int64_t i = 0; i < layout.length; ++i) {
    std::size_t place = 0;
    std::int64_t in_block = layout.start + i;
    while (in_block >= layout.paged.block_size) {
      in_block -= layout.paged.block_size;
      ++place;
    }
    for (std::int64_t layer = 0; layer < layout.paged.num_layers; ++layer) {
      move(layout.block_ids[place] * layout.paged.block_stride + layer * layout.paged.layer_stride +
               in_block * layout.paged.token_stride,
           i * layout.rows.token_stride + layer * layout.rows.layer_stride);
    }
  }
}

void copy_bytes(const std::byte* from, std::byte* to, std::int64_t bytes) {
  for (std::int64_t byte = 0; byte < bytes; ++byte) to[byte] = from[byte];
}

}  // namespace

void naive_gather(const Layout& layout, const std::byte* paged, std::byte* rows) {
  for_each_row(layout, [&](std::int64_t scattered, std::int64_t packed) {
    copy_bytes(paged + scattered, rows + packed, layout.paged.row_bytes);
  });
}

void naive_scatter(const Layout& layout, std::byte* paged, const std::byte* rows) {
  for_each_row(layout, [&](std::int64_t scattered, std::int64_t packed) {
    copy_bytes(rows + packed, paged + scattered, layout.paged.row_bytes);
  });
}

}  // namespace hscache::test
