// Scales chosen and values encoded, for every format of codes: by arithmetic on what comes back.
#include "conclave/quantise.h"

#include "core/code_bits.h"
#include "core/weight_types.h"
#include "quant/code_grid.h"
#include "quant/planes.h"
#include "quant/scale_type.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace conclave::quant {
namespace {

// A plain generator: the same values everywhere.
float draw(uint64_t& state) {
  state = state * 6364136223846793005U + 1442695040888963407U;
  return static_cast<float>(static_cast<int32_t>(state >> 33)) * 0x1p-30F - 1.0F;
}

std::vector<float> random_values(int64_t count, uint64_t seed) {
  uint64_t state = seed;
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    // Products of three spread over several powers of two, as weights do.
    values.push_back(draw(state) * draw(state) * draw(state));
  }
  return values;
}

struct Form {
  std::string name;
  QuantiseOptions options;
};

std::vector<Form> all_forms() {
  std::vector<Form> forms;
  for (const WeightFormat& format : format_catalog().rows()) {
    if (format.codes == nullptr) continue;
    const auto add = [&](const char* name, const QuantSpec& quant, DType scales) {
      if (!format.takes(quant)) return;
      forms.push_back({std::string(format.name) + "_" + name,
                       {.codes = format.element, .quant = quant, .scale_dtype = scales}});
    };
    add("tensor", {.weights = WeightScale::kTensor}, DType::kF32);
    add("channel", {.weights = WeightScale::kChannel}, DType::kF32);
    add("channel_bf16", {.weights = WeightScale::kChannel}, DType::kBF16);
    add("block", {.weights = WeightScale::kBlock, .block_rows = 4, .block_cols = 8}, DType::kF32);
    add("group", {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 16}, DType::kF32);
    add("group_f16", {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 16},
        DType::kF16);
    add("group_e8m0", {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32},
        DType::kF8E8M0);
    add("group_global",
        {.weights = WeightScale::kBlock,
         .block_rows = 1,
         .block_cols = 16,
         .has_global_scale = true},
        DType::kF8E4M3);
  }
  return forms;
}

std::vector<float> widen(DType dtype, const std::vector<std::byte>& bytes) {
  std::vector<float> scales;
  if (dtype == DType::kF8E8M0) {
    for (const std::byte byte : bytes) scales.push_back(std::ldexp(1.0F, int(byte) - 127));
    return scales;
  }
  scales.resize(bytes.size() / static_cast<size_t>(byte_size(dtype)));
  format_of(dtype).decode(bytes.data(), 0, static_cast<int64_t>(scales.size()), scales.data());
  return scales;
}

float largest_of(const std::vector<float>& values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

class EveryForm : public testing::TestWithParam<Form> {
 protected:
  struct Decoded {
    QuantisedRows rows;
    std::vector<double> values;
    std::vector<double> steps;  // the scale of each value, the global one included
  };

  Decoded quantise(const std::vector<float>& values, int64_t rows, int64_t cols,
                   ScaleRule rule = ScaleRule::kAmax) const {
    QuantiseOptions options = GetParam().options;
    options.rule = rule;
    const Quantiser quantiser(options);
    const float whole =
        quantiser.needs_matrix_scale() ? quantiser.matrix_scale(largest_of(values)) : 1.0F;
    Decoded decoded;
    decoded.rows = quantiser.quantise(values, rows, cols, whole);
    const std::vector<float> scales = widen(options.scale_dtype, decoded.rows.scales);
    const PlaneShape plane =
        plane_of(WeightPlane::kScale, options.codes, options.quant, rows, cols);
    EXPECT_EQ(static_cast<int64_t>(scales.size()), plane.rows * plane.cols);
    const int64_t row_bytes = packed_bytes(options.codes, cols);
    std::vector<float> codes(static_cast<size_t>(cols));
    for (int64_t row = 0; row < rows; ++row) {
      format_of(options.codes)
          .decode(decoded.rows.codes.data() + row * row_bytes, 0, cols, codes.data());
      for (int64_t col = 0; col < cols; ++col) {
        const auto at =
            static_cast<size_t>(row / plane.block_rows * plane.cols + col / plane.block_cols);
        const double global = options.quant.has_global_scale ? double{whole} : 1.0;
        decoded.steps.push_back(double{scales[at]} * global);
        decoded.values.push_back(double{codes[static_cast<size_t>(col)]} * decoded.steps.back());
      }
    }
    return decoded;
  }

  const CodeBook& codes() const { return *format_of(GetParam().options.codes).codes; }
};

// Distance of the two codes around a quotient, from the list of all codes.
double gap_around(const CodeBook& codes, int64_t bits, double quotient) {
  std::vector<double> values;
  for (int code = 0; code < 1 << bits; ++code) {
    const float value = codes.decode(static_cast<uint8_t>(code));
    if (std::isfinite(value)) values.push_back(value);
  }
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
  const auto above = std::ranges::upper_bound(values, quotient);
  if (above == values.begin()) return values[1] - values[0];
  if (above == values.end()) return *(values.end() - 1) - *(values.end() - 2);
  return *above - *(above - 1);
}

TEST_P(EveryForm, Values_AreWithinHalfAStepUnlessBeyondTheLargestCode) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{4, 32}, {5, 19}, {1, 1}, {9, 33}}) {
    const std::vector<float> values = random_values(rows * cols, 7);
    const Decoded decoded = quantise(values, rows, cols);
    for (size_t i = 0; i < values.size(); ++i) {
      const double step = decoded.steps[i];
      const double quotient = double{values[i]} / step;
      // Scales rounded to few bits leave the largest value beyond the largest code.
      const double beyond = std::max(0.0, std::abs(quotient) - double{codes().largest});
      // The quotient is rounded to float32 before it is rounded to a code.
      const double gap = gap_around(codes(), bit_size(GetParam().options.codes), quotient);
      EXPECT_LE(std::abs(double{values[i]} - decoded.values[i]) / step,
                std::max(0.5 * gap, beyond) + std::abs(quotient) * 0x1p-23)
          << i << " of " << rows << " x " << cols << ": " << values[i];
    }
  }
}

TEST_P(EveryForm, Search_IsNeverWorseThanAmax) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<float> values = random_values(8 * 48, seed);
    const QuantiseError amax = quantise(values, 8, 48).rows.error;
    const QuantiseError search = quantise(values, 8, 48, ScaleRule::kSearch).rows.error;
    EXPECT_LE(search.squared_error, amax.squared_error * (1 + 1e-12)) << seed;
    EXPECT_EQ(search.squared_values, amax.squared_values);
  }
}

TEST_P(EveryForm, Error_IsThatOfWhatComesBack) {
  const std::vector<float> values = random_values(6 * 40, 3);
  for (const ScaleRule rule : {ScaleRule::kAmax, ScaleRule::kSearch}) {
    const Decoded decoded = quantise(values, 6, 40, rule);
    double squared = 0;
    double norm = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      squared += std::pow(double{values[i]} - decoded.values[i], 2);
      norm += double{values[i]} * double{values[i]};
    }
    // The scale times the global one is rounded to float32 in one, and not in the other.
    EXPECT_NEAR(decoded.rows.error.squared_error / squared, 1.0, 1e-5);
    EXPECT_NEAR(decoded.rows.error.squared_values / norm, 1.0, 1e-12);
  }
}

TEST_P(EveryForm, Zeros_HaveScaleOneAndComeBack) {
  const quant::CodeBook& book = *quant::format_of(GetParam().options.codes).codes;
  if (book.decode(book.encode(0)) != 0) GTEST_SKIP() << "no code is zero";
  const Decoded decoded = quantise(std::vector<float>(4 * 32, 0.0F), 4, 32);
  for (const double value : decoded.values) EXPECT_EQ(value, 0.0);
  for (const float scale : widen(GetParam().options.scale_dtype, decoded.rows.scales)) {
    EXPECT_EQ(scale, 1.0F);
  }
  EXPECT_EQ(decoded.rows.error.relative(), 0.0);
}

TEST_P(EveryForm, ExtremeValues_GiveFiniteScales) {
  for (const float size :
       {std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(), 1e-30F, 1e30F,
        std::numeric_limits<float>::max()}) {
    for (const ScaleRule rule : {ScaleRule::kAmax, ScaleRule::kSearch}) {
      std::vector<float> values(32, 0.0F);
      values[3] = size;
      values[20] = -size;
      const Decoded decoded = quantise(values, 1, 32, rule);
      for (const double step : decoded.steps) {
        EXPECT_TRUE(std::isfinite(step) && step > 0) << size;
      }
      for (const double value : decoded.values) EXPECT_TRUE(std::isfinite(value)) << size;
    }
  }
}

TEST_P(EveryForm, Strips_OfWholeBlocksAreTheMatrix) {
  const std::vector<float> values = random_values(12 * 32, 11);
  const Quantiser quantiser(GetParam().options);
  const float whole =
      quantiser.needs_matrix_scale() ? quantiser.matrix_scale(largest_of(values)) : 1.0F;
  const QuantisedRows all = quantiser.quantise(values, 12, 32, whole);
  std::vector<std::byte> joined;
  for (int64_t row = 0; row < 12; row += 4) {
    const QuantisedRows part = quantiser.quantise(
        std::span(values).subspan(static_cast<size_t>(row * 32), 4 * 32), 4, 32, whole);
    joined.insert(joined.end(), part.codes.begin(), part.codes.end());
  }
  EXPECT_EQ(joined, all.codes);
  EXPECT_EQ(4 % quantiser.block_rows(), 0);
}

TEST_P(EveryForm, NoRows_GiveNothing) {
  const Quantiser quantiser(GetParam().options);
  const QuantisedRows rows = quantiser.quantise({}, 0, 32, 1.0F);
  EXPECT_TRUE(rows.codes.empty());
  EXPECT_TRUE(rows.scales.empty());
}

INSTANTIATE_TEST_SUITE_P(Quantise, EveryForm, testing::ValuesIn(all_forms()),
                         [](const auto& test) { return test.param.name; });

TEST(Quantise, Amax_IsTheRuleOfTheFormat) {
  const std::vector<float> values = {0.5F, -3.5F, 1.0F, 0.0F};
  const Quantiser int4({.codes = DType::kI4, .quant = {.weights = WeightScale::kChannel}});
  const QuantisedRows rows = int4.quantise(values, 1, 4, 1.0F);
  EXPECT_EQ(widen(DType::kF32, rows.scales), std::vector<float>{0.5F});
  // Codes are whole numbers plus 8: 1, -7, 2, 0.
  EXPECT_EQ(code_at(rows.codes.data(), 0, 4), 9);
  EXPECT_EQ(code_at(rows.codes.data(), 1, 4), 1);
  EXPECT_EQ(code_at(rows.codes.data(), 2, 4), 10);
  EXPECT_EQ(code_at(rows.codes.data(), 3, 4), 8);
  EXPECT_EQ(rows.error.squared_error, 0.0);
}

TEST(Quantise, Search_FindsAScaleThatClipsAnOutlierOnlyWhereItPays) {
  // One outlier among many values of one size: clipped, it costs less than all others gain.
  std::vector<float> values(512, 1.0F);
  for (size_t i = 0; i < values.size(); i += 2) values[i] = -1.0F;
  values[7] = 10.4F;
  const QuantSpec channel = {.weights = WeightScale::kChannel};
  const Quantiser amax({.codes = DType::kI4, .quant = channel});
  const Quantiser search({.codes = DType::kI4, .quant = channel, .rule = ScaleRule::kSearch});
  const double before = amax.quantise(values, 1, 512, 1.0F).error.squared_error;
  const double after = search.quantise(values, 1, 512, 1.0F).error.squared_error;
  EXPECT_LT(after, 0.5 * before);
}

// Codes of 2 to 8 bits times scale less offset: a value lies within half a step, but for what the
// ends lose where they are rounded to the type of the scales.
TEST(Quantise, Offsets_LetTheLeastCodeStandForANumberOfTheScaleType) {
  constexpr int64_t kRows = 3;
  constexpr int64_t kCols = 128;
  constexpr int64_t kGroup = 32;
  std::vector<float> values = random_values(kRows * kCols, 9);
  // All of one sign, all equal, all 0.
  for (int64_t i = 0; i < kGroup; ++i) values[static_cast<size_t>(i)] += 3.0F;
  std::fill_n(values.begin() + kGroup, kGroup, -0.75F);
  std::fill_n(values.begin() + 2 * kGroup, kGroup, 0.0F);
  for (const ScaleRule rule : {ScaleRule::kAmax, ScaleRule::kSearch}) {
    for (const int64_t bits : {2, 3, 4, 5, 6, 8}) {
      const DType codes = bits > 4 ? DType::kI8 : DType::kI4;
      QuantSpec quant{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = kGroup};
      quant.zeros = WeightZero::kOffset;
      quant.signed_scales = true;
      const Quantiser quantiser({.codes = codes,
                                 .code_bits = bits,
                                 .quant = quant,
                                 .scale_dtype = DType::kBF16,
                                 .rule = rule});
      const QuantisedRows made = quantiser.quantise(values, kRows, kCols, 1.0F);
      const std::vector<float> scales = widen(DType::kBF16, made.scales);
      const std::vector<float> offsets = widen(DType::kF32, made.zeros);
      ASSERT_EQ(offsets.size(), scales.size());
      const auto middle = static_cast<float>(int64_t{1} << (bits - 1));
      double squared = 0;
      for (int64_t i = 0; i < kRows * kCols; ++i) {
        const auto group = static_cast<size_t>(i / kGroup);
        const float least = -(offsets[group] + middle * scales[group]);
        EXPECT_EQ(round_scale(DType::kBF16, std::abs(least) + (least == 0 ? 1 : 0)),
                  std::abs(least) + (least == 0 ? 1 : 0));
        const uint8_t stored = code_at(made.codes.data(), i, bit_size(codes));
        const float code =
            codes == DType::kI4 ? stored - 8.0F : static_cast<float>(static_cast<int8_t>(stored));
        EXPECT_GE(code, -middle);
        EXPECT_LT(code, middle);
        const double off = double{values[static_cast<size_t>(i)]} -
                           (double{code} * scales[group] - double{offsets[group]});
        squared += off * off;
        if (rule == ScaleRule::kSearch) continue;
        // The least value, and the largest by the rounded scale, may lie beyond the codes.
        const double lost = std::abs(least) * 0x1p-8 + 2 * middle * scales[group] * 0x1p-8;
        EXPECT_LE(std::abs(off), 0.5 * scales[group] + lost) << bits << " bits, value " << i;
      }
      // The code of 0 and the distance from it are rounded to float32 where codes are chosen.
      double largest = 0;
      for (const float offset : offsets) largest = std::max(largest, double{std::abs(offset)});
      const double rounding = 2 * largest * 0x1p-24;
      const auto count = static_cast<double>(values.size());
      EXPECT_NEAR(made.error.squared_error, squared,
                  2 * std::sqrt(count * squared) * rounding + count * rounding * rounding);
    }
  }
}

TEST(Quantise, MatrixScales_OfASearchEndBelowTheFirst) {
  const Quantiser search({.codes = DType::kI8,
                          .quant = {.weights = WeightScale::kTensor},
                          .rule = ScaleRule::kSearch});
  const std::vector<float> scales = search.matrix_scales(12.7F);
  ASSERT_GT(scales.size(), 8U);
  EXPECT_FLOAT_EQ(scales.front(), 0.1F);
  EXPECT_TRUE(std::ranges::is_sorted(scales, std::ranges::greater()));
}

TEST(Quantise, ScaleTypes_RoundWithinTheirRange) {
  EXPECT_EQ(round_scale(DType::kF32, 0.3F), 0.3F);
  EXPECT_EQ(round_scale(DType::kF8E8M0, 0.3F), 0.5F);
  EXPECT_EQ(round_scale(DType::kF8E8M0, 0.5F), 0.5F);
  EXPECT_EQ(round_scale(DType::kF8E8M0, 1e-44F), 0x1p-127F);
  EXPECT_EQ(round_scale(DType::kF8E8M0, std::numeric_limits<float>::max()), 0x1p127F);
  EXPECT_EQ(round_scale(DType::kF8E4M3, 1000.0F), 448.0F);
  EXPECT_EQ(round_scale(DType::kF8E4M3, 1e-9F), 0x1p-9F);
  EXPECT_EQ(round_scale(DType::kF16, 1e6F), 65504.0F);
  EXPECT_EQ(largest_scale(DType::kF16), 65504.0F);
  EXPECT_EQ(largest_scale(DType::kF32), std::numeric_limits<float>::max());
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E8M0}) {
    EXPECT_TRUE(is_scale_type(dtype)) << to_string(dtype);
    EXPECT_EQ(round_scale(dtype, 0.0F), 1.0F) << to_string(dtype);
  }
  EXPECT_FALSE(is_scale_type(DType::kI8));
  EXPECT_FALSE(is_scale_type(DType::kI64));
}

TEST(Quantise, ExponentScales_AreStoredAsTheirExponent) {
  std::vector<std::byte> bytes;
  const std::vector<float> scales = {0x1p-127F, 0x1p-126F, 1.0F, 0x1p127F};
  append_scales(DType::kF8E8M0, scales, bytes);
  EXPECT_EQ(bytes,
            (std::vector<std::byte>{std::byte{0}, std::byte{1}, std::byte{127}, std::byte{254}}));
}

TEST(Quantise, Steps_CountDistancesOfNeighbouringCodes) {
  const CodeGrid grid(*format_of(DType::kF8E4M3).codes, 8);
  const CodeBook& codes = *format_of(DType::kF8E4M3).codes;
  // Between 16 and 18, between 14 and 15 below a power of two, and beyond 448, whose step is 32.
  EXPECT_DOUBLE_EQ(grid.steps(16.5, codes.encode(16.0F)), 0.25);
  EXPECT_DOUBLE_EQ(grid.steps(15.75, codes.encode(16.0F)), 0.25);
  EXPECT_DOUBLE_EQ(grid.steps(480.0, codes.encode(448.0F)), 1.0);
  EXPECT_DOUBLE_EQ(grid.steps(-480.0, codes.encode(-448.0F)), 1.0);
}

TEST(Quantise, WhatIsNoForm_IsRefusedWithAReason) {
  const auto reason = [](const QuantiseOptions& options) {
    const Support support = Quantiser::supports(options);
    EXPECT_THROW(Quantiser{options}, Error);
    return support.reason();
  };
  EXPECT_EQ(reason({.codes = DType::kBF16}), "BF16 are not codes");
  EXPECT_EQ(reason({.codes = DType::kI8}), "codes have scales");
  const QuantSpec channel = {.weights = WeightScale::kChannel};
  QuantSpec other = channel;
  other.zeros = WeightZero::kPoint;
  EXPECT_EQ(reason({.codes = DType::kF8E4M3, .quant = other}),
            "zero points are whole numbers, which these codes are not");
  other.weights = WeightScale::kTensor;
  EXPECT_FALSE(reason({.codes = DType::kI8, .quant = other}).empty());
  other.zeros = WeightZero::kOffset;
  EXPECT_EQ(reason({.codes = DType::kI8, .quant = other}),
            "zero points and offsets stand beside scales of rows and groups");
  other = channel;
  other.activations = ActivationScale::kTensorStatic;
  EXPECT_FALSE(reason({.codes = DType::kI8, .quant = other}).empty());
  EXPECT_FALSE(reason({.codes = DType::kI8, .quant = channel, .scale_dtype = DType::kI8}).empty());
}

}  // namespace
}  // namespace conclave::quant
