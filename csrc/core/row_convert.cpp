#include "core/row_convert.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hscache {
namespace {

// Loops over these are vectorised: no branches but choices between values, and no tables.

struct Float32 {
  using Bits = std::uint32_t;
  static float widen(Bits bits) { return std::bit_cast<float>(bits); }
  static Bits narrow(float value) { return std::bit_cast<Bits>(value); }
};

struct BFloat16 {
  using Bits = std::uint16_t;
  static float widen(Bits bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static Bits narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    const std::uint32_t nan = (bits >> 16) | 0x40U;
    return static_cast<Bits>((bits & 0x7FFFFFFFU) > 0x7F800000U ? nan : rounded);
  }
};

// A float of fewer bits: an exponent of kExponent bits over kMantissa bits.
template <int kExponent, int kMantissa>
struct Small {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr std::uint32_t kBias = (1U << (kExponent - 1)) - 1;
  static constexpr std::uint32_t kLeastNormal = (128U - kBias) << 23;  // as a float32's bits
  static constexpr std::uint32_t kRebias = (127U - kBias) << 23;

  // `magnitude` without its sign, neither infinite nor NaN.
  static float widen(std::uint32_t magnitude) {
    const std::uint32_t shifted = magnitude << kShift;
    const std::uint32_t normal = shifted + kRebias;
    // A denormal number gets the leading 1 that it lacks, and loses it in a subtraction.
    const float denormal =
        std::bit_cast<float>(shifted + kLeastNormal) - std::bit_cast<float>(kLeastNormal);
    return (magnitude >> kMantissa) == 0 ? denormal : std::bit_cast<float>(normal);
  }

  // `bits` of a float32 without its sign; what is too large overflows into the codes above.
  static std::uint32_t narrow(std::uint32_t bits) {
    const std::uint32_t odd = (bits >> kShift) & 1U;
    const std::uint32_t normal = (bits - kRebias + (1U << (kShift - 1)) - 1 + odd) >> kShift;
    // Adding this number makes the float32 unit round where a denormal number ends.
    constexpr std::uint32_t kRounder = (127U + 23U - kBias - kMantissa + 1U) << 23;
    const std::uint32_t denormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits) + std::bit_cast<float>(kRounder)) -
        kRounder;
    return bits < kLeastNormal ? denormal : normal;
  }
};

struct Float16 {
  using Bits = std::uint16_t;
  using Code = Small<5, 10>;
  static float widen(Bits bits) {
    const std::uint32_t magnitude = bits & 0x7FFFU;
    const std::uint32_t special = 0x7F800000U | (magnitude & 0x3FFU) << 13;
    const std::uint32_t finite = std::bit_cast<std::uint32_t>(Code::widen(magnitude));
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    return std::bit_cast<float>((magnitude >= 0x7C00U ? special : finite) | sign);
  }
  static Bits narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    std::uint32_t code = std::min(Code::narrow(magnitude), 0x7C00U);
    code = magnitude >= 0x47800000U ? 0x7C00U : code;  // 65536 and up
    code = magnitude > 0x7F800000U ? 0x7E00U : code;
    return static_cast<Bits>(code | ((bits >> 16) & 0x8000U));
  }
};

struct Float8 {
  using Bits = std::uint8_t;
  using Code = Small<4, 3>;
  static float widen(Bits bits) {
    const std::uint32_t magnitude = bits & 0x7FU;
    const std::uint32_t finite = std::bit_cast<std::uint32_t>(Code::widen(magnitude));
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80U) << 24;
    return std::bit_cast<float>((magnitude == 0x7FU ? 0x7FC00000U : finite) | sign);
  }
  static Bits narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    std::uint32_t code = std::min(Code::narrow(magnitude), 0x7FU);
    code = magnitude >= 0x43F00000U ? 0x7FU : code;  // 480 and up
    return static_cast<Bits>(code | ((bits >> 24) & 0x80U));
  }
};

template <class Type>
typename Type::Bits load(const std::byte* row, std::int64_t i) {
  typename Type::Bits bits;
  std::memcpy(&bits, row + i * static_cast<std::int64_t>(sizeof(bits)), sizeof(bits));
  return bits;
}

template <class Type>
void save(std::byte* row, std::int64_t i, typename Type::Bits bits) {
  std::memcpy(row + i * static_cast<std::int64_t>(sizeof(bits)), &bits, sizeof(bits));
}

std::uint32_t magnitude_of(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU;
}

constexpr std::uint32_t kInfinity = 0x7F800000U;

constexpr std::int64_t kLine = 64;

// Whole lines, from and to where lines begin.
inline void store_past_cache(std::byte* to, const std::byte* from, std::int64_t bytes) {
#if defined(__SSE2__)
  for (std::int64_t at = 0; at < bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
#else
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
#endif
}

// Loops go over pieces: the compiler knows how long one is, and that what it is converted into is
// not what it is read from. From there it is stored, past the cache or not. Whole lines in every
// type, and short enough not to leave the registers, or not to go far.
constexpr std::int64_t kPiece = 64;

template <class Type>
std::int64_t bytes_of(std::int64_t count) {
  return count * static_cast<std::int64_t>(sizeof(typename Type::Bits));
}

// How many elements to go before a line begins; -1 where none begins with an element.
template <class Type>
std::int64_t elements_to_line(const std::byte* row) {
  const std::int64_t bytes = -reinterpret_cast<std::intptr_t>(row) & (kLine - 1);
  return bytes % bytes_of<Type>(1) == 0 ? bytes / bytes_of<Type>(1) : -1;
}

// Calls `each` with where to read, where to write and the index of one element, for all.
template <class From, class To, class Each>
[[gnu::always_inline]] inline void convert_pieces(const std::byte* from, std::byte* to,
                                                  std::int64_t count, bool past_cache,
                                                  const Each& each) {
  const std::int64_t head = past_cache ? elements_to_line<To>(to) : 0;
  past_cache = past_cache && head >= 0;
  std::int64_t i = 0;
  for (; i < std::min(head, count); ++i) each(from, to, i);
  for (; i + kPiece <= count; i += kPiece) {
    alignas(kLine) std::byte piece[kPiece * sizeof(typename To::Bits)];
    const std::byte* const source = from + bytes_of<From>(i);
    for (std::int64_t j = 0; j < kPiece; ++j) each(source, piece, j);
    std::byte* const target = to + bytes_of<To>(i);
    if (past_cache) {
      store_past_cache(target, piece, sizeof(piece));
    } else {
      std::memcpy(target, piece, sizeof(piece));
    }
  }
  for (; i < count; ++i) each(from, to, i);
}

template <class From, class To, bool kLooks>
struct Convert {
  [[gnu::always_inline]] static inline bool run(const std::byte* from, std::byte* to,
                                                std::int64_t count, float* scale, bool past_cache) {
    constexpr bool kSame = std::is_same_v<From, To>;
    constexpr bool kScales = std::is_same_v<From, Float8> && !kSame;
    const float factor = kScales ? *scale : 1.0F;
    std::uint32_t largest = 0;  // magnitudes order as their bits do
    const auto each = [&](const std::byte* from, std::byte* to, std::int64_t i) {
      const typename From::Bits bits = load<From>(from, i);
      const float value = From::widen(bits);
      if constexpr (kLooks) largest = std::max(largest, magnitude_of(value));
      if constexpr (kSame) {
        save<To>(to, i, bits);
      } else {
        save<To>(to, i, To::narrow(kScales ? value * factor : value));
      }
    };
    convert_pieces<From, To>(from, to, count, past_cache, each);
    return largest < kInfinity;
  }
};

// The largest magnitude that keeps below a limit, in a row.
template <class From>
[[gnu::always_inline]] inline std::uint32_t largest_below(std::uint32_t limit,
                                                          const std::byte* from,
                                                          std::int64_t count) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = magnitude_of(From::widen(load<From>(from, i)));
    if (magnitude < limit) largest = std::max(largest, magnitude);
  }
  return largest;
}

// To Float8: its scale is known when all elements were looked at.
template <class From>
struct Quantize {
  [[gnu::always_inline]] static inline bool run(const std::byte* from, std::byte* to,
                                                std::int64_t count, float* scale, bool past_cache) {
    constexpr std::uint32_t kNoLimit = 0xFFFFFFFFU;
    std::uint32_t largest = 0;
    std::int64_t i = 0;
    for (; i + kPiece <= count; i += kPiece) {
      largest = std::max(largest, largest_below<From>(kNoLimit, from + bytes_of<From>(i), kPiece));
    }
    largest = std::max(largest, largest_below<From>(kNoLimit, from + bytes_of<From>(i), count - i));
    const bool finite = largest < kInfinity;
    if (!finite) largest = largest_below<From>(kInfinity, from, count);
    const float divisor = float8_scale(std::bit_cast<float>(largest));
    *scale = divisor;
    convert_pieces<From, Float8>(
        from, to, count, past_cache, [&](const std::byte* from, std::byte* to, std::int64_t i) {
          save<Float8>(to, i, Float8::narrow(From::widen(load<From>(from, i)) / divisor));
        });
    return finite;
  }
};

// The loops compiled for what a processor may have. Each of them gives the same bits: nothing but
// the width of a step differs.

struct Baseline {
  template <class Work>
  [[gnu::flatten]] static bool run(const std::byte* from, std::byte* to, std::int64_t count,
                                   float* scale, bool past_cache) {
    return Work::run(from, to, count, scale, past_cache);
  }
};

#if defined(__x86_64__)
struct Avx2 {
  template <class Work>
  [[gnu::target("avx2"), gnu::flatten]] static bool run(const std::byte* from, std::byte* to,
                                                        std::int64_t count, float* scale,
                                                        bool past_cache) {
    return Work::run(from, to, count, scale, past_cache);
  }
};

struct Avx512 {
  template <class Work>
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl"), gnu::flatten]] static bool run(
      const std::byte* from, std::byte* to, std::int64_t count, float* scale, bool past_cache) {
    return Work::run(from, to, count, scale, past_cache);
  }
};
#endif

using Loop = bool (*)(const std::byte*, std::byte*, std::int64_t, float*, bool);
// From rows to columns, in the order of Element without kAny.
using Loops = std::array<std::array<Loop, 4>, 4>;

template <class Level, bool kLooks>
constexpr Loops loops() {
  const auto to = []<class From>(From) -> std::array<Loop, 4> {
    return {
        &Level::template run<Convert<From, Float32, kLooks>>,
        &Level::template run<Convert<From, Float16, kLooks>>,
        &Level::template run<Convert<From, BFloat16, kLooks>>,
        &Level::template run<std::conditional_t<std::is_same_v<From, Float8>,
                                                Convert<From, Float8, kLooks>, Quantize<From>>>};
  };
  return {to(Float32{}), to(Float16{}), to(BFloat16{}), to(Float8{})};
}

// Without and with a look at elements.
template <class Level>
constexpr std::array<Loops, 2> kLoops{loops<Level, false>(), loops<Level, true>()};

const std::array<Loops, 2>& loops_for(Simd simd) {
#if defined(__x86_64__)
  if (simd == Simd::kAvx512) return kLoops<Avx512>;
  if (simd == Simd::kAvx2) return kLoops<Avx2>;
#endif
  static_cast<void>(simd);
  return kLoops<Baseline>;
}

std::size_t place(Element element) { return static_cast<std::size_t>(element) - 1; }

}  // namespace

std::vector<Simd> available_simd() {
  std::vector<Simd> found{Simd::kBaseline};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) found.push_back(Simd::kAvx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(Simd::kAvx512);
  }
#endif
  return found;
}

Simd best_simd() {
  static const Simd best = available_simd().back();
  return best;
}

bool convert_row(Element from_type, const std::byte* from, Element to_type, std::byte* to,
                 std::int64_t count, float* scale, const ConvertOptions& options) {
  const Loops& found = loops_for(options.simd)[options.looks ? 1 : 0];
  return found[place(from_type)][place(to_type)](from, to, count, scale, options.past_cache);
}

void order_past_cache() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace hscache
