// Compares codes by a step's inverse, as kernels make them, with the rule that divides, for values
// and steps of every magnitude.
#include "quant/code_quotient.h"

#include "core/float8.h"
#include "quant/activation_rows.h"

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

// The conversion of the device: infinity saturates.
uint8_t saturated_code(float quotient) {
  return float_to_e4m3(std::isinf(quotient) ? std::copysign(kLargestE4m3, quotient) : quotient);
}

// All codes that are NaN count as one.
bool same_code(uint8_t a, uint8_t b) {
  return a == b || ((a & 0x7f) == 0x7f && (b & 0x7f) == 0x7f);
}

// Whether the code is that of value / step, or of a quotient that is off by a share of 2^-21.
bool is_code_of(uint8_t code, float value, float step) {
  const uint8_t exact = activation_code(*format_of(DType::kF8E4M3).row_codes, value, step);
  if (same_code(code, exact)) return true;
  if (!std::isfinite(value)) return false;
  for (const double factor : {1 - 0x1p-21, 1 + 0x1p-21}) {
    const double moved = double{value} / double{step} * factor;
    if (code == saturated_code(static_cast<float>(moved))) return true;
  }
  return false;
}

// Both signs of zero, of subnormal and normal numbers with every exponent, of infinity and NaN.
std::vector<float> numbers_of_every_exponent() {
  constexpr uint32_t kMantissas[] = {0, 1, 0x080000, 0x0fffff, 0x2aaaaa, 0x5a5a5a, 0x7fffff};
  std::vector<float> numbers;
  for (uint32_t exponent = 0; exponent <= 255; ++exponent) {
    for (const uint32_t mantissa : kMantissas) {
      const auto magnitude = std::bit_cast<float>(exponent << 23 | mantissa);
      numbers.insert(numbers.end(), {magnitude, -magnitude});
    }
  }
  for (uint32_t shift = 1; shift < 23; ++shift) {
    numbers.push_back(std::bit_cast<float>(uint32_t{1} << shift));
  }
  return numbers;
}

std::vector<float> steps_of_every_exponent() {
  std::vector<float> steps;
  for (const float number : numbers_of_every_exponent()) {
    if (number > 0) steps.push_back(number);
  }
  return steps;
}

TEST(CodeQuotient, EveryExponent_DividedIsTheRule) {
  const std::vector<float> values = numbers_of_every_exponent();
  for (const float step : steps_of_every_exponent()) {
    for (const float value : values) {
      const uint8_t code = saturated_code(code_quotient(value, step));
      ASSERT_TRUE(
          same_code(code, activation_code(*format_of(DType::kF8E4M3).row_codes, value, step)))
          << value << " / " << step << ": " << int{code} << ", the rule "
          << int{activation_code(*format_of(DType::kF8E4M3).row_codes, value, step)};
    }
  }
}

TEST(CodeQuotient, EveryExponent_InvertedIsTheRuleButAtBoundaries) {
  const std::vector<float> values = numbers_of_every_exponent();
  for (const float step : steps_of_every_exponent()) {
    const InverseStep inverse = invert_step(step);
    for (const float value : values) {
      const uint8_t code = saturated_code(code_quotient(value, inverse));
      ASSERT_TRUE(is_code_of(code, value, step))
          << value << " / " << step << ": " << int{code} << ", the rule "
          << int{activation_code(*format_of(DType::kF8E4M3).row_codes, value, step)};
    }
  }
}

// Groups whose largest magnitude is any power of two, with zeros of both signs among them.
TEST(CodeQuotient, GroupsOfEveryMagnitude_AreThoseOfRoundedRows) {
  constexpr int64_t kColumns = 128;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (int exponent = -149; exponent <= 125; ++exponent) {
    std::vector<float> row(kColumns);
    for (float& value : row) value = std::ldexp(normal(random), exponent);
    row[17] = 0.0F;
    row[101] = -0.0F;
    for (const bool power_of_two : {false, true}) {
      std::vector<float> rounded = row;
      float scale = 0;
      const ActivationRule rule{.form = ActivationScale::kGroup,
                                .power_of_two_scales = power_of_two,
                                .codes = format_of(DType::kF8E4M3).row_codes};
      round_to_activation_codes(rounded.data(), kColumns, rule, &scale);
      const InverseStep inverse = invert_step(scale);
      for (size_t i = 0; i < row.size(); ++i) {
        const uint8_t code = saturated_code(code_quotient(row[i], inverse));
        ASSERT_TRUE(e4m3_to_float(code) == rounded[i] || is_code_of(code, row[i], scale))
            << row[i] << " / " << scale << ": " << e4m3_to_float(code) << ", rounded row "
            << rounded[i];
      }
    }
  }
}

TEST(CodeQuotient, NotFinite_IsNanWithAnyStep) {
  for (const float step : steps_of_every_exponent()) {
    for (const float value : {kInfinity, -kInfinity, kNan}) {
      ASSERT_TRUE(std::isnan(code_quotient(value, step))) << value << " / " << step;
      ASSERT_TRUE(std::isnan(code_quotient(value, invert_step(step)))) << value << " / " << step;
    }
  }
}

}  // namespace
}  // namespace conclave::quant
