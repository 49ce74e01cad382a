// Any bytes as a view, a block table, a range and where its rows go: plan_copy() either refuses
// what it should refuse, or plans exactly the copies that going row by row would make.
//
// Built twice: with libFuzzer (tools/fuzz.sh), and with fuzz_driver.cpp in its place.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>
#include <vector>

#include "core/copy_plan.h"

namespace hscache::test {
namespace {

using Wide = __int128;  // in which nothing here overflows

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMostSpans = 4096;  // that a plan may need, for a fuzzer to be quick
constexpr std::int64_t kMostRows = 4096;   // that are compared one by one

// Reads numbers from the input, and zeros behind its end.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  std::uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  std::int64_t number() {
    std::uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | byte();
    return static_cast<std::int64_t>(bits);
  }
  // Mostly from 0 to `most`, at times anything.
  std::int64_t size(std::int64_t most) {
    const std::uint8_t choice = byte();
    if (choice < 240) return choice % (most + 1);
    if (choice < 244) return kMost / (choice - 239);
    if (choice < 248) return -1;
    return number();
  }
  // Mostly a small multiple of `unit`, at times anything.
  std::int64_t stride(std::int64_t unit) {
    const std::uint8_t choice = byte();
    if (choice < 200) return unit * (static_cast<std::int8_t>(byte()) / 8);
    if (choice < 220) return static_cast<std::int8_t>(byte());
    if (choice < 230) return kMost / (choice - 219);
    if (choice < 240) return kLeast / (choice - 229);
    return number();
  }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

struct Case {
  PagedView view;
  RowsView rows;
  std::vector<std::int64_t> ids;
  bool narrow = false;  // ids are 32 bits wide
  std::int64_t start = 0;
  std::int64_t length = 0;
};

Case decode(Input in) {
  Case c;
  c.view.num_blocks = in.size(20);
  c.view.num_layers = in.size(4);
  c.view.block_size = in.size(8);
  c.view.row_bytes = in.size(32);
  // Layouts whose rows touch are the ones with the most to join.
  const std::int64_t unit = std::clamp<std::int64_t>(c.view.row_bytes, 1, 32);
  const std::int64_t tokens = std::clamp<std::int64_t>(c.view.block_size, 1, 8);
  const std::int64_t layers = std::clamp<std::int64_t>(c.view.num_layers, 1, 4);
  c.view.token_stride = unit * layers;
  c.view.layer_stride = unit;
  c.view.block_stride = unit * layers * tokens;
  c.rows.token_stride = unit * layers;
  c.rows.layer_stride = unit;
  const std::uint8_t drawn = in.byte();
  if (drawn & 1) c.view.block_stride = in.stride(unit);
  if (drawn & 2) c.view.layer_stride = in.stride(unit);
  if (drawn & 4) c.view.token_stride = in.stride(unit);
  if (drawn & 8) c.rows.token_stride = in.stride(unit);
  if (drawn & 16) c.rows.layer_stride = in.stride(unit);
  c.narrow = drawn & 32;
  const std::uint8_t count = in.byte() % 24;
  for (std::uint8_t i = 0; i < count; ++i) {
    std::int64_t id = in.size(std::clamp<std::int64_t>(c.view.num_blocks, 1, 251) - 1);
    if (c.narrow) id = static_cast<std::int32_t>(id);
    c.ids.push_back(id);
  }
  c.start = in.size(40);
  c.length = in.size(100);
  return c;
}

// The bytes from the lowest to behind the highest that a view of these axes reaches.
struct Extent {
  Wide low = 0;
  Wide high = 0;

  void add(Wide size, std::int64_t stride) {
    // No more than what is far too much, or the sum would overflow.
    const Wide reach = std::clamp<Wide>((size - 1) * stride, -kMost, kMost);
    (reach < 0 ? low : high) += reach;
  }
  bool fits() const { return high - low <= kMost / 4; }
};

[[noreturn]] void fail(const Case& c, const char* what) {
  std::fprintf(stderr, "copy plan: %s\n  view", what);
  for (const std::int64_t n :
       {c.view.num_blocks, c.view.num_layers, c.view.block_size, c.view.row_bytes,
        c.view.block_stride, c.view.layer_stride, c.view.token_stride}) {
    std::fprintf(stderr, " %lld", static_cast<long long>(n));
  }
  std::fprintf(stderr, "\n  rows %lld %lld, start %lld, length %lld, ids",
               static_cast<long long>(c.rows.token_stride),
               static_cast<long long>(c.rows.layer_stride), static_cast<long long>(c.start),
               static_cast<long long>(c.length));
  for (const std::int64_t id : c.ids) std::fprintf(stderr, " %lld", static_cast<long long>(id));
  std::fprintf(stderr, "\n");
  std::abort();
}

// Whether there is anything wrong with it, in arithmetic of its own.
bool sound(const Case& c, const Extent& paged, const Extent& rows) {
  const PagedView& v = c.view;
  if (v.num_blocks < 0 || v.num_layers < 0 || v.block_size < 1 || v.row_bytes < 1) return false;
  if (c.start < 0 || c.length < 0) return false;
  if (c.length == 0) return true;
  const Wide end = Wide{c.start} + c.length;
  if (end > Wide{v.block_size} * static_cast<Wide>(c.ids.size()) || end > kMost) return false;
  for (Wide i = c.start / v.block_size; i * v.block_size < end; ++i) {
    const std::int64_t id = c.ids[static_cast<std::size_t>(i)];
    if (id < 0 || id >= v.num_blocks) return false;
  }
  if (v.num_layers == 0) return true;
  const bool countable = Wide{c.length} * v.num_layers <= kMost / 4 / v.row_bytes;
  return countable && paged.fits() && rows.fits();
}

struct Row {
  std::int64_t paged = 0;
  std::int64_t rows = 0;
  auto operator<=>(const Row&) const = default;
};

void run(const Case& c) {
  Extent paged{0, c.view.row_bytes};
  paged.add(c.view.num_blocks, c.view.block_stride);
  paged.add(c.view.num_layers, c.view.layer_stride);
  paged.add(c.view.block_size, c.view.token_stride);
  Extent rows{0, c.view.row_bytes};
  rows.add(c.length, c.rows.token_stride);
  rows.add(c.view.num_layers, c.rows.layer_stride);
  const bool is_sound = sound(c, paged, rows);
  const bool many = Wide{c.view.num_layers} * static_cast<Wide>(c.ids.size()) > kMostSpans;
  if (is_sound && c.length > 0 && many) return;

  const std::vector<std::int32_t> narrow(c.ids.begin(), c.ids.end());
  const BlockTable blocks = c.narrow ? BlockTable{std::span<const std::int32_t>(narrow)}
                                     : BlockTable{std::span<const std::int64_t>(c.ids)};
  std::vector<CopySpan> plan;
  try {
    plan = plan_copy(c.view, blocks, c.start, c.length, c.rows);
  } catch (const std::invalid_argument&) {
    if (is_sound) fail(c, "refused, although sound");
    return;
  } catch (const std::out_of_range&) {
    if (is_sound) fail(c, "refused, although sound");
    return;
  }
  if (!is_sound) fail(c, "planned, although not sound");

  Wide bytes = 0;
  for (const CopySpan& span : plan) {
    if (span.count < 1 || span.bytes < 1) fail(c, "an empty span");
    if (span.bytes % c.view.row_bytes != 0) fail(c, "a piece of broken rows");
    bytes += Wide{span.bytes} * span.count;
    for (const Wide piece : {Wide{0}, Wide{span.count} - 1}) {
      const Wide from = span.paged_offset + piece * span.paged_step;
      const Wide to = span.rows_offset + piece * span.rows_step;
      if (from < paged.low || from + span.bytes > paged.high) fail(c, "outside of the view");
      if (to < rows.low || to + span.bytes > rows.high) fail(c, "outside of the rows");
    }
  }
  const Wide num_rows = Wide{c.length} * c.view.num_layers;
  if (bytes != num_rows * c.view.row_bytes) fail(c, "too many or too few bytes");
  if (num_rows == 0 || num_rows > kMostRows) return;

  std::vector<Row> expected;
  for (std::int64_t i = 0; i < c.length; ++i) {
    const std::int64_t token = c.start + i;
    const std::int64_t block = c.ids[static_cast<std::size_t>(token / c.view.block_size)];
    for (std::int64_t layer = 0; layer < c.view.num_layers; ++layer) {
      expected.push_back({block * c.view.block_stride + layer * c.view.layer_stride +
                              token % c.view.block_size * c.view.token_stride,
                          i * c.rows.token_stride + layer * c.rows.layer_stride});
    }
  }
  std::vector<Row> planned;
  for (const CopySpan& span : plan) {
    for (std::int64_t piece = 0; piece < span.count; ++piece) {
      for (std::int64_t byte = 0; byte < span.bytes; byte += c.view.row_bytes) {
        planned.push_back({span.paged_offset + piece * span.paged_step + byte,
                           span.rows_offset + piece * span.rows_step + byte});
      }
    }
  }
  std::sort(expected.begin(), expected.end());
  std::sort(planned.begin(), planned.end());
  if (planned != expected) fail(c, "other rows than one by one");
}

}  // namespace
}  // namespace hscache::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hscache::test;
  run(decode(Input(data, size)));
  return 0;
}
