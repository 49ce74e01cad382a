// The row kernels, thread by thread on the host: bit for bit in both directions, conversions
// against the loops of the core, padding and bad ids.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "core/move_rows.h"
#include "cuda/rows.h"
#include "tests/harness.h"
#include "tests/launch_at_once.h"
#include "tests/layouts.h"

namespace hscache::test {
namespace {

using cuda::host::latest_launch;

const cudaStream_t kStream = reinterpret_cast<cudaStream_t>(std::uintptr_t{0x51});

BlockTable table_of(const std::vector<std::int64_t>& ids) {
  return BlockTable{std::span<const std::int64_t>(ids)};
}

RowsTask task_of(const Layout& layout) {
  RowsTask task;
  task.paged = layout.paged;
  task.tokens = {.ids = table_of(layout.block_ids), .start = layout.start};
  task.length = layout.length;
  task.rows = layout.rows;
  return task;
}

cudaError_t gather(const PagedView& paged, const std::vector<std::int64_t>& ids, std::int64_t start,
                   std::int64_t length, const RowsView& rows, unsigned max_blocks = 0) {
  RowsTask task{.paged = paged};
  task.tokens = {.ids = table_of(ids), .start = start};
  task.length = length;
  task.rows = rows;
  return cuda::move_rows(Direction::kGather, task, kStream, max_blocks);
}

// Every block once, so that a scatter has one row for each place.
void make_ids_unique(Random& random, Layout& layout) {
  std::vector<std::int64_t> ids;
  for (std::int64_t block = 0; block < layout.paged.num_blocks; ++block) ids.push_back(block);
  random.shuffle(ids);
  ids.resize(std::min(ids.size(), layout.block_ids.size()));
  layout.block_ids = ids;
  const std::int64_t tokens = static_cast<std::int64_t>(ids.size()) * layout.paged.block_size;
  layout.start = std::min(layout.start, tokens);
  layout.length = std::min(layout.length, tokens - layout.start);
}

}  // namespace

TEST(row_kernels, random_layouts_equal_a_copy_row_by_row) {
  Random random(20261130);
  std::set<const void*> kernels;
  for (int round = 0; round < 10'000; ++round) {
    const std::int64_t unit = random.pick<std::int64_t>({1, 2, 4, 8, 16});
    // Rows of more words than a warp has threads, at times of more than it moves at once.
    Layout layout = draw_layout(random, unit, random.chance(20) ? 200 : 5);
    const Direction direction = random.chance(50) ? Direction::kGather : Direction::kScatter;
    const bool gathers = direction == Direction::kGather;
    if (!gathers) make_ids_unique(random, layout);
    const std::int64_t rows_misaligned = random.chance(50) ? unit % 16 : 0;
    Buffer paged(layout.paged_bytes, layout.misaligned);
    Buffer rows(layout.rows_bytes, rows_misaligned);
    (gathers ? paged : rows).fill();
    Buffer expected_paged = paged;
    Buffer expected_rows = rows;
    layout.paged.data = paged.data();
    layout.rows.data = rows.data();
    RowsTask task = task_of(layout);
    std::vector<std::int32_t> narrow(layout.block_ids.begin(), layout.block_ids.end());
    if (random.chance(50)) task.tokens.ids = BlockTable{std::span<const std::int32_t>(narrow)};
    cuda::host::set_order(static_cast<std::uint64_t>(round));
    const unsigned max_blocks = random.pick({0U, 1U, 2U});
    const cudaError_t answer = cuda::move_rows(direction, task, kStream, max_blocks);
    if (gathers) {
      naive_gather(layout, expected_paged.data(), expected_rows.data());
    } else {
      naive_scatter(layout, expected_paged.data(), expected_rows.data());
    }
    bool sound = CHECK_EQ(answer, cudaSuccess) && CHECK(rows == expected_rows) &&
                 CHECK(paged == expected_paged);
    if (layout.length > 0) {
      kernels.insert(latest_launch().kernel);
      sound &= CHECK(max_blocks == 0 || latest_launch().blocks <= max_blocks) &&
               CHECK_EQ(latest_launch().stream, kStream);
    }
    if (!sound) {
      report_failure(__FILE__, __LINE__,
                     "round " + std::to_string(round) + ", unit " + std::to_string(unit) + ": " +
                         layout.text());
      return;
    }
  }
  CHECK_EQ(kernels.size(), 10U);  // both ways, words of 1, 2, 4, 8 and 16 bytes were all at work
}

TEST(row_kernels, a_grid_of_two_blocks_goes_round_many_times) {
  // 300 tokens of 3 layers, 16 rows at a time.
  Layout layout;
  layout.paged = {nullptr, 40, 3, 8, 32, 3 * 8 * 32, 8 * 32, 32};
  for (std::int64_t i = 0; i < 38; ++i) layout.block_ids.push_back((i * 17) % 40);
  layout.start = 3;
  layout.length = 300;
  layout.rows = {nullptr, 3 * 32, 32};
  Buffer paged(40 * 3 * 8 * 32);
  paged.fill();
  Buffer ours(300 * 3 * 32);
  Buffer expected(300 * 3 * 32);
  layout.paged.data = paged.data();
  layout.rows.data = ours.data();
  CHECK_EQ(cuda::move_rows(Direction::kGather, task_of(layout), kStream, 2), cudaSuccess);
  naive_gather(layout, paged.data(), expected.data());
  CHECK_EQ(latest_launch().blocks, 2U);
  CHECK(ours == expected);
}

TEST(row_kernels, use_the_widest_word_that_divides_every_address) {
  // One launch for each number of bytes that row and addresses share; equal widths share a kernel.
  std::vector<const void*> kernels;
  for (const std::int64_t unit : {1, 2, 4, 8, 16, 32}) {
    Buffer paged(4 * 2 * unit);
    Buffer rows(2 * unit);
    const PagedView view{paged.data(), 4, 1, 2, unit, 2 * unit, 2 * unit, unit};
    CHECK_EQ(gather(view, {3}, 0, 2, {rows.data(), unit, unit}), cudaSuccess);
    kernels.push_back(latest_launch().kernel);
  }
  CHECK_EQ(std::set<const void*>(kernels.begin(), kernels.end()).size(), 5U);
  CHECK_EQ(kernels[4], kernels[5]);
}

TEST(row_kernels, any_address_limits_the_word) {
  Buffer paged(4096);
  Buffer rows(4096);
  const PagedView view{paged.data(), 4, 2, 2, 16, 128, 64, 32};
  const RowsView to{rows.data(), 64, 32};
  const auto kernel_for = [&](const PagedView& from, const RowsView& into) {
    CHECK_EQ(gather(from, {3}, 0, 2, into), cudaSuccess);
    return latest_launch().kernel;
  };
  PagedView narrow = view;
  narrow.row_bytes = 4;
  const void* const words_of_4 = kernel_for(narrow, to);
  CHECK(kernel_for(view, to) != words_of_4);
  for (std::int64_t PagedView::* stride :
       {&PagedView::block_stride, &PagedView::layer_stride, &PagedView::token_stride}) {
    PagedView odd = view;
    odd.*stride += 4;
    CHECK_EQ(kernel_for(odd, to), words_of_4);
  }
  for (std::int64_t RowsView::* stride : {&RowsView::token_stride, &RowsView::layer_stride}) {
    RowsView odd = to;
    odd.*stride += 4;
    CHECK_EQ(kernel_for(view, odd), words_of_4);
  }
  PagedView odd_paged = view;
  odd_paged.data += 4;
  CHECK_EQ(kernel_for(odd_paged, to), words_of_4);
  RowsView odd_rows = to;
  odd_rows.data += 4;
  CHECK_EQ(kernel_for(view, odd_rows), words_of_4);
}

TEST(row_kernels, nothing_to_move_launches_nothing) {
  const PagedView view{nullptr, 4, 1, 2, 16, 32, 32, 16};
  const std::int64_t before = latest_launch().number;
  CHECK_EQ(gather(view, {}, 5, 0, {}), cudaSuccess);
  PagedView no_layers = view;
  no_layers.num_layers = 0;
  CHECK_EQ(gather(no_layers, {}, 0, 7, {}), cudaSuccess);
  CHECK_EQ(latest_launch().number, before);
}

TEST(row_kernels, refuse_negative_start_and_length) {
  const PagedView view{nullptr, 4, 1, 2, 16, 32, 32, 16};
  CHECK_EQ(gather(view, {}, -1, 1, {}), cudaErrorInvalidValue);
  CHECK_EQ(gather(view, {}, 0, -1, {}), cudaErrorInvalidValue);
}

namespace {

constexpr std::array<Element, 4> kElements{Element::kFloat32, Element::kFloat16, Element::kBFloat16,
                                           Element::kFloat8};

// Paged memory and rows of random layout and random elements, and a token map that may hold padding
// and bad ids.
struct Scene {
  RowsTask task;
  std::vector<std::int64_t> ids;
  Buffer paged;
  Buffer rows;
  std::vector<float> scales;
  std::uint32_t non_finite = 0;
  std::array<std::int64_t, 2> bad_id{};

  Scene() : paged(0), rows(0) {}
  Scene(const Scene&) = delete;

  // The same scene in memory of its own.
  void point_into(Scene& other) const {
    other.task = task;
    other.ids = ids;
    other.paged = paged;
    other.rows = rows;
    other.scales = scales;
    other.wire();
  }
  void wire() {
    task.paged.data = paged.data();
    task.rows.data = rows.data();
    task.tokens.ids = table_of(ids);
    if (task.tokens.bad_id != nullptr) task.tokens.bad_id = bad_id.data();
    if (!scales.empty()) task.conversion.scales = scales.data();
    if (task.conversion.non_finite_rows != nullptr) task.conversion.non_finite_rows = &non_finite;
  }
};

void draw_elements(Random& random, Buffer& buffer, std::int64_t bytes, Element element) {
  for (std::int64_t i = 0; i < bytes; ++i) {
    buffer.data()[i] = static_cast<std::byte>(random.bits());
  }
  if (random.chance(50)) return;  // any bits: infinities, NaNs and denormal numbers too
  // Finite and of one magnitude, as rows are: the top bits of each exponent are set.
  const std::int64_t size = element_bytes(element);
  for (std::int64_t i = size - 1; i < bytes; i += size) {
    std::byte& top = buffer.data()[i];
    top = (top & std::byte{0x83}) | (size == 1 ? std::byte{0x30} : std::byte{0x38});
  }
}

void draw_scene(Random& random, Scene& scene, Direction direction, bool converts) {
  RowsTask& task = scene.task;
  const Element paged =
      converts ? kElements[static_cast<std::size_t>(random.in(0, 3))] : Element::kAny;
  const Element rows =
      converts ? kElements[static_cast<std::size_t>(random.in(0, 3))] : Element::kAny;
  // Elements of a row: few, or enough for every thread's vectors and a rest.
  const std::int64_t count = random.chance(60) ? random.in(1, 40) : 8 * random.in(1, 80);
  const std::int64_t step = random.pick<std::int64_t>({1, 8, 16});
  const auto up = [&](std::int64_t bytes, std::int64_t size) {
    const std::int64_t unit = step * size;
    return (bytes + unit - 1) / unit * unit;
  };
  PagedView& view = task.paged;
  view.num_blocks = random.in(1, 6);
  view.num_layers = random.in(1, 3);
  view.block_size = random.in(1, 5);
  view.row_bytes = count * element_bytes(paged);
  view.token_stride = up(view.row_bytes, element_bytes(paged));
  view.layer_stride = view.block_size * view.token_stride;
  view.block_stride = view.num_layers * view.layer_stride;
  const std::int64_t paged_bytes = view.num_blocks * view.block_stride;
  scene.paged = Buffer(paged_bytes, random.chance(30) ? element_bytes(paged) : 0);

  task.tokens.slots = random.chance(50);
  const bool checks = random.chance(50);
  std::vector<std::int64_t> ids;
  const std::int64_t num_ids = view.num_blocks * (task.tokens.slots ? view.block_size : 1);
  for (std::int64_t id = 0; id < num_ids; ++id) ids.push_back(id);
  random.shuffle(ids);
  for (std::int64_t& id : ids) {
    if (task.tokens.slots && random.chance(15)) id = -random.in(1, 9);
    if (checks && random.chance(15))
      id = random.pick<std::int64_t>({num_ids, num_ids + 7, 1LL << 40});
    if (checks && !task.tokens.slots && random.chance(5)) id = -1;
  }
  const std::int64_t tokens =
      static_cast<std::int64_t>(ids.size()) * (task.tokens.slots ? 1 : view.block_size);
  task.tokens.start = random.in(0, tokens);
  task.length = random.in(0, tokens - task.tokens.start);
  scene.ids = ids;
  task.tokens.bad_id = checks ? scene.bad_id.data() : nullptr;

  task.conversion.paged = paged;
  task.conversion.rows = rows;
  const std::int64_t row_bytes = task.rows_row_bytes();
  task.rows.layer_stride = up(row_bytes, element_bytes(rows));
  task.rows.token_stride = view.num_layers * task.rows.layer_stride;
  const std::int64_t rows_bytes = task.length * task.rows.token_stride;
  scene.rows = Buffer(rows_bytes, random.chance(30) ? element_bytes(rows) : 0);
  if (converts && (paged == Element::kFloat8) != (rows == Element::kFloat8)) {
    task.conversion.scale_layer_stride = random.pick<std::int64_t>({1, task.length});
    task.conversion.scale_token_stride =
        task.conversion.scale_layer_stride == 1 ? view.num_layers : 1;
    scene.scales.resize(static_cast<std::size_t>(task.length * view.num_layers) + 1);
    for (float& scale : scene.scales)
      scale = std::ldexp(1.0F + 0.37F, static_cast<int>(random.in(-20, 20)));
  }
  if (converts && random.chance(50)) task.conversion.non_finite_rows = &scene.non_finite;
  if (direction == Direction::kGather) {
    draw_elements(random, scene.paged, paged_bytes, paged);
  } else {
    draw_elements(random, scene.rows, rows_bytes, rows);
  }
  scene.wire();
}

bool is_nan(const std::byte* at, Element element) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, at, static_cast<std::size_t>(element_bytes(element)));
  switch (element) {
    case Element::kFloat32:
      return (bits & 0x7FFFFFFFU) > 0x7F800000U;
    case Element::kFloat16:
      return (bits & 0x7FFFU) > 0x7C00U;
    case Element::kBFloat16:
      return (bits & 0x7FFFU) > 0x7F80U;
    case Element::kFloat8:
      return (bits & 0x7FU) == 0x7FU;
    case Element::kAny:
      return false;
  }
  return false;
}

// Equal to the bit, except that a NaN is a NaN.
bool equal(Buffer& a, Buffer& b, std::int64_t bytes, Element element) {
  const std::int64_t size = element_bytes(element);
  for (std::int64_t i = 0; i < bytes; i += size) {
    const bool same = std::memcmp(a.data() + i, b.data() + i, static_cast<std::size_t>(size)) == 0;
    if (!same && !(is_nan(a.data() + i, element) && is_nan(b.data() + i, element))) return false;
  }
  return true;
}

bool equal_scales(const std::vector<float>& a, const std::vector<float>& b) {
  return a.empty() ? b.empty() : std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check_against_the_core(bool converts, int rounds) {
  Random random(converts ? 8 : 9);
  int bad = 0;
  for (int round = 0; round < rounds; ++round) {
    const Direction direction = random.chance(50) ? Direction::kGather : Direction::kScatter;
    Scene ours;
    draw_scene(random, ours, direction, converts);
    Scene expected;
    ours.point_into(expected);
    cuda::host::set_order(static_cast<std::uint64_t>(round));
    const cudaError_t answer =
        cuda::move_rows(direction, ours.task, kStream, random.pick({0U, 1U, 2U}));
    move_rows(direction, expected.task);
    const PagedView& view = ours.task.paged;
    const bool sound =
        CHECK_EQ(answer, cudaSuccess) &&
        CHECK(equal(ours.paged, expected.paged, view.num_blocks * view.block_stride,
                    ours.task.conversion.paged)) &&
        CHECK(equal(ours.rows, expected.rows, ours.task.length * ours.task.rows.token_stride,
                    ours.task.conversion.rows)) &&
        CHECK(equal_scales(ours.scales, expected.scales)) &&
        CHECK_EQ(ours.non_finite, expected.non_finite) &&
        CHECK_EQ(ours.bad_id[0] == 0, expected.bad_id[0] == 0) &&
        CHECK_EQ(ours.bad_id[1], expected.bad_id[1]);
    bad += ours.bad_id[0] != 0;
    if (!sound) {
      std::printf("round %d: %d -> %d\n", round, static_cast<int>(ours.task.conversion.paged),
                  static_cast<int>(ours.task.conversion.rows));
      return;
    }
  }
  CHECK(bad > rounds / 20);
}

}  // namespace

TEST(row_kernels, padding_and_bad_ids_as_the_core_has_them) { check_against_the_core(false, 3000); }

TEST(row_kernels, conversions_scales_and_counts_as_the_core_has_them) {
  check_against_the_core(true, 5000);
}

TEST(row_kernels, a_float8_side_without_scales_is_refused) {
  Buffer paged(64);
  Buffer rows(64);
  const std::vector<std::int64_t> ids{0};
  RowsTask task{.paged = {paged.data(), 1, 1, 1, 16, 16, 16, 16}};
  task.tokens.ids = table_of(ids);
  task.length = 1;
  task.rows = {rows.data(), 16, 16};
  task.conversion = {.paged = Element::kFloat8, .rows = Element::kFloat16};
  CHECK_EQ(cuda::move_rows(Direction::kGather, task, kStream), cudaErrorInvalidValue);
  task.conversion = {.paged = Element::kFloat16, .rows = Element::kAny};
  CHECK_EQ(cuda::move_rows(Direction::kGather, task, kStream), cudaErrorInvalidValue);
}

}  // namespace hscache::test
