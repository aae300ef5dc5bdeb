// Compares codes and scales from the device with the host's rule, bit for bit.
#include "core/float_convert.h"
#include "experts/cuda/common/quantize_rows.h"
#include "quant/activation_rows.h"
#include "support/cuda/device_array.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

// What rows may become beside weights of any format, each once.
std::vector<const quant::CodeBook*> all_row_codes() {
  std::vector<const quant::CodeBook*> all;
  const auto catalog = quant::format_catalog();
  for (const quant::WeightFormat& format : catalog.rows()) {
    if (format.row_codes == nullptr || std::ranges::count(all, format.row_codes) != 0) continue;
    all.push_back(format.row_codes);
  }
  return all;
}

struct QuantizeCase {
  int64_t rows = 1;
  int64_t columns = 128;
  int64_t row_stride = 128;
  int64_t code_stride = 128;
  quant::ActivationRule rule;
};

// Normal values over twelve orders of magnitude, rows of zeros, denormals, NaN and infinities.
std::vector<float> make_values(const QuantizeCase& c, bool finite) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(c.rows * c.row_stride), 1e30F);
  for (int64_t r = 0; r < c.rows; ++r) {
    const float size = r % 5 == 1 ? 0.0F : std::pow(10.0F, static_cast<float>(r % 13) - 6.0F);
    for (int64_t i = 0; i < c.columns; ++i) {
      float& value = values[static_cast<size_t>(r * c.row_stride + i)];
      value = normal(random) * (r % 7 == 3 ? 1e-41F : size);
      if (!finite && (r + i) % 97 == 0) value = std::numeric_limits<float>::quiet_NaN();
      if (!finite && r % 3 == 2 && i == 5) value = std::numeric_limits<float>::infinity();
    }
  }
  return values;
}

class QuantizeRowsCuda : public DeviceTest {
 protected:
  void check_each_form(const quant::CodeBook& codes);
  void check(const QuantizeCase& c, const std::vector<float>& values) {
    const int64_t per_row = quant::scales_per_row(c.rule.form, c.columns);
    const DeviceArray<float> rows(values);
    const DeviceArray<float> step(std::vector<float>{c.rule.static_scale});
    const DeviceArray<uint8_t> codes(static_cast<size_t>(c.rows * c.code_stride));
    const DeviceArray<float> scales(static_cast<size_t>(c.rows * per_row));
    experts::quantize_rows_cuda({.rows = rows.data(),
                                 .dtype = DType::kF32,
                                 .num_rows = c.rows,
                                 .columns = c.columns,
                                 .row_stride = c.row_stride,
                                 .activations = c.rule.form,
                                 .power_of_two = c.rule.power_of_two_scales,
                                 .static_scale = step.data(),
                                 .code_dtype = c.rule.codes->element,
                                 .codes = codes.data(),
                                 .code_stride = c.code_stride,
                                 .scales = scales.data(),
                                 .scale_stride = per_row},
                                stream());
    wait();
    codes.expect_guard_untouched();
    scales.expect_guard_untouched();
    compare(c, values, codes.download(), scales.download(), per_row);
  }

 private:
  static void compare(const QuantizeCase& c, const std::vector<float>& values,
                      const std::vector<uint8_t>& codes, const std::vector<float>& scales,
                      int64_t per_row) {
    std::vector<uint8_t> expected(static_cast<size_t>(c.columns));
    std::vector<float> expected_scales(static_cast<size_t>(per_row));
    for (int64_t r = 0; r < c.rows; ++r) {
      quant::quantize_activations(values.data() + r * c.row_stride, c.columns, c.rule,
                                  expected.data(), expected_scales.data());
      for (int64_t i = 0; i < c.code_stride; ++i) {
        const uint8_t code = codes[static_cast<size_t>(r * c.code_stride + i)];
        const uint8_t wanted = i < c.columns ? expected[static_cast<size_t>(i)] : kPoison;
        const bool both_nan = c.rule.codes->has_nan && i < c.columns && (code & 0x7F) == 0x7F &&
                              (wanted & 0x7F) == 0x7F;
        ASSERT_TRUE(code == wanted || both_nan)
            << "row " << r << " column " << i << ": " << int{code} << ", host " << int{wanted};
      }
      if (c.rule.form == ActivationScale::kTensorStatic) continue;
      for (int64_t g = 0; g < per_row; ++g) {
        const float scale = scales[static_cast<size_t>(r * per_row + g)];
        const float wanted = expected_scales[static_cast<size_t>(g)];
        ASSERT_TRUE(scale == wanted || (std::isnan(scale) && std::isnan(wanted)))
            << "row " << r << " group " << g << ": " << scale << ", host " << wanted;
      }
    }
  }
};

void QuantizeRowsCuda::check_each_form(const quant::CodeBook& codes) {
  for (const ActivationScale form :
       {ActivationScale::kGroup, ActivationScale::kToken, ActivationScale::kTensorStatic}) {
    for (const bool power_of_two : {false, true}) {
      for (const int64_t columns : {1, 15, 16, 127, 128, 129, 520, 1024, 1025, 2049, 4096, 9001}) {
        // One stride keeps 16-byte accesses aligned, the other does not.
        for (const int64_t slack : {0, 1}) {
          QuantizeCase c{.rows = 29,
                         .columns = columns,
                         .row_stride = (columns + 15) / 16 * 16 + slack,
                         .code_stride = (columns + 15) / 16 * 16 + slack,
                         .rule = {.form = form,
                                  .power_of_two_scales = power_of_two,
                                  .static_scale = 0.037F,
                                  .codes = &codes}};
          SCOPED_TRACE("form " + std::to_string(static_cast<int>(form)) + " columns " +
                       std::to_string(columns) + " slack " + std::to_string(slack));
          check(c, make_values(c, true));
          check(c, make_values(c, false));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(QuantizeRowsCuda, EachForm_OddSizes_EqualsHostBitForBit) {
  for (const quant::CodeBook* codes : all_row_codes()) {
    SCOPED_TRACE(to_string(codes->element));
    check_each_form(*codes);
  }
}

// Values at the boundaries between codes, and their neighbours. One mantissa has no inverse that is
// rounded correctly.
std::vector<float> make_boundaries(const QuantizeCase& c) {
  std::vector<float> magnitudes;
  for (int code = 0; code < 256; ++code) {
    const float value = c.rule.codes->decode(static_cast<uint8_t>(code));
    if (value >= 0) magnitudes.push_back(value);
  }
  std::ranges::sort(magnitudes);
  std::mt19937 random(17);
  std::vector<float> values(static_cast<size_t>(c.rows * c.row_stride), 0.0F);
  for (int64_t r = 0; r < c.rows; ++r) {
    float* const row = values.data() + r * c.row_stride;
    const uint32_t mantissa = r % 8 == 0 ? 0x7fffffU : random() & 0x7fffffU;
    const float scale = std::ldexp(1.0F + static_cast<float>(mantissa) * 0x1p-23F,
                                   static_cast<int>(random() % 180) - 90);
    row[0] = c.rule.codes->largest * scale;
    for (int64_t i = 1; i < c.columns; ++i) {
      const size_t at = random() % (magnitudes.size() - 1);
      const float boundary = (magnitudes[at] + magnitudes[at + 1]) / 2 * scale;
      const std::array near = {std::nextafter(boundary, 0.0F), boundary,
                               std::nextafter(boundary, std::numeric_limits<float>::infinity())};
      row[i] = std::min(near[random() % 3], row[0]) * (random() % 2 == 0 ? 1.0F : -1.0F);
    }
  }
  return values;
}

TEST_F(QuantizeRowsCuda, ValuesAtBoundaries_EqualsHostBitForBit) {
  for (const quant::CodeBook* codes : all_row_codes()) {
    SCOPED_TRACE(to_string(codes->element));
    const QuantizeCase c{.rows = 2000,
                         .columns = 768,
                         .row_stride = 768,
                         .code_stride = 768,
                         .rule = {.form = ActivationScale::kToken, .codes = codes}};
    check(c, make_boundaries(c));
    if (HasFatalFailure()) return;
  }
}

// Quotients overflow with the smallest steps, and inverses of the largest ones are subnormal.
TEST_F(QuantizeRowsCuda, StaticSteps_OfAnyMagnitude_EqualsHostBitForBit) {
  const quant::CodeBook* const codes = quant::format_of(DType::kF8E4M3).row_codes;
  for (const float step : {0x1p-149F, 0x1.5p-130F, 0x1p-100F, 0x1.9p100F, 0x1.7p127F}) {
    SCOPED_TRACE(step);
    const QuantizeCase c{
        .rows = 29,
        .columns = 520,
        .row_stride = 528,
        .code_stride = 528,
        .rule = {.form = ActivationScale::kTensorStatic, .static_scale = step, .codes = codes}};
    check(c, make_values(c, true));
    check(c, make_values(c, false));
    if (HasFatalFailure()) return;
  }
}

// 16-bit rows are divided in another way than float32 rows. Groups hold multiples of every mantissa
// of the type, so that quotients come close to and onto the boundaries between codes.
TEST_F(QuantizeRowsCuda, SixteenBitRows_EqualFloat32Rows) {
  constexpr int64_t kRows = 8193;
  constexpr int64_t kColumns = 384;
  std::mt19937 random(11);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<uint16_t> bits(static_cast<size_t>(kRows * kColumns));
    std::vector<float> values(bits.size());
    for (size_t i = 0; i < bits.size(); ++i) {
      const bool small = random() % 4 == 0;
      const float value = std::ldexp(1.0F + static_cast<float>(random() % 1024) / 1024.0F,
                                     small ? -static_cast<int>(random() % 9) : 0) *
                          (random() % 2 == 0 ? 1.0F : -1.0F);
      bits[i] = random() % 32 == 0      ? static_cast<uint16_t>(random() % 2 == 0 ? 0 : 0x8000)
                : dtype == DType::kBF16 ? float_to_bf16(value)
                                        : float_to_f16(value);
      values[i] = dtype == DType::kBF16 ? bf16_to_float(bits[i]) : f16_to_float(bits[i]);
    }
    const auto quantize = [&](const void* rows, DType of) {
      const DeviceArray<uint8_t> codes(bits.size());
      const DeviceArray<float> scales(static_cast<size_t>(kRows * kColumns / 128));
      experts::quantize_rows_cuda({.rows = rows,
                                   .dtype = of,
                                   .num_rows = kRows,
                                   .columns = kColumns,
                                   .row_stride = kColumns,
                                   .codes = codes.data(),
                                   .code_stride = kColumns,
                                   .scales = scales.data(),
                                   .scale_stride = kColumns / 128},
                                  stream());
      wait();
      return codes.download();
    };
    const DeviceArray<uint16_t> narrow(bits);
    const DeviceArray<float> wide(values);
    EXPECT_EQ(quantize(narrow.data(), dtype), quantize(wide.data(), DType::kF32));
  }
}

// Steps far from 1 have no reciprocal in two parts: it would overflow or lose bits.
TEST_F(QuantizeRowsCuda, SixteenBitRowsOfAnyMagnitude_EqualFloat32Rows) {
  constexpr int64_t kRows = 254;
  constexpr int64_t kColumns = 128;
  std::mt19937 random(13);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> bits(static_cast<size_t>(kRows * kColumns));
  std::vector<float> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    const auto row = static_cast<int>(i / kColumns);
    bits[i] = float_to_bf16(std::ldexp(normal(random), row - 130));
    values[i] = bf16_to_float(bits[i]);
  }
  const auto quantize = [&](const void* rows, DType dtype) {
    const DeviceArray<uint8_t> codes(bits.size());
    const DeviceArray<float> scales(static_cast<size_t>(kRows));
    experts::quantize_rows_cuda({.rows = rows,
                                 .dtype = dtype,
                                 .num_rows = kRows,
                                 .columns = kColumns,
                                 .row_stride = kColumns,
                                 .codes = codes.data(),
                                 .code_stride = kColumns,
                                 .scales = scales.data(),
                                 .scale_stride = 1},
                                stream());
    wait();
    return codes.download();
  };
  const DeviceArray<uint16_t> narrow(bits);
  const DeviceArray<float> wide(values);
  EXPECT_EQ(quantize(narrow.data(), DType::kBF16), quantize(wide.data(), DType::kF32));
}

// Every slot of a row gets the codes and scales that the row has in order; other slots stay.
TEST_F(QuantizeRowsCuda, RowsOfSlots_EqualRowsInOrder) {
  constexpr int64_t kRows = 41;
  constexpr int32_t kTopK = 3;
  constexpr int64_t kSorted = kRows * kTopK;
  constexpr int64_t kGroupStride = kSorted + 1;
  std::vector<int32_t> slot_row(static_cast<size_t>(kSorted));
  std::iota(slot_row.begin(), slot_row.end(), 0);
  std::shuffle(slot_row.begin(), slot_row.end(), std::mt19937(3));
  for (int32_t& row : slot_row) row = row % 7 == 2 ? -1 : row;
  const DeviceArray<int32_t> targets(slot_row);
  for (const ActivationScale form : {ActivationScale::kGroup, ActivationScale::kToken}) {
    for (const int64_t columns : {136, 4096, 9001}) {
      const int64_t stride = (columns + 15) / 16 * 16;
      const QuantizeCase c{.rows = kRows, .columns = columns, .row_stride = stride, .rule = {}};
      const DeviceArray<float> rows(make_values(c, true));
      const int64_t groups = quant::scales_per_row(form, columns);
      const auto quantize = [&](const int32_t* slots, int64_t num_rows) {
        const DeviceArray<uint8_t> codes(static_cast<size_t>(num_rows * stride));
        const DeviceArray<float> scales(static_cast<size_t>(groups * kGroupStride));
        experts::quantize_rows_cuda({.rows = rows.data(),
                                     .dtype = DType::kF32,
                                     .num_rows = kRows,
                                     .columns = columns,
                                     .row_stride = stride,
                                     .activations = form,
                                     .codes = codes.data(),
                                     .code_stride = stride,
                                     .scales = scales.data(),
                                     .scale_stride = 1,
                                     .group_stride = kGroupStride,
                                     .slot_row = slots,
                                     .top_k = slots == nullptr ? 1 : kTopK},
                                    stream());
        wait();
        codes.expect_guard_untouched();
        scales.expect_guard_untouched();
        return std::pair(codes.download(), scales.download());
      };
      const auto [codes, scales] = quantize(nullptr, kRows);
      const auto [sorted_codes, sorted_scales] = quantize(targets.data(), kSorted);
      const auto row_of = [&](const std::vector<uint8_t>& from, int64_t row) {
        const auto begin = from.begin() + static_cast<std::ptrdiff_t>(row * stride);
        return std::vector<uint8_t>(begin, begin + static_cast<std::ptrdiff_t>(columns));
      };
      std::vector<bool> written(static_cast<size_t>(kSorted), false);
      for (int64_t slot = 0; slot < kSorted; ++slot) {
        const int32_t row = slot_row[static_cast<size_t>(slot)];
        if (row < 0) continue;
        written[static_cast<size_t>(row)] = true;
        ASSERT_EQ(row_of(sorted_codes, row), row_of(codes, slot / kTopK)) << "slot " << slot;
        for (int64_t g = 0; g < groups; ++g) {
          ASSERT_EQ(sorted_scales[static_cast<size_t>(g * kGroupStride + row)],
                    scales[static_cast<size_t>(g * kGroupStride + slot / kTopK)]);
        }
      }
      const std::vector<uint8_t> poison(static_cast<size_t>(columns), kPoison);
      for (int64_t row = 0; row < kSorted; ++row) {
        if (!written[static_cast<size_t>(row)]) {
          ASSERT_EQ(row_of(sorted_codes, row), poison);
        }
      }
    }
  }
}

}  // namespace
}  // namespace conclave::testing
