#include "core/float8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace conclave {
namespace {

// Follows the definition, in double: sign, 4 exponent bits of bias 7, 3 mantissa bits.
double e4m3_by_definition(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// The same with 5 exponent bits of bias 15 and 2 mantissa bits; exponent 31 is not finite.
double e5m2_by_definition(int code) {
  const int exponent = (code >> 2) & 31;
  const int mantissa = code & 3;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -16) : std::ldexp(4 + mantissa, exponent - 17);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// The code with the nearest value; if two are equally near, the even one.
uint8_t nearest_code(double (*by_definition)(int), int end, double value) {
  // Far beyond the largest code, float64 would take two codes for equally near.
  const double magnitude = std::min(std::abs(value), by_definition(end - 1));
  int best = 0;
  double distance = std::numeric_limits<double>::infinity();
  for (int code = 0; code < end; ++code) {
    const double here = std::abs(by_definition(code) - magnitude);
    if (here < distance || (here == distance && code % 2 == 0)) {
      best = code;
      distance = here;
    }
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

uint8_t nearest_code(double value) { return nearest_code(e4m3_by_definition, 0x7f, value); }
uint8_t nearest_e5m2(double value) { return nearest_code(e5m2_by_definition, 0x7c, value); }

TEST(E4m3, EveryCode_DecodesToItsDefinition) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_float(static_cast<uint8_t>(code));
    const double expected = e4m3_by_definition(code);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value)) << code;
    } else {
      EXPECT_EQ(static_cast<double>(value), expected) << code;
      EXPECT_EQ(std::signbit(value), code >= 0x80) << code;
      EXPECT_EQ(float_to_e4m3(value), code);
    }
  }
  EXPECT_EQ(e4m3_to_float(0x7e), kLargestE4m3);
}

TEST(E4m3, TiesAndTheirNeighbours_RoundToNearestEven) {
  for (int code = 0; code < 0x7e; ++code) {
    const auto low = static_cast<float>(e4m3_by_definition(code));
    const auto high = static_cast<float>(e4m3_by_definition(code + 1));
    const float tie = low + (high - low) / 2;
    const std::array<float, 5> values = {std::nextafter(low, high), std::nextafter(tie, low), tie,
                                         std::nextafter(tie, high), std::nextafter(high, low)};
    for (const float value : values) {
      EXPECT_EQ(float_to_e4m3(value), nearest_code(value)) << value;
      EXPECT_EQ(float_to_e4m3(-value), nearest_code(-value)) << -value;
    }
  }
}

TEST(E4m3, AnyFloat_RoundsToNearest) {
  std::mt19937 random(20261120);
  for (int i = 0; i < 200000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isfinite(value)) continue;
    ASSERT_EQ(float_to_e4m3(value), nearest_code(value)) << value;
  }
}

TEST(E4m3, BeyondTheLargest_SaturatesAndWhatIsNotFiniteIsNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float value : {448.0F, 463.0F, 465.0F, 1e30F, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(float_to_e4m3(value), 0x7e) << value;
    EXPECT_EQ(float_to_e4m3(-value), 0xfe) << value;
  }
  EXPECT_EQ(float_to_e4m3(kInfinity), 0x7f);
  EXPECT_EQ(float_to_e4m3(-kInfinity), 0xff);
  EXPECT_EQ(float_to_e4m3(std::numeric_limits<float>::quiet_NaN()) & 0x7f, 0x7f);
}

TEST(E5m2, EveryCode_DecodesToItsDefinition) {
  for (int code = 0; code < 256; ++code) {
    const float value = e5m2_to_float(static_cast<uint8_t>(code));
    EXPECT_EQ(std::signbit(value), code >= 0x80) << code;
    const int magnitude = code & 0x7f;
    if (magnitude > 0x7c) {
      EXPECT_TRUE(std::isnan(value)) << code;
    } else {
      const double expected =
          magnitude == 0x7c ? std::copysign(INFINITY, value) : e5m2_by_definition(code);
      EXPECT_EQ(static_cast<double>(value), expected) << code;
      EXPECT_EQ(float_to_e5m2(value), code);
    }
  }
  EXPECT_EQ(e5m2_to_float(0x7b), kLargestE5m2);
}

TEST(E5m2, AnyFloat_RoundsToNearestEven) {
  std::mt19937 random(20261123);
  std::vector<float> values;
  for (int code = 0; code < 0x7b; ++code) {
    const auto low = static_cast<float>(e5m2_by_definition(code));
    const auto high = static_cast<float>(e5m2_by_definition(code + 1));
    const float tie = low + (high - low) / 2;
    values.insert(values.end(), {std::nextafter(tie, low), tie, std::nextafter(tie, high)});
  }
  while (values.size() < 50000) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(value)) values.push_back(value);
  }
  for (const float value : values) {
    ASSERT_EQ(float_to_e5m2(value), nearest_e5m2(value)) << value;
    ASSERT_EQ(float_to_e5m2(-value), nearest_e5m2(-value)) << -value;
  }
}

TEST(E5m2, BeyondTheLargest_SaturatesAndWhatIsNotFiniteStaysThat) {
  for (const float value : {57344.0F, 61440.0F, 65536.0F, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(float_to_e5m2(value), 0x7b) << value;
    EXPECT_EQ(float_to_e5m2(-value), 0xfb) << value;
  }
  EXPECT_EQ(float_to_e5m2(INFINITY), 0x7c);
  EXPECT_EQ(float_to_e5m2(-INFINITY), 0xfc);
  EXPECT_TRUE(std::isnan(e5m2_to_float(float_to_e5m2(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(E8m0, NearestPowerOfTwo_IsTaken) {
  for (int code = 0; code < 255; ++code) {
    const float power = e8m0_to_float(static_cast<uint8_t>(code));
    EXPECT_EQ(float_to_e8m0(power), code);
    if (code == 254) continue;
    EXPECT_EQ(float_to_e8m0(std::nextafter(1.5F * power, 0.0F)), code);
    EXPECT_EQ(float_to_e8m0(1.5F * power), code + 1);
  }
  EXPECT_EQ(float_to_e8m0(0.0F), 0);
  EXPECT_EQ(float_to_e8m0(0x1p-149F), 0);
  EXPECT_EQ(float_to_e8m0(std::numeric_limits<float>::max()), 254);
  for (const float bad : {INFINITY, -1.0F, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(float_to_e8m0(bad), 255) << bad;
  }
}

TEST(E8m0, EveryCode_IsItsPowerOfTwo) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(e8m0_to_float(static_cast<uint8_t>(code)), std::ldexp(1.0F, code - 127)) << code;
  }
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
}

// Codes are multiplied by scales: float64 holds every product exactly, float32 rounds it once.
TEST(E4m3, EveryCodeTimesAnyScale_RoundsOnceInFloat32) {
  std::vector<float> scales = {1.0F, 0x1p-149F, 0x1.8p-140F, 0x1p-126F, 0.0F, 1e-3F, 3e38F / 448};
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    scales.push_back(std::bit_cast<float>(static_cast<uint32_t>(random()) & 0x7f7fffffU));
  }
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    for (const float scale : scales) {
      const double exact = e4m3_by_definition(code) * static_cast<double>(scale);
      const float product = e4m3_to_float(static_cast<uint8_t>(code)) * scale;
      ASSERT_EQ(product, static_cast<float>(exact)) << code << " x " << scale;
    }
  }
}

}  // namespace
}  // namespace conclave
