#include "core/move_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/copy_plan.h"
#include "core/host_copy.h"
#include "core/row_convert.h"

namespace hscache {
namespace {

// The scale of the row's side that is kFloat8; null where none is.
float* scale_of(const Conversion& conversion, std::int64_t token, std::int64_t layer) {
  if (conversion.scales == nullptr) return nullptr;
  return conversion.scales + token * conversion.scale_token_stride +
         layer * conversion.scale_layer_stride;
}

void fill_row(const RowsTask& task, std::int64_t token, std::int64_t layer, int byte) {
  std::memset(task.rows.data + task.rows.offset(token, layer), byte,
              static_cast<std::size_t>(task.rows_row_bytes()));
  float* const scale = scale_of(task.conversion, token, layer);
  if (scale != nullptr) std::memset(scale, byte, sizeof(*scale));
}

// Returns whether the row's elements are finite, as far as anybody asked.
bool move_row(Direction direction, const RowsTask& task, std::byte* paged, std::byte* rows,
              float* scale, const ConvertOptions& options) {
  const bool gathers = direction == Direction::kGather;
  const std::byte* const from = gathers ? paged : rows;
  std::byte* const to = gathers ? rows : paged;
  const Conversion& conversion = task.conversion;
  if (!conversion.looks_at_elements()) {
    std::memcpy(to, from, static_cast<std::size_t>(task.paged.row_bytes));
    return true;
  }
  return convert_row(gathers ? conversion.paged : conversion.rows, from,
                     gathers ? conversion.rows : conversion.paged, to, task.row_elements(), scale,
                     options);
}

void move_one_by_one(Direction direction, const RowsTask& task) {
  const std::int64_t row_bytes =
      direction == Direction::kGather ? task.rows_row_bytes() : task.paged.row_bytes;
  const ConvertOptions options{
      .looks = task.conversion.non_finite_rows != nullptr,
      .past_cache = task.length * task.paged.num_layers * row_bytes >= kPastCacheBytes};
  std::uint32_t non_finite = 0;
  for (std::int64_t token = 0; token < task.length; ++token) {
    const TokenMap::Place place = task.tokens.place(task.paged, token);
    if (place.kind == TokenMap::Place::Kind::kBad) {
      task.tokens.bad_id[1] = task.tokens.num_ids(task.paged);
      task.tokens.bad_id[0] = task.tokens.id(task.paged, token);
    }
    for (std::int64_t layer = 0; layer < task.paged.num_layers; ++layer) {
      if (place.kind == TokenMap::Place::Kind::kRow) {
        std::byte* const paged =
            task.paged.data + task.paged.offset(place.block, layer, place.token_in_block);
        std::byte* const rows = task.rows.data + task.rows.offset(token, layer);
        non_finite += !move_row(direction, task, paged, rows,
                                scale_of(task.conversion, token, layer), options);
      } else if (direction == Direction::kGather) {
        fill_row(task, token, layer, place.kind == TokenMap::Place::Kind::kBad ? 0xFF : 0);
      }
    }
  }
  if (options.past_cache) order_past_cache();
  if (task.conversion.non_finite_rows != nullptr) *task.conversion.non_finite_rows += non_finite;
}

}  // namespace

void check_reach(const PagedView& paged, const TokenMap& tokens, std::int64_t length) {
  const std::int64_t size = tokens.ids.size();
  if (!tokens.slots) {
    check_reach(paged, size, tokens.start, length);
    return;
  }
  check_reach(paged, 0, tokens.start, std::min<std::int64_t>(length, 0));
  if (tokens.start > size || length > size - tokens.start) {
    throw std::out_of_range("start " + std::to_string(tokens.start) + " and length " +
                            std::to_string(length) + " reach beyond a slot mapping of " +
                            std::to_string(size) + " tokens: pass a slot for every token");
  }
}

void check_tokens(const PagedView& paged, const TokenMap& tokens, std::int64_t length) {
  if (!tokens.slots) {
    check_range(paged, tokens.ids, tokens.start, length);
    return;
  }
  check_reach(paged, tokens, length);
  const std::int64_t num_slots = tokens.num_ids(paged);
  for (std::int64_t i = tokens.start; i < tokens.start + length; ++i) {
    if (tokens.ids[i] < num_slots) continue;
    throw std::out_of_range("slot_mapping[" + std::to_string(i) + "] is " +
                            std::to_string(tokens.ids[i]) + ", outside the paged cache's " +
                            std::to_string(num_slots) + " slots (" +
                            std::to_string(paged.num_blocks) + " blocks of " +
                            std::to_string(paged.block_size) + " tokens): pass slots from 0 to " +
                            std::to_string(num_slots - 1) + ", or negative ones for padding");
  }
}

void move_rows(Direction direction, const RowsTask& task) {
  const bool checked_table = !task.tokens.slots && task.tokens.bad_id == nullptr;
  if (task.conversion.looks_at_elements() || !checked_table) {
    move_one_by_one(direction, task);
    return;
  }
  const auto plan =
      plan_copy(task.paged, task.tokens.ids, task.tokens.start, task.length, task.rows);
  if (direction == Direction::kGather) {
    copy_to_rows(task.paged, task.rows, plan);
  } else {
    copy_to_paged(task.paged, task.rows, plan);
  }
}

}  // namespace hscache
