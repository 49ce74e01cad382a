// One row from one element type to another, on the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/element.h"

namespace hscache {

// Converts `count` elements, rounding to nearest even as torch does; neither type is kAny, and at
// most one is kFloat8. `scale` is the scale of the side that is kFloat8, written where that is `to`
// and read where it is `from`; unused otherwise. Infinities and NaNs stay what they are, except
// that kFloat8 has NaN only. Returns whether all elements of `from` are finite.
bool convert_row(Element from_type, const std::byte* from, Element to_type, std::byte* to,
                 std::int64_t count, float* scale);

}  // namespace hscache
