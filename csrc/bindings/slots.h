// Where rows lie in a slot: side by side from its beginning, then, where they are float8, their
// scales, one float32 each.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/element.h"
#include "core/slot_pool.h"

namespace hscache {

struct SlotLayout {
  PagedView rows;                  // slot i is block i
  std::int64_t scales_offset = 0;  // of the first scale in a slot; 0 where there are none

  // The place of a row's scale; null where there are none.
  float* scale(std::int64_t slot, std::int64_t row) const {
    if (scales_offset == 0) return nullptr;
    return reinterpret_cast<float*>(rows.data + rows.offset(slot, 0, 0) + scales_offset) + row;
  }
};

// Slots of `pool` as rows of `row_bytes`, as many as fit. Throws std::invalid_argument where none
// does.
inline SlotLayout slot_layout(const SlotPool& pool, std::int64_t row_bytes, Element element) {
  constexpr auto kScaleBytes = static_cast<std::int64_t>(sizeof(float));
  if (element != Element::kFloat8) return {.rows = pool.view(row_bytes)};
  if (pool.slot_bytes() % kScaleBytes != 0) {
    throw std::invalid_argument("slots of " + std::to_string(pool.slot_bytes()) +
                                " bytes cannot hold float32 scales: make them a multiple of 4");
  }
  SlotLayout layout{.rows = pool.view(row_bytes + kScaleBytes)};
  layout.rows.row_bytes = row_bytes;
  layout.rows.token_stride = row_bytes;
  layout.scales_offset =
      (layout.rows.block_size * row_bytes + kScaleBytes - 1) / kScaleBytes * kScaleBytes;
  return layout;
}

}  // namespace hscache
