// Rows of small floats, against rules written down again in float64.
#include "quant/activation_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace conclave::quant {
namespace {

const float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A float of a few bits: its values by code, without a sign, ascending.
struct Numbers {
  DType element;
  int exponent_bits;
  int mantissa_bits;
  int num_finite;  // codes without a sign that are finite
  std::vector<double> values = {};

  double value(int code) const {
    const int mantissa = code % (1 << mantissa_bits);
    const int exponent = code >> mantissa_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double fraction = std::ldexp(mantissa, -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias)
                         : std::ldexp(1 + fraction, exponent - bias);
  }
  double largest() const { return values.back(); }
  int largest_exponent() const { return static_cast<int>(std::floor(std::log2(largest()))); }

  // The nearest value, that of an even code where two are as near; the largest beyond it.
  double nearest(double magnitude) const {
    const auto above = std::ranges::lower_bound(values, magnitude);
    if (above == values.end()) return largest();
    if (above == values.begin()) return *above;
    const double up = *above - magnitude;
    const double down = magnitude - *(above - 1);
    const bool is_even = (above - values.begin()) % 2 == 0;
    return up < down || (up == down && is_even) ? *above : *(above - 1);
  }
};

Numbers numbers(DType element, int exponent_bits, int mantissa_bits, int num_finite) {
  Numbers made{element, exponent_bits, mantissa_bits, num_finite};
  for (int code = 0; code < num_finite; ++code) made.values.push_back(made.value(code));
  return made;
}

std::vector<Numbers> all_numbers() {
  return {numbers(DType::kF4, 2, 1, 8), numbers(DType::kF6E2M3, 2, 3, 32),
          numbers(DType::kF6E3M2, 3, 2, 32), numbers(DType::kF8E4M3, 4, 3, 127),
          numbers(DType::kF8E5M2, 5, 2, 124)};
}

ActivationRule rule_of(DType rows, RowScaleRule scale, int64_t group = 32) {
  return {.form = ActivationScale::kGroup,
          .group = group,
          .scale = scale,
          .codes = find_row_codes(rows)};
}

// Patterns of float32: every one of so many upper bits, and what is a little above and below each.
// Codes have bounds of at most 12 bits; quotients of two floats have none.
template <class Body>
void for_each_magnitude(int bits, const Body& body) {
  for (uint64_t upper = 1; upper < 0x7f800000U >> (32 - bits); ++upper) {
    const auto pattern = static_cast<uint32_t>(upper << (32 - bits));
    for (const uint32_t near : {pattern - 1, pattern, pattern + 1})
      body(std::bit_cast<float>(near));
  }
}

constexpr std::pair<RowScaleRule, int> kPowers[] = {{RowScaleRule::kFloorPower, -1},
                                                    {RowScaleRule::kEvenPower, 0},
                                                    {RowScaleRule::kHalfPower, 1},
                                                    {RowScaleRule::kCeilPower, -2}};

// The rule of OCP Microscaling 1.0, 6.3, of a magnitude whose mantissa is first rounded to so many
// bits; none for -1, and up to a power of two for -2.
float expected_power(const Numbers& rows, double amax, int bits) {
  if (amax == 0) return 1.0F;
  int exponent = 0;
  double mantissa = 2 * std::frexp(amax, &exponent);
  --exponent;
  if (bits == -2 && mantissa > 1) ++exponent;
  if (bits >= 0) {
    mantissa = std::floor(std::ldexp(mantissa, bits) + 0.5);
    if (mantissa == std::ldexp(2.0, bits)) ++exponent;
  }
  return std::ldexp(1.0F, std::max(exponent - rows.largest_exponent(), -127));
}

float expected_two_level(const Numbers& rows, float amax, float whole) {
  static const Numbers kScales = numbers(DType::kF8E4M3, 4, 3, 127);
  const float ratio = amax / static_cast<float>(rows.largest()) / whole;
  const auto step = static_cast<float>(kScales.nearest(ratio));
  return (step == 0 ? 1.0F : step) * whole;
}

TEST(SmallFloats, EveryPattern_BecomesTheNearestCode) {
  for (const Numbers& rows : all_numbers()) {
    const CodeBook& codes = *find_row_codes(rows.element);
    EXPECT_EQ(double{codes.largest}, rows.largest());
    EXPECT_EQ(codes.mantissa_bits, rows.mantissa_bits);
    const int sign = 1 << (rows.exponent_bits + rows.mantissa_bits);
    for (int code = 0; code < rows.num_finite; ++code) {
      ASSERT_EQ(double{codes.decode(static_cast<uint8_t>(code))}, rows.value(code));
      ASSERT_EQ(double{codes.decode(static_cast<uint8_t>(code | sign))}, -rows.value(code));
    }
    for_each_magnitude(18, [&](float value) {
      const double nearest = rows.nearest(value);
      ASSERT_EQ(double{codes.decode(codes.encode(value))}, nearest) << value;
      ASSERT_EQ(double{codes.decode(codes.encode(-value))}, -nearest) << -value;
    });
  }
}

TEST(SmallFloats, OtherTypes_AreNoRows) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kI4, DType::kNF4, DType::kIQ4}) {
    EXPECT_EQ(find_row_codes(type), nullptr) << to_string(type);
  }
  EXPECT_NE(find_row_codes(DType::kI8), nullptr);
}

TEST(RowTypes, Quotients_AreE4m3BesideAnyCodesAndInt8BesideWholeNumbers) {
  for (const WeightFormat& weights : format_catalog().rows()) {
    if (weights.codes == nullptr) continue;
    for (int type = 0; type <= static_cast<int>(DType::kI6); ++type) {
      const auto rows = static_cast<DType>(type);
      const bool whole = rows == DType::kI8 && takes_int8_rows(weights.element);
      EXPECT_EQ(takes_quotient_rows(weights.element, rows), rows == DType::kF8E4M3 || whole)
          << to_string(rows) << " beside " << weights.name;
    }
  }
}

TEST(ScaleRules, PowersOfTwo_OfEveryMagnitude) {
  for (const Numbers& rows : all_numbers()) {
    for (const auto& [rule, fixed_bits] : kPowers) {
      const ActivationRule own = rule_of(rows.element, rule);
      const int bits = rule == RowScaleRule::kEvenPower ? rows.mantissa_bits : fixed_bits;
      for_each_magnitude(18, [&](float amax) {
        ASSERT_EQ(scale_of(&amax, 1, own), expected_power(rows, amax, bits))
            << to_string(rows.element) << " " << static_cast<int>(rule) << " " << amax;
      });
    }
  }
}

TEST(ScaleRules, TwoLevels_OfEveryMagnitude) {
  const Numbers rows = numbers(DType::kF4, 2, 1, 8);
  for (const float whole : {1.0F, 0.00123F, 37.5F, 0x1p-140F}) {
    ActivationRule rule = rule_of(rows.element, RowScaleRule::kTwoLevel, 16);
    rule.static_scale = whole;
    for_each_magnitude(22, [&](float amax) {
      ASSERT_EQ(scale_of(&amax, 1, rule), expected_two_level(rows, amax, whole)) << amax;
    });
  }
}

// Published examples of where each package moves to the next power.
TEST(ScaleRules, PackagesDiffer_WhereAmaxRoundsUp) {
  const auto scale = [](DType rows, RowScaleRule rule, float amax) {
    return scale_of(&amax, 1, rule_of(rows, rule));
  };
  using enum RowScaleRule;
  EXPECT_EQ(scale(DType::kF4, kFloorPower, 7.99F), 1.0F) << "codes saturate";
  EXPECT_EQ(scale(DType::kF4, kCeilPower, 4.0F), 1.0F);
  EXPECT_EQ(scale(DType::kF4, kCeilPower, 4.01F), 2.0F) << "codes never saturate";
  EXPECT_EQ(scale(DType::kF4, kEvenPower, 6.99F), 1.0F);
  EXPECT_EQ(scale(DType::kF4, kEvenPower, 7.0F), 2.0F);
  EXPECT_EQ(scale(DType::kF6E2M3, kEvenPower, 7.7F), 1.0F);
  EXPECT_EQ(scale(DType::kF6E2M3, kEvenPower, 7.75F), 2.0F);
  EXPECT_EQ(scale(DType::kF8E4M3, kEvenPower, 495.0F), 1.0F);
  EXPECT_EQ(scale(DType::kF8E4M3, kEvenPower, 496.0F), 2.0F);
  EXPECT_EQ(scale(DType::kF8E4M3, kHalfPower, 447.0F), 1.0F);
  EXPECT_EQ(scale(DType::kF8E4M3, kHalfPower, 448.0F), 2.0F);
}

std::vector<float> random_row(size_t columns) {
  std::mt19937 random(static_cast<unsigned>(columns));
  std::normal_distribution<float> normal;
  std::vector<float> row(columns);
  for (size_t i = 0; i < columns; ++i) {
    row[i] = normal(random) * std::exp2(static_cast<float>(i / 32 % 9) * 4 - 16);
  }
  return row;
}

TEST(ScaledRows, RowsOfAnyLength_FollowTheRule) {
  for (const Numbers& rows : all_numbers()) {
    for (const int64_t group : {16, 32}) {
      for (const size_t columns : {1U, 15U, 16U, 31U, 32U, 33U, 300U}) {
        std::vector<float> row = random_row(columns);
        for (size_t i = 32; i < std::min<size_t>(columns, 64); ++i) row[i] = 0;
        const ActivationRule rule = rule_of(rows.element, RowScaleRule::kEvenPower, group);
        const auto count = static_cast<int64_t>(columns);
        std::vector<uint8_t> codes(columns);
        std::vector<float> scales(static_cast<size_t>(scales_per_row(rule, count)));
        quantize_activations(row.data(), count, rule, codes.data(), scales.data());
        std::vector<float> rounded = row;
        std::vector<float> same_scales(scales.size());
        round_to_activation_codes(rounded.data(), count, rule, same_scales.data());
        EXPECT_EQ(scales, same_scales);
        const auto width = static_cast<size_t>(group);
        ASSERT_EQ(scales.size(), (columns + width - 1) / width);
        for (size_t i = 0; i < columns; ++i) {
          const size_t begin = i / width * width;
          float amax = 0;
          for (size_t j = begin; j < std::min(columns, begin + width); ++j) {
            amax = std::max(amax, std::abs(row[j]));
          }
          const float scale = expected_power(rows, amax, rows.mantissa_bits);
          ASSERT_EQ(scales[i / width], scale) << i;
          const double nearest = rows.nearest(std::abs(double{row[i]}) / double{scale});
          ASSERT_EQ(double{rounded[i]}, row[i] < 0 ? -nearest : nearest) << i;
          ASSERT_EQ(rule.codes->decode(codes[i]), rounded[i]) << i;
        }
      }
    }
  }
}

// A group without a finite value everywhere makes no other group differ.
TEST(ScaledRows, ValuesThatAreNotFinite_StayInTheirGroup) {
  for (const Numbers& rows : all_numbers()) {
    for (const RowScaleRule rule :
         {RowScaleRule::kFloorPower, RowScaleRule::kEvenPower, RowScaleRule::kHalfPower,
          RowScaleRule::kCeilPower, RowScaleRule::kTwoLevel}) {
      for (const float value : {kNan, kInfinity, -kInfinity}) {
        const std::vector<float> clean = random_row(96);
        std::vector<float> row = clean;
        row[40] = value;
        const ActivationRule own = rule_of(rows.element, rule);
        std::vector<float> scales(3);
        std::vector<float> clean_scales(3);
        std::vector<float> clean_codes = clean;
        round_to_activation_codes(row.data(), 96, own, scales.data());
        round_to_activation_codes(clean_codes.data(), 96, own, clean_scales.data());
        EXPECT_FALSE(std::isfinite(row[40] * scales[1])) << to_string(rows.element);
        for (size_t i = 0; i < 96; ++i) {
          if (i / 32 == 1) continue;
          ASSERT_EQ(row[i], clean_codes[i]) << i;
        }
        EXPECT_EQ(scales[0], clean_scales[0]);
        EXPECT_EQ(scales[2], clean_scales[2]);
      }
    }
  }
}

TEST(ScaledRows, TwoLevels_SaturateBeyondTheirNumber) {
  ActivationRule rule = rule_of(DType::kF4, RowScaleRule::kTwoLevel, 16);
  rule.static_scale = 1.0F / 448;
  std::vector<float> row = {100, -3, 0.4F, 0};
  float scale = 0;
  round_to_activation_codes(row.data(), 4, rule, &scale);
  EXPECT_EQ(scale, 448.0F * (1.0F / 448)) << "the largest e4m3";
  EXPECT_EQ(row, (std::vector<float>{6, -3, 0.5F, 0}));
  std::vector<float> tiny = {1e-9F, -1e-9F};
  round_to_activation_codes(tiny.data(), 2, rule, &scale);
  EXPECT_EQ(tiny, (std::vector<float>{0, 0})) << "no e4m3 is so small";
}

}  // namespace
}  // namespace conclave::quant
