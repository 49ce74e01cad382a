// The element types that rows are converted between on their way.
#pragma once

#include <cstdint>

#include "core/paged_view.h"

namespace hscache {

// kAny is moved bit for bit, whatever it is. kFloat8 is e4m3fn (no infinities, largest value 448)
// with one float32 scale a row.
enum class Element : std::uint8_t { kAny, kFloat32, kFloat16, kBFloat16, kFloat8 };

// Bytes of one element; 1 for kAny.
HSCACHE_HOST_DEVICE constexpr std::int64_t element_bytes(Element element) {
  switch (element) {
    case Element::kFloat32:
      return 4;
    case Element::kFloat16:
    case Element::kBFloat16:
      return 2;
    case Element::kFloat8:
    case Element::kAny:
      return 1;
  }
  return 1;
}

// A row's scale from its largest finite magnitude: the row divided by it fills the range of
// kFloat8. Never 0 nor a denormal number, so that a row of zeros or of tiny numbers divides well.
HSCACHE_HOST_DEVICE constexpr float float8_scale(float largest) {
  constexpr float kMostFloat8 = 448.0F;
  constexpr float kLeastScale = 1.17549435e-38F;
  const float scale = largest / kMostFloat8;
  return scale < kLeastScale ? kLeastScale : scale;
}

}  // namespace hscache
