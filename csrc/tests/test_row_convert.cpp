// The core's conversions against CUDA's own, which run on the host too.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/row_convert.h"
#include "tests/harness.h"
#include "tests/layouts.h"

namespace hscache::test {
namespace {

// Every sign, exponent and leading part of a fraction, with what is decisive for rounding below.
std::vector<float> many_floats() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high <= 0xFFFF; ++high) {
    for (const std::uint32_t low :
         {0x0000U, 0x0001U, 0x0FFFU, 0x1000U, 0x1001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  return values;
}

template <class T>
std::vector<T> every(std::uint32_t count) {
  std::vector<T> values(count);
  for (std::uint32_t bits = 0; bits < count; ++bits) std::memcpy(&values[bits], &bits, sizeof(T));
  return values;
}

float widen(float value) { return value; }
float widen(__half value) { return __half2float(value); }
float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
float widen(__nv_fp8_e4m3 value) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(value.__x, __NV_E4M3)));
}
template <class To>
To narrow(float value);
template <>
float narrow(float value) {
  return value;
}
template <>
__half narrow(float value) {
  return __float2half_rn(value);
}
template <>
__nv_bfloat16 narrow(float value) {
  return __float2bfloat16_rn(value);
}

template <class From, class To>
void check_conversion(Element from_type, const std::vector<From>& from, Element to_type,
                      float scale) {
  std::vector<To> to(from.size());
  const bool finite = convert_row(from_type, reinterpret_cast<const std::byte*>(from.data()),
                                  to_type, reinterpret_cast<std::byte*>(to.data()),
                                  static_cast<std::int64_t>(from.size()), &scale);
  CHECK(!finite);  // everything is among them
  for (std::size_t i = 0; i < from.size(); ++i) {
    const To expected = narrow<To>(widen(from[i]) * scale);
    const bool same = std::memcmp(&to[i], &expected, sizeof(To)) == 0 ||
                      (std::isnan(widen(to[i])) && std::isnan(widen(expected)));
    if (!CHECK(same)) {
      std::printf("%zu: %a gave %a, not %a\n", i, widen(from[i]), widen(to[i]), widen(expected));
      return;
    }
  }
}

constexpr Element kElements[] = {Element::kFloat32, Element::kFloat16, Element::kBFloat16,
                                 Element::kFloat8};

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  const auto* const first = reinterpret_cast<const std::byte*>(values.data());
  return {first, first + values.size() * sizeof(T)};
}

// Everything there is, or what is decisive of it, in no order.
std::vector<std::byte> everything(Element type) {
  Random random(1);
  const auto shuffled = [&](auto values) {
    random.shuffle(values);
    return bytes_of(values);
  };
  if (type == Element::kFloat8) return shuffled(every<std::uint8_t>(1U << 8));
  if (type != Element::kFloat32) return shuffled(every<std::uint16_t>(1U << 16));
  auto values = many_floats();
  for (int i = 0; i < 10'000; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random.bits())));
  }
  return shuffled(values);
}

struct Converted {
  std::vector<std::byte> bytes;  // with what is around them
  float scale = 0.37F;
  bool finite = false;

  bool operator==(const Converted&) const = default;
};

// `count` elements of a row, to `offset` bytes behind where a cache line begins.
Converted converted(Element from_type, const std::vector<std::byte>& from, Element to_type,
                    std::int64_t count, std::int64_t offset, const ConvertOptions& options) {
  constexpr std::int64_t kLine = 64;
  const std::int64_t bytes = count * element_bytes(to_type);
  std::vector<std::byte> memory(static_cast<std::size_t>(bytes + 4 * kLine), std::byte{0xEE});
  const auto address = reinterpret_cast<std::intptr_t>(memory.data());
  std::byte* const begin = memory.data() + ((-address & (kLine - 1)) + kLine);
  Converted found;
  found.finite =
      convert_row(from_type, from.data(), to_type, begin + offset, count, &found.scale, options);
  order_past_cache();
  found.bytes.assign(begin - kLine, begin + bytes + 2 * kLine);
  return found;
}

}  // namespace

TEST(row_convert, each_width_and_each_kind_of_store_gives_the_same_bits) {
  for (const Element from_type : kElements) {
    const auto from = everything(from_type);
    const std::int64_t all = static_cast<std::int64_t>(from.size()) / element_bytes(from_type);
    for (const Element to_type : kElements) {
      for (const std::int64_t count : {all, all - 1, 130L, 129L, 128L, 127L, 64L, 63L, 1L, 0L}) {
        const Converted expected =
            converted(from_type, from, to_type, count, 0, {.looks = true, .simd = Simd::kBaseline});
        for (const Simd simd : available_simd()) {
          for (const bool past_cache : {false, true}) {
            if (!CHECK(converted(from_type, from, to_type, count, 0, {true, past_cache, simd}) ==
                       expected)) {
              return;
            }
          }
        }
      }
    }
  }
}

TEST(row_convert, a_row_may_begin_anywhere_in_a_cache_line) {
  for (const Element from_type : kElements) {
    const auto from = everything(from_type);
    for (const Element to_type : kElements) {
      for (std::int64_t offset = 0; offset < 64; ++offset) {
        for (const std::int64_t count : {5, 250}) {
          const Converted stored =
              converted(from_type, from, to_type, count, offset, {true, false});
          const Converted streamed =
              converted(from_type, from, to_type, count, offset, {true, true});
          if (!CHECK(stored == streamed)) return;
        }
      }
    }
  }
}

TEST(row_convert, looks_for_what_is_not_finite_where_it_is_asked_to) {
  for (const Simd simd : available_simd()) {
    for (const std::int64_t place : {0, 63, 64, 100, 128, 149}) {
      std::vector<float> row(150, 1.0F);
      const auto finite = [&](bool looks) {
        return converted(Element::kFloat32, bytes_of(row), Element::kBFloat16, 150, 0,
                         {looks, true, simd})
            .finite;
      };
      CHECK(finite(true));
      for (const float value : {INFINITY, -INFINITY, NAN}) {
        row[static_cast<std::size_t>(place)] = value;
        CHECK(!finite(true));
        CHECK(finite(false));
      }
    }
  }
}

TEST(row_convert, every_value_as_cuda_converts_it) {
  const auto floats = many_floats();
  const auto halves = every<__half>(1U << 16);
  const auto bfloats = every<__nv_bfloat16>(1U << 16);
  const auto float8s = every<__nv_fp8_e4m3>(1U << 8);
  check_conversion<float, __half>(Element::kFloat32, floats, Element::kFloat16, 1);
  check_conversion<float, __nv_bfloat16>(Element::kFloat32, floats, Element::kBFloat16, 1);
  check_conversion<__half, float>(Element::kFloat16, halves, Element::kFloat32, 1);
  check_conversion<__half, __nv_bfloat16>(Element::kFloat16, halves, Element::kBFloat16, 1);
  check_conversion<__nv_bfloat16, float>(Element::kBFloat16, bfloats, Element::kFloat32, 1);
  check_conversion<__nv_bfloat16, __half>(Element::kBFloat16, bfloats, Element::kFloat16, 1);
  for (const float scale : {1.0F, 0.37F, 1.0e-30F, 1.0e36F}) {
    check_conversion<__nv_fp8_e4m3, float>(Element::kFloat8, float8s, Element::kFloat32, scale);
    check_conversion<__nv_fp8_e4m3, __half>(Element::kFloat8, float8s, Element::kFloat16, scale);
    check_conversion<__nv_fp8_e4m3, __nv_bfloat16>(Element::kFloat8, float8s, Element::kBFloat16,
                                                   scale);
  }
}

TEST(row_convert, float8_codes_as_cuda_rounds_them) {
  // A row whose largest element makes the scale 1, so that codes are those of the values.
  std::vector<float> values{448.0F};
  for (const float value : many_floats()) {
    if (std::isnan(value) || std::isinf(value) || std::fabs(value) <= 448.0F)
      values.push_back(value);
  }
  std::vector<__nv_fp8_e4m3> codes(values.size());
  float scale = 0;
  const bool finite = convert_row(
      Element::kFloat32, reinterpret_cast<const std::byte*>(values.data()), Element::kFloat8,
      reinterpret_cast<std::byte*>(codes.data()), static_cast<std::int64_t>(values.size()), &scale);
  CHECK(!finite);
  CHECK_EQ(scale, 1.0F);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const int expected = std::isfinite(values[i])
                             ? __nv_cvt_float_to_fp8(values[i], __NV_NOSAT, __NV_E4M3)
                             : (std::signbit(values[i]) ? 0xFF : 0x7F);
    if (!CHECK_EQ(int{codes[i].__x}, expected)) {
      std::printf("%a\n", values[i]);
      return;
    }
  }
}

TEST(row_convert, a_row_of_zeros_or_of_the_smallest_numbers_has_a_scale_that_divides) {
  for (const float value : {0.0F, -0.0F, 1.0e-45F, 1.0e-38F}) {
    const std::vector<float> row(5, value);
    std::vector<std::uint8_t> codes(5, 0x55);
    float scale = 0;
    CHECK(convert_row(Element::kFloat32, reinterpret_cast<const std::byte*>(row.data()),
                      Element::kFloat8, reinterpret_cast<std::byte*>(codes.data()), 5, &scale));
    CHECK(std::isnormal(scale));
    std::vector<float> back(5);
    CHECK(convert_row(Element::kFloat8, reinterpret_cast<const std::byte*>(codes.data()),
                      Element::kFloat32, reinterpret_cast<std::byte*>(back.data()), 5, &scale));
    for (const float found : back) CHECK(std::fabs(found - value) <= 1.0e-38F);
  }
}

}  // namespace hscache::test
