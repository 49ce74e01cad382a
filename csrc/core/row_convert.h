// One row from one element type to another, on the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/element.h"

namespace hscache {

// What the loops over elements are compiled for. All give the same bits.
enum class Simd : std::uint8_t { kBaseline, kAvx2, kAvx512 };

// What this machine has, the best last.
std::vector<Simd> available_simd();

// The last of them; found once.
Simd best_simd();

struct ConvertOptions {
  // Whether to look for elements that are not finite.
  bool looks = true;
  // Stores go past the cache where the machine has such ones and `to` is a multiple of its
  // elements' size: for what is not read soon. Then order_past_cache() is due before others are
  // told that the row is there.
  bool past_cache = false;
  Simd simd = best_simd();
};

// Converts `count` elements, rounding to nearest even as torch does; neither type is kAny, and at
// most one is kFloat8. `scale` is the scale of the side that is kFloat8, written where that is `to`
// and read where it is `from`; unused otherwise. Infinities and NaNs stay what they are, except
// that kFloat8 has NaN only. Returns whether all elements of `from` are finite, or true when it
// did not look.
bool convert_row(Element from_type, const std::byte* from, Element to_type, std::byte* to,
                 std::int64_t count, float* scale, const ConvertOptions& options = {});

// Puts all stores past the cache before those that come after.
void order_past_cache();

}  // namespace hscache
