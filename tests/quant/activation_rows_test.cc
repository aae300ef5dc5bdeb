#include "quant/activation_rows.h"

#include "core/float8.h"
#include "core/float_convert.h"
#include "quant/code_quotient.h"
#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace conclave::quant {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

struct Quantised {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

Quantised quantise(const std::vector<float>& row, ActivationRule rule) {
  rule.codes = format_of(DType::kF8E4M3).row_codes;
  const auto columns = static_cast<int64_t>(row.size());
  Quantised result{
      .codes = std::vector<uint8_t>(row.size()),
      .scales = std::vector<float>(static_cast<size_t>(scales_per_row(rule, columns)))};
  quantize_activations(row.data(), columns, rule, result.codes.data(), result.scales.data());
  return result;
}

std::vector<float> random_row(size_t columns, float size) {
  std::mt19937 random(static_cast<unsigned>(columns));
  std::normal_distribution<float> normal(0, size);
  std::vector<float> row(columns);
  for (float& value : row) value = normal(random);
  return row;
}

TEST(ExactSums, AsManyColumns_AsFloat32CountsWithoutLoss) {
  const auto columns = [](DType weights) {
    return activation_rule(weights, {.weights = WeightScale::kChannel,
                                     .activations = ActivationScale::kToken,
                                     .activation_dtype = DType::kI8})
        .exact_columns;
  };
  // The largest products are 128 * 128, 8 * 128 and, in halves, 12 * 128.
  constexpr int64_t kMost = int64_t{1} << 24;
  EXPECT_EQ(columns(DType::kI8), kMost / (128 * 128));
  EXPECT_EQ(columns(DType::kI4), kMost / (8 * 128));
  EXPECT_EQ(columns(DType::kF4), 8192);
  EXPECT_LE(columns(DType::kF4) * 12 * 128, kMost);
  EXPECT_FALSE(activation_rule(DType::kNF4, {.weights = WeightScale::kChannel}).is_exact());
}

TEST(DynamicScale, Amax_IsDividedBy448) {
  EXPECT_EQ(step_of(448, kLargestE4m3, false), 1.0F);
  EXPECT_EQ(step_of(1, kLargestE4m3, false), 1.0F / 448.0F);
  EXPECT_EQ(step_of(0, kLargestE4m3, false), 1.0F);
  EXPECT_EQ(step_of(0x1p-149F, kLargestE4m3, false), 1.0F) << "a quotient of 0";
  EXPECT_EQ(step_of(kInfinity, kLargestE4m3, false), kInfinity);
  EXPECT_EQ(step_of(kInfinity, kLargestE4m3, true), kInfinity);
}

// A GPU divides 16-bit values by a step's reciprocal, which is exact enough for every mantissa but
// one of ones alone.
TEST(DynamicScale, StepsOf16BitValues_NeverHaveAMantissaOfOnes) {
  constexpr uint32_t kMantissa = 0x7FFFFF;
  for (uint32_t bits = 0; bits < 0x8000; ++bits) {
    for (const float amax :
         {f16_to_float(static_cast<uint16_t>(bits)), bf16_to_float(static_cast<uint16_t>(bits))}) {
      if (!std::isfinite(amax)) continue;
      const float step = step_of(amax, kLargestE4m3, false);
      ASSERT_NE(std::bit_cast<uint32_t>(step) & kMantissa, kMantissa) << amax;
    }
  }
}

TEST(DynamicScale, PowerOfTwo_IsTheNextAtLeastAsLarge) {
  for (const float amax : {1.0F, 447.0F, 448.0F, 449.0F, 3e-5F, 0x1p-120F, 3e38F}) {
    const float exact = amax / 448.0F;
    const float power = step_of(amax, kLargestE4m3, true);
    int exponent = 0;
    EXPECT_EQ(std::frexp(power, &exponent), 0.5F) << amax;
    EXPECT_GE(power, exact);
    EXPECT_TRUE(power / 2 < exact || power == 0x1p-126F) << amax;
  }
  EXPECT_EQ(step_of(448, kLargestE4m3, true), 1.0F) << "a power of two stays";
  EXPECT_EQ(step_of(448 + 0x1p-14F, kLargestE4m3, true), 2.0F) << "the next number does not";
}

TEST(QuantizeActivations, Groups_HaveTheirOwnScalesAndTheLastMayBePartial) {
  std::vector<float> row = random_row(300, 1);
  row[5] = 100;
  row[130] = -20;
  row[290] = 7;
  const Quantised result = quantise(row, {.form = ActivationScale::kGroup});
  ASSERT_EQ(result.scales.size(), 3U);
  EXPECT_EQ(result.scales[0], 100.0F / 448.0F);
  EXPECT_EQ(result.scales[1], 20.0F / 448.0F);
  EXPECT_EQ(result.scales[2], 7.0F / 448.0F);
  EXPECT_EQ(result.codes[5], 0x7e);
  EXPECT_EQ(result.codes[130], 0xfe);
  for (size_t i = 0; i < row.size(); ++i) {
    EXPECT_EQ(result.codes[i], float_to_e4m3(row[i] / result.scales[i / 128])) << i;
  }
}

TEST(QuantizeActivations, GroupsOfAnyWidth_HaveTheirOwnScales) {
  for (const int64_t width : {1, 7, 32, 299, 300, 4096}) {
    const std::vector<float> row = random_row(300, 5);
    const Quantised result = quantise(row, {.form = ActivationScale::kGroup, .group = width});
    ASSERT_EQ(std::ssize(result.scales), (300 + width - 1) / width) << width;
    for (size_t i = 0; i < row.size(); ++i) {
      const size_t begin = i / static_cast<size_t>(width) * static_cast<size_t>(width);
      const size_t end = std::min(row.size(), begin + static_cast<size_t>(width));
      float largest = 0;
      for (size_t j = begin; j < end; ++j) largest = std::max(largest, std::abs(row[j]));
      const float scale = result.scales[i / static_cast<size_t>(width)];
      ASSERT_EQ(scale, largest / 448.0F) << width << " " << i;
      ASSERT_EQ(result.codes[i], float_to_e4m3(row[i] / scale)) << width << " " << i;
    }
  }
}

TEST(QuantizeActivations, Token_HasOneScale) {
  const std::vector<float> row = random_row(257, 3);
  const Quantised result = quantise(row, {.form = ActivationScale::kToken});
  ASSERT_EQ(result.scales.size(), 1U);
  float largest = 0;
  for (const float value : row) largest = std::max(largest, std::abs(value));
  EXPECT_EQ(result.scales[0], largest / 448.0F);
}

TEST(QuantizeActivations, ZeroRow_HasScaleOneAndZeros) {
  const Quantised result = quantise(std::vector<float>(130), {.form = ActivationScale::kGroup});
  EXPECT_EQ(result.scales, (std::vector<float>{1, 1}));
  EXPECT_EQ(result.codes, std::vector<uint8_t>(130));
}

TEST(QuantizeActivations, StaticScale_SaturatesFiniteValues) {
  const ActivationRule rule{.form = ActivationScale::kTensorStatic, .static_scale = 0.5F};
  const Quantised result = quantise({1.0F, 1e6F, -1e6F, 3e38F}, rule);
  EXPECT_EQ(result.scales, std::vector<float>{0.5F});
  EXPECT_EQ(result.codes, (std::vector<uint8_t>{0x40, 0x7e, 0xfe, 0x7e}));
  const ActivationRule tiny{.form = ActivationScale::kTensorStatic, .static_scale = 1e-30F};
  EXPECT_EQ(quantise({1e20F}, tiny).codes[0], 0x7e) << "the quotient is infinite, the value not";
}

TEST(QuantizeActivations, NotFinite_MakesTheRowNotFiniteAndNoOther) {
  for (const ActivationScale form :
       {ActivationScale::kTensorStatic, ActivationScale::kToken, ActivationScale::kGroup}) {
    for (const float bad : {kNan, kInfinity, -kInfinity}) {
      std::vector<float> row = random_row(200, 1);
      row[150] = bad;
      const Quantised result = quantise(row, {.form = form, .static_scale = 0.01F});
      EXPECT_EQ(result.codes[150] & 0x7f, 0x7f) << bad;
      if (form == ActivationScale::kGroup) {
        EXPECT_TRUE(std::isfinite(result.scales[0])) << "the other group of the row";
      }
    }
  }
}

TEST(RoundToActivationCodes, Values_AreThoseOfTheCodes) {
  for (const ActivationScale form :
       {ActivationScale::kTensorStatic, ActivationScale::kToken, ActivationScale::kGroup}) {
    for (const bool power_of_two : {false, true}) {
      const ActivationRule rule{.form = form,
                                .power_of_two_scales = power_of_two,
                                .static_scale = 0.01F,
                                .codes = format_of(DType::kF8E4M3).row_codes};
      std::vector<float> row = random_row(300, 7);
      const Quantised expected = quantise(row, rule);
      std::vector<float> scales(expected.scales.size());
      round_to_activation_codes(row.data(), 300, rule, scales.data());
      EXPECT_EQ(scales, expected.scales);
      for (size_t i = 0; i < row.size(); ++i) {
        ASSERT_EQ(row[i], e4m3_to_float(expected.codes[i])) << i;
      }
    }
  }
}

// Rows are rounded by arithmetic where all is finite: to the values that their codes have, for
// every type of floats, at and around each midpoint, below the least normal value and above the
// largest.
TEST(RoundToActivationCodes, EveryFloatType_HasTheValuesOfItsCodes) {
  for (const DType type :
       {DType::kF8E4M3, DType::kF8E5M2, DType::kF6E2M3, DType::kF6E3M2, DType::kF4}) {
    const CodeBook& codes = *find_row_codes(type);
    for (const float step : {1.0F, 0.37F, 3e-39F, 1e30F, 0.0F, kInfinity, kNan}) {
      std::vector<float> row = {0.0F, -0.0F, 1e-45F, -3e38F, 3e38F};
      for (int code = 0; code < 255; ++code) {
        const float low = codes.decode(static_cast<uint8_t>(code));
        const float high = codes.decode(static_cast<uint8_t>(code + 1));
        if (!std::isfinite(low) || !std::isfinite(high)) continue;
        const float middle = (low + high) / 2 * (std::isfinite(step) && step > 0 ? step : 1.0F);
        for (const float at :
             {middle, std::nextafter(middle, kInfinity), std::nextafter(middle, -kInfinity)}) {
          if (std::isfinite(at)) row.push_back(at);
        }
      }
      for (const float normal : random_row(1000, 3)) row.push_back(normal);
      const std::vector<float> values = row;
      const ActivationRule rule{
          .form = ActivationScale::kTensorStatic, .static_scale = step, .codes = &codes};
      std::vector<float> scales(1);
      round_to_activation_codes(row.data(), std::ssize(row), rule, scales.data());
      for (size_t i = 0; i < row.size(); ++i) {
        const float expected = codes.decode(activation_code(codes, values[i], step));
        ASSERT_EQ(std::bit_cast<uint32_t>(row[i]), std::bit_cast<uint32_t>(expected))
            << to_string(type) << " step " << step << " of " << values[i] << ": " << row[i];
      }
    }
  }
}

}  // namespace
}  // namespace conclave::quant
