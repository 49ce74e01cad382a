#include "core/row_convert.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

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

template <class From, class To>
bool convert(const std::byte* from, std::byte* to, std::int64_t count, float* scale) {
  constexpr bool kScales = std::is_same_v<From, Float8>;
  const float factor = kScales ? *scale : 1.0F;
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    float value = From::widen(load<From>(from, i));
    largest = std::max(largest, magnitude_of(value));
    if constexpr (kScales) value *= factor;
    save<To>(to, i, To::narrow(value));
  }
  return largest < kInfinity;
}

template <class From>
bool quantize(const std::byte* from, std::byte* to, std::int64_t count, float* scale) {
  std::uint32_t largest = 0;  // finite ones only; magnitudes order as their bits do
  bool finite = true;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = magnitude_of(From::widen(load<From>(from, i)));
    largest = std::max(largest, magnitude < kInfinity ? magnitude : 0U);
    finite &= magnitude < kInfinity;
  }
  const float divisor = float8_scale(std::bit_cast<float>(largest));
  *scale = divisor;
  for (std::int64_t i = 0; i < count; ++i) {
    save<Float8>(to, i, Float8::narrow(From::widen(load<From>(from, i)) / divisor));
  }
  return finite;
}

// The same bits, looked at.
template <class Type>
bool inspect(const std::byte* from, std::byte* to, std::int64_t count, float*) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, magnitude_of(Type::widen(load<Type>(from, i))));
  }
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(typename Type::Bits));
  return largest < kInfinity;
}

using Convert = bool (*)(const std::byte*, std::byte*, std::int64_t, float*);

// From rows to columns, in the order of Element without kAny.
constexpr std::array<std::array<Convert, 4>, 4> kConverts{{
    {inspect<Float32>, convert<Float32, Float16>, convert<Float32, BFloat16>, quantize<Float32>},
    {convert<Float16, Float32>, inspect<Float16>, convert<Float16, BFloat16>, quantize<Float16>},
    {convert<BFloat16, Float32>, convert<BFloat16, Float16>, inspect<BFloat16>, quantize<BFloat16>},
    {convert<Float8, Float32>, convert<Float8, Float16>, convert<Float8, BFloat16>,
     inspect<Float8>},
}};

std::size_t place(Element element) { return static_cast<std::size_t>(element) - 1; }

}  // namespace

bool convert_row(Element from_type, const std::byte* from, Element to_type, std::byte* to,
                 std::int64_t count, float* scale) {
  return kConverts[place(from_type)][place(to_type)](from, to, count, scale);
}

}  // namespace hscache
