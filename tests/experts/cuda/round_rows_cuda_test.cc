// Compares rounded rows from the device with the host's codes and scales, bit for bit.
#include "core/float_convert.h"
#include "experts/cuda/common/round_rows.h"
#include "quant/activation_rows.h"
#include "quant/gpu_rows.h"
#include "support/cuda/device_array.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

struct RowForm {
  std::string name;
  DType weights;
  QuantSpec quant;
};

std::vector<RowForm> row_forms() {
  std::vector<RowForm> forms;
  const auto add = [&](DType weights, QuantSpec quant) {
    quant.weights = WeightScale::kBlock;
    if (!quant::value_rows_support(weights, quant)) return;
    forms.push_back({"form " + std::to_string(forms.size()), weights, quant});
  };
  for (const DType weights : {DType::kI8, DType::kF8E4M3}) {
    add(weights, {.activations = ActivationScale::kToken});
    add(weights, {.activations = ActivationScale::kToken, .power_of_two_scales = true});
    add(weights, {.activations = ActivationScale::kTensorStatic});
    for (const int64_t group : {7, 16, 32, 128, 200}) {
      add(weights, {.activations = ActivationScale::kGroup,
                    .activation_group = group,
                    .power_of_two_scales = true});
    }
  }
  for (const DType rows :
       {DType::kF8E4M3, DType::kF8E5M2, DType::kF6E2M3, DType::kF6E3M2, DType::kF4}) {
    for (const RowScaleRule rule :
         {RowScaleRule::kFloorPower, RowScaleRule::kEvenPower, RowScaleRule::kHalfPower,
          RowScaleRule::kCeilPower, RowScaleRule::kTwoLevel}) {
      add(DType::kF4, {.activations = ActivationScale::kGroup,
                       .activation_group = rule == RowScaleRule::kTwoLevel ? 16 : 32,
                       .activation_dtype = rows,
                       .activation_scale_rule = rule});
    }
  }
  return forms;
}

// Normal values over twelve orders of magnitude, rows of zeros and of tiny values, NaN and
// infinities.
std::vector<float> make_values(int64_t rows, int64_t columns, int64_t stride) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(rows * stride), 1e30F);
  for (int64_t r = 0; r < rows; ++r) {
    const float size = r % 5 == 1 ? 0.0F : std::pow(10.0F, static_cast<float>(r % 13) - 6.0F);
    for (int64_t i = 0; i < columns; ++i) {
      float& value = values[static_cast<size_t>(r * stride + i)];
      value = bf16_to_float(float_to_bf16(normal(random) * (r % 7 == 3 ? 1e-30F : size)));
      if (r % 11 == 9 && i == columns / 2) value = std::numeric_limits<float>::quiet_NaN();
      if (r % 11 == 10 && i == 5) value = -std::numeric_limits<float>::infinity();
    }
  }
  return values;
}

class RoundRowsCuda : public DeviceTest {
 protected:
  static constexpr float kStated = 0.037F;
  static constexpr int64_t kRows = 33;

  // Rows of `type` become values of `value_type`.
  void check(const RowForm& form, int64_t columns, int64_t slack, DType type, DType value_type) {
    const int64_t stride = (columns + 7) / 8 * 8 + slack;
    const std::vector<float> values = make_values(kRows, columns, stride);
    std::vector<uint16_t> narrow;
    for (const float value : values) narrow.push_back(float_to_bf16(value));
    const DeviceArray<float> wide_rows(values);
    const DeviceArray<uint16_t> narrow_rows(narrow);
    const DeviceArray<float> step(std::vector<float>{kStated});
    const auto count = static_cast<size_t>(kRows * stride);
    const DeviceArray<float> floats(count);
    const DeviceArray<uint16_t> halves(count);
    const DeviceArray<float> factors(kRows);
    const bool in_float32 = value_type == DType::kF32;
    const bool of_row = quant::row_factor(form.quant) == quant::RowFactor::kOfRow;
    experts::round_rows_cuda(
        {.rows =
             type == DType::kF32 ? static_cast<const void*>(wide_rows.data()) : narrow_rows.data(),
         .dtype = type,
         .num_rows = kRows,
         .columns = columns,
         .row_stride = stride,
         .rule = experts::row_rounding(form.weights, form.quant),
         .stated_step = step.data(),
         .values = in_float32 ? static_cast<void*>(floats.data()) : halves.data(),
         .value_dtype = value_type,
         .value_stride = stride,
         .factors = of_row && !in_float32 ? factors.data() : nullptr},
        stream());
    wait();
    floats.expect_guard_untouched();
    halves.expect_guard_untouched();
    std::vector<float> found = floats.download();
    if (!in_float32) {
      const std::vector<uint16_t> bits = halves.download();
      for (size_t i = 0; i < bits.size(); ++i) found[i] = bf16_to_float(bits[i]);
    }
    compare(form, columns, stride, values, found, factors.download(), in_float32);
  }

 private:
  static void compare(const RowForm& form, int64_t columns, int64_t stride,
                      const std::vector<float>& values, const std::vector<float>& found,
                      const std::vector<float>& factors, bool in_float32) {
    quant::ActivationRule rule = quant::activation_rule(form.weights, form.quant);
    rule.static_scale = kStated;
    const quant::RowFactor factor = quant::row_factor(form.quant);
    const int64_t width = quant::scale_width(rule, columns);
    std::vector<uint8_t> codes(static_cast<size_t>(columns));
    std::vector<float> scales(static_cast<size_t>(quant::scales_per_row(rule, columns)));
    for (int64_t r = 0; r < kRows; ++r) {
      quant::quantize_activations(values.data() + r * stride, columns, rule, codes.data(),
                                  scales.data());
      for (int64_t i = 0; i < columns; ++i) {
        const float code = rule.codes->decode(codes[static_cast<size_t>(i)]);
        const float value = found[static_cast<size_t>(r * stride + i)];
        if (!std::isfinite(values[static_cast<size_t>(r * stride + i)])) {
          ASSERT_TRUE(std::isnan(value)) << "row " << r << " column " << i;
          continue;
        }
        const float scale = scales[static_cast<size_t>(i / width)];
        if (!std::isfinite(scale)) continue;
        float whole = value;
        if (!in_float32 && factor == quant::RowFactor::kStated) whole *= kStated;
        if (!in_float32 && factor == quant::RowFactor::kOfRow) {
          whole *= factors[static_cast<size_t>(r)];
        }
        // A product of three factors may be rounded twice, where two of them are not powers of two.
        const float rounding = rule.scale == RowScaleRule::kTwoLevel ? 0x1p-22F : 0.0F;
        ASSERT_NEAR(whole, code * scale, std::abs(code * scale) * rounding)
            << "row " << r << " column " << i;
      }
      if (in_float32 || columns == stride) continue;
      ASSERT_EQ(float_to_bf16(found[static_cast<size_t>(r * stride + columns)]),
                uint16_t{kPoison} * 0x101U)
          << "row " << r;
    }
  }
};

TEST_F(RoundRowsCuda, EachForm_OddSizes_EqualsHostBitForBit) {
  for (const RowForm& form : row_forms()) {
    for (const int64_t columns : {1, 15, 16, 33, 127, 128, 129, 520, 2048, 9001}) {
      for (const int64_t slack : {0, 1}) {
        for (const DType type : {DType::kF32, DType::kBF16}) {
          for (const DType value_type : {DType::kF32, DType::kBF16}) {
            SCOPED_TRACE(form.name + " columns " + std::to_string(columns) + " slack " +
                         std::to_string(slack) + " of " + std::string(to_string(type)) + " as " +
                         std::string(to_string(value_type)));
            check(form, columns, slack, type, value_type);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace conclave::testing
