// Zero points chosen with scales: what comes back, by arithmetic.
#include "core/code_bits.h"
#include "core/weight_types.h"

#include "conclave/quantise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace conclave::quant {
namespace {

constexpr int64_t kGroup = 16;

QuantiseOptions options_of(DType codes, ScaleRule rule = ScaleRule::kAmax) {
  return {.codes = codes,
          .quant = {.weights = WeightScale::kBlock,
                    .block_rows = 1,
                    .block_cols = kGroup,
                    .zeros = WeightZero::kPoint},
          .scale_dtype = DType::kF32,
          .rule = rule};
}

float float_at(const std::vector<std::byte>& bytes, int64_t index) {
  float value = 0;
  std::memcpy(&value, bytes.data() + index * 4, sizeof(value));
  return value;
}

// A code as a number: int4 stands for itself less 8.
int code_value(DType codes, const std::byte* row, int64_t col) {
  const uint8_t code = code_at(row, col, bit_size(codes));
  return codes == DType::kI8 ? static_cast<int8_t>(code) : code - 8;
}

class ZeroPoints : public testing::TestWithParam<DType> {
 protected:
  int least() const { return GetParam() == DType::kI8 ? -128 : -8; }
  int largest() const { return GetParam() == DType::kI8 ? 127 : 7; }
};

TEST_P(ZeroPoints, Values_AreWithinAStepOfTheirRange) {
  for (const float shift : {-3.0F, -0.5F, 0.0F, 0.4F, 5.0F}) {
    std::vector<float> values;
    for (int i = 0; i < 4 * kGroup; ++i) values.push_back(std::sin(float(i) * 1.7F) + shift);
    const QuantisedRows rows =
        Quantiser(options_of(GetParam())).quantise(values, 1, 4 * kGroup, 1.0F);
    ASSERT_EQ(rows.zeros.size(), 4 * sizeof(float));
    double squared = 0;
    for (int64_t col = 0; col < 4 * kGroup; ++col) {
      const double scale = float_at(rows.scales, col / kGroup);
      const double zero = float_at(rows.zeros, col / kGroup);
      EXPECT_EQ(zero, std::nearbyint(zero));
      EXPECT_GT(zero, least()) << "the least code is no zero point";
      EXPECT_LE(zero, largest());
      const double back = (code_value(GetParam(), rows.codes.data(), col) - zero) * scale;
      const double value = values[static_cast<size_t>(col)];
      // The zero point is rounded too, which may push an end of the range out by half a step.
      EXPECT_LE(std::abs(value - back), scale * (1 + 1e-5)) << shift << " " << col;
      squared += (value - back) * (value - back);
    }
    EXPECT_NEAR(rows.error.squared_error / squared, 1.0, 1e-6);
  }
}

// A group of one sign takes half the codes without zero points, and nearly all with them.
TEST_P(ZeroPoints, OneSidedGroups_HaveAboutHalfTheError) {
  std::vector<float> values;
  for (int i = 0; i < 64 * kGroup; ++i) values.push_back(1.0F + std::sin(float(i * i)));
  QuantiseOptions symmetric = options_of(GetParam());
  symmetric.quant.zeros = WeightZero::kNone;
  const auto error_of = [&](const QuantiseOptions& options) {
    return Quantiser(options).quantise(values, 64, kGroup, 1.0F).error.relative();
  };
  EXPECT_LT(error_of(options_of(GetParam())), 0.6 * error_of(symmetric));
}

TEST_P(ZeroPoints, Search_IsNeverWorse) {
  for (int seed = 0; seed < 20; ++seed) {
    std::vector<float> values;
    for (int i = 0; i < 8 * kGroup; ++i) {
      values.push_back(std::pow(std::sin(float(i * (seed + 3))), 5.0F) + 0.1F);
    }
    const auto error_of = [&](ScaleRule rule) {
      return Quantiser(options_of(GetParam(), rule))
          .quantise(values, 8, kGroup, 1.0F)
          .error.squared_error;
    };
    EXPECT_LE(error_of(ScaleRule::kSearch), error_of(ScaleRule::kAmax) * (1 + 1e-12)) << seed;
  }
}

TEST_P(ZeroPoints, Zeros_ComeBack) {
  const std::vector<float> values(2 * kGroup, 0.0F);
  const QuantisedRows rows = Quantiser(options_of(GetParam())).quantise(values, 2, kGroup, 1.0F);
  EXPECT_EQ(rows.error.squared_error, 0.0);
  EXPECT_EQ(float_at(rows.scales, 0), 1.0F);
}

INSTANTIATE_TEST_SUITE_P(Integers, ZeroPoints, testing::Values(DType::kI4, DType::kI8),
                         [](const auto& row) { return std::string(to_string(row.param)); });

}  // namespace
}  // namespace conclave::quant
