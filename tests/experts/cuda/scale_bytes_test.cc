// Weights that kernels make of bytes and codes, by the arithmetic of bf16.
#include "experts/cuda/scale_bytes.h"

#include "core/float8.h"
#include "core/float_convert.h"
#include "experts/cuda/factor_planes.h"
#include "quant/weight_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace conclave {
namespace {

using experts::ByteForm;
using experts::ScaleBytes;

float multiply(float a, float b) { return bf16_to_float(float_to_bf16(a * b)); }

// Computes as LaneCodes does, of a byte and a code's bits in their place.
float weight_of(ScaleValues values, ByteForm form, uint8_t byte, float value) {
  const float bits = std::ldexp(value, -126);
  const auto number = [](int32_t pattern) { return bf16_to_float(static_cast<uint16_t>(pattern)); };
  if (values == ScaleValues::kPowerOfTwo) {
    if (form == ByteForm::kNear) return multiply(bits, number(byte * 0x80));
    return multiply(multiply(bits, 0x1p124F), number(byte == 0 ? 0x40 : byte * 0x80));
  }
  if (form == ByteForm::kNear) return multiply(bits, number(byte * 0x10 + 0x7600));
  return multiply(bits, multiply(multiply(number(byte * 0x10), 0x1p119F), 0x1p119F));
}

void expect_exact(ScaleValues values, ByteForm form, const std::vector<float>& scales) {
  const ScaleBytes bytes(values, form, scales);
  ASSERT_TRUE(bytes.fit());
  const quant::CodeBook& codes = *quant::format_of(DType::kF4).codes;
  for (const float scale : scales) {
    for (int code = 0; code < 16; ++code) {
      const float value = codes.decode(static_cast<uint8_t>(code));
      const double weight = weight_of(values, form, bytes.of(scale), value);
      EXPECT_EQ(weight * bytes.sum_factor(), double{value} * scale) << scale << " " << value;
    }
  }
}

std::vector<float> powers(int32_t first, int32_t last) {
  std::vector<float> scales;
  for (int32_t byte = first; byte <= last; ++byte) {
    scales.push_back(e8m0_to_float(static_cast<uint8_t>(byte)));
  }
  return scales;
}
std::vector<float> numbers_of_e4m3(int32_t first) {
  std::vector<float> scales;
  for (int32_t byte = first; byte < 127; ++byte) {
    scales.push_back(quant::format_of(DType::kF8E4M3).codes->decode(static_cast<uint8_t>(byte)));
  }
  return scales;
}

// Scales of a byte go with columns in the order of their file.
TEST(FactorForms, WeightsThatBf16Holds_HaveScalesOfAByteInOrder) {
  experts::ExpertsProblem problem;
  problem.hidden_size = 512;
  problem.intermediate_size = 256;
  problem.weight_dtype = DType::kF4;
  problem.quant = {.weights = WeightScale::kBlock,
                   .block_rows = 1,
                   .block_cols = 32,
                   .scale_values = ScaleValues::kPowerOfTwo};
  using experts::FactorForm;
  EXPECT_EQ(factor_form(problem), FactorForm::kExact);
  EXPECT_EQ(stored_columns(problem, 65), 128);
  const auto form_of = [&](const auto& change) {
    experts::ExpertsProblem other = problem;
    change(other);
    return factor_form(other);
  };
  const auto floats = [](auto& other) { other.quant.scale_values = ScaleValues::kFloat; };
  const auto ordered = [](auto& other) { other.quant.has_column_order = true; };
  const auto with_signs = [](auto& other) { other.quant.signed_scales = true; };
  const auto in_a_group = [](auto& other) { other.skipped_columns = 16; };
  const auto other_codes = [](auto& other) { other.weight_dtype = DType::kI4; };
  const auto plain = [](auto& other) { other.weight_dtype = DType::kBF16; };
  for (const auto form : {form_of(floats), form_of(ordered), form_of(with_signs),
                          form_of(in_a_group), form_of(other_codes), form_of(plain)}) {
    EXPECT_EQ(form, FactorForm::kScales);
  }
  const auto nvfp4 = [](auto& other) {
    other.quant.block_cols = 16;
    other.quant.scale_values = ScaleValues::kFloat8;
    other.quant.has_global_scale = true;
  };
  EXPECT_EQ(form_of(nvfp4), FactorForm::kExact);
}

// Units are those of a stage's columns.
TEST(FactorForms, ScalesAndOffsetsInSteps_StayStepsInWholeSlices) {
  experts::ExpertsProblem problem;
  problem.hidden_size = 512;
  problem.intermediate_size = 256;
  problem.weight_dtype = DType::kU4;
  problem.quant = {.weights = WeightScale::kBlock,
                   .block_rows = 1,
                   .block_cols = 32,
                   .zeros = WeightZero::kOffset};
  problem.quant.scale_values = problem.quant.zero_values = ScaleValues::kSteps;
  using experts::FactorForm;
  EXPECT_EQ(factor_form(problem), FactorForm::kSteps);
  EXPECT_EQ(code_order(problem), experts::CodeOrder::kLanesOfNumbers);
  const auto form_of = [&](const auto& change) {
    experts::ExpertsProblem other = problem;
    change(other);
    return factor_form(other);
  };
  const auto scales = [](auto& other) { other.quant.scale_values = ScaleValues::kFloat; };
  const auto offsets = [](auto& other) { other.quant.zero_values = ScaleValues::kF16; };
  const auto ordered = [](auto& other) { other.quant.has_column_order = true; };
  const auto whole = [](auto& other) { other.quant.has_global_scale = true; };
  const auto in_a_group = [](auto& other) { other.skipped_columns = 16; };
  const auto wide = [](auto& other) { other.quant.block_cols = 64; };
  const auto few = [](auto& other) { other.intermediate_size = 32; };
  for (const auto form : {form_of(scales), form_of(offsets), form_of(ordered), form_of(whole),
                          form_of(in_a_group), form_of(wide), form_of(few)}) {
    EXPECT_EQ(form, FactorForm::kOffsets);
  }
  const auto q5_k = [](auto& other) { other.weight_dtype = DType::kI8; };
  EXPECT_EQ(form_of(q5_k), FactorForm::kSteps);
  problem.weight_dtype = DType::kI8;
  EXPECT_EQ(groups_of_unit(problem), 4);
  problem.weight_dtype = DType::kU4;
  EXPECT_EQ(groups_of_unit(problem), 8);
  const auto q6_k = [](auto& other) {
    other.weight_dtype = DType::kI8;
    other.quant.block_cols = 16;
    other.quant.zeros = WeightZero::kNone;
    other.quant.zero_values = ScaleValues::kFloat;
  };
  EXPECT_EQ(form_of(q6_k), FactorForm::kScaleSteps);
  const auto q3_k = [&](auto& other) {
    q6_k(other);
    other.weight_dtype = DType::kI4;
  };
  EXPECT_EQ(form_of(q3_k), FactorForm::kScaleSteps);
  const auto q2_k = [](auto& other) {
    other.weight_dtype = DType::kI4;
    other.quant.block_cols = 16;
  };
  EXPECT_EQ(form_of(q2_k), FactorForm::kSteps);
  const auto small = [&](auto& other) {
    q2_k(other);
    other.quant.gate_up_codes.dtype = other.quant.down_codes.dtype = DType::kU2;
  };
  EXPECT_EQ(form_of(small), FactorForm::kSmallSteps);
  experts::ExpertsProblem of_two_bits = problem;
  small(of_two_bits);
  EXPECT_TRUE(multiplies_steps(of_two_bits));
  EXPECT_EQ(code_order(of_two_bits), experts::CodeOrder::kLanesOfSmallNumbers);
  EXPECT_EQ(code_bits(of_two_bits), 2);
  EXPECT_EQ(experts::stored_columns(of_two_bits, 65), 64);  // they have 4 bits
  EXPECT_EQ(groups_of_unit(of_two_bits), 16);
  const auto small_in_down = [&](auto& other) {
    small(other);
    other.quant.gate_up_codes = {};
  };
  EXPECT_EQ(form_of(small_in_down), FactorForm::kSteps);
  const auto small_of_wide_groups = [&](auto& other) {
    small(other);
    other.quant.block_cols = 32;
  };
  EXPECT_EQ(form_of(small_of_wide_groups), FactorForm::kSteps);
  const auto small_of_slices = [&](auto& other) {
    small(other);
    other.quant.scale_values = other.quant.zero_values = ScaleValues::kFloat;
  };
  EXPECT_EQ(form_of(small_of_slices), FactorForm::kOffsets);
  const auto q2_k_of_8_bits = [](auto& other) {
    other.weight_dtype = DType::kI8;
    other.quant.block_cols = 16;
  };
  EXPECT_EQ(form_of(q2_k_of_8_bits), FactorForm::kOffsets);
  const auto multiplies = [&](const auto& change) {
    experts::ExpertsProblem other = problem;
    change(other);
    return multiplies_steps(other) && code_order(other) == experts::CodeOrder::kLanesOfNumbers;
  };
  EXPECT_TRUE(multiplies(q3_k));
  EXPECT_TRUE(multiplies(q2_k));
  EXPECT_FALSE(multiplies(q6_k));
  const auto as_e4m3 = [&](auto& other) {
    q6_k(other);
    other.weight_dtype = DType::kF8E4M3;
  };
  EXPECT_EQ(form_of(as_e4m3), FactorForm::kScales);
}

TEST(ScaleBytes, EveryPower_GivesExactWeights) {
  expect_exact(ScaleValues::kPowerOfTwo, ByteForm::kAsStored, powers(0, 254));
}
TEST(ScaleBytes, NearPowers_GiveExactWeightsWhereverTheyLie) {
  for (const int32_t last : {0, 1, 100, 127, 132, 200, 254}) {
    expect_exact(ScaleValues::kPowerOfTwo, ByteForm::kNear, powers(std::max(last - 132, 0), last));
  }
}
TEST(ScaleBytes, PowersTooFarApart_DoNotFit) {
  const auto fit = [](float least, float most) {
    return ScaleBytes(ScaleValues::kPowerOfTwo, ByteForm::kNear, std::vector{least, most}).fit();
  };
  EXPECT_TRUE(fit(0x1p-66F, 0x1p66F));
  EXPECT_FALSE(fit(0x1p-67F, 0x1p66F));
  EXPECT_TRUE(fit(0x1p-127F, 0x1p5F));
  EXPECT_FALSE(fit(0x1p-127F, 0x1p127F));
}
TEST(ScaleBytes, EveryNumberOfE4M3_GivesExactWeights) {
  expect_exact(ScaleValues::kFloat8, ByteForm::kAsStored, numbers_of_e4m3(0));
  expect_exact(ScaleValues::kFloat8, ByteForm::kNear, numbers_of_e4m3(1));
}
TEST(ScaleBytes, ZeroOfE4M3_HasItsBytesAsStoredAlone) {
  for (const float zero : {0.0F, -0.0F}) {
    EXPECT_FALSE(ScaleBytes(ScaleValues::kFloat8, ByteForm::kNear, std::vector{1.0F, zero}).fit());
    const ScaleBytes bytes(ScaleValues::kFloat8, ByteForm::kAsStored, std::vector{1.0F, zero});
    EXPECT_TRUE(bytes.fit());
    EXPECT_EQ(bytes.of(zero), 0);
  }
}
TEST(ScaleBytes, OtherNumbers_AreNoScales) {
  using experts::has_scale;
  for (const float power : powers(0, 254)) EXPECT_TRUE(has_scale(ScaleValues::kPowerOfTwo, power));
  for (const float number : numbers_of_e4m3(0)) {
    EXPECT_TRUE(has_scale(ScaleValues::kFloat8, number));
  }
  for (const float other : {1.0F / 3, 1.5F, 0.0F, -1.0F, 0x1p-128F, INFINITY, NAN}) {
    EXPECT_FALSE(has_scale(ScaleValues::kPowerOfTwo, other)) << other;
  }
  for (const float other : {1.0F / 3, 0x1p-10F, 449.0F, INFINITY, NAN}) {
    EXPECT_FALSE(has_scale(ScaleValues::kFloat8, other)) << other;
  }
}

// Kernels decode codes to e5m2, of which the table of a scale is made by two multiply-adds of its
// byte: every byte that is near enough, with every code.
TEST(ScaleBytes, NearBytes_GiveNumbersOfE5m2) {
  const quant::CodeBook& codes = *quant::format_of(DType::kF4).codes;
  const quant::CodeBook& numbers = *quant::format_of(DType::kF8E5M2).codes;
  for (int32_t byte = experts::kLeastNearOfE5m2; byte <= experts::kMostNear; ++byte) {
    for (uint8_t code = 0; code < 8; ++code) {
      // 2^13 is the factor of the largest scale.
      const float weight = std::ldexp(codes.decode(code), 13 - (experts::kMostNear - byte));
      const uint8_t number = numbers.encode(weight);
      EXPECT_EQ(numbers.decode(number), weight) << byte << " " << int{code};
      const int32_t half = 4 * (byte - experts::kLeastNearOfE5m2 + 1);
      constexpr int32_t kSteps[] = {0, 0, 4, 6, 8, 10, 12, 14};
      EXPECT_EQ(int{number}, code == 0 ? 0 : half + kSteps[code]) << byte << " " << int{code};
    }
  }
}

TEST(ScaleBytes, Span_IsThatOfPowers) {
  EXPECT_EQ(ScaleBytes(ScaleValues::kPowerOfTwo, ByteForm::kNear, powers(100, 127)).span(), 27);
  EXPECT_EQ(ScaleBytes(ScaleValues::kPowerOfTwo, ByteForm::kNear, powers(9, 9)).span(), 0);
  EXPECT_EQ(ScaleBytes(ScaleValues::kPowerOfTwo, ByteForm::kNear, {}).span(), 0);
}

}  // namespace
}  // namespace conclave
