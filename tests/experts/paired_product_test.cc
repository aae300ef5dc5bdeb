// Products of panels of codes with rows of bf16, by dot products of pairs.
#include "core/float_convert.h"
#include "cpu/isa.h"
#include "experts/coded_problem.h"
#include "experts/cpu/mlp_functions.h"
#include "quant/weight_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace conclave::experts {
namespace {

using testing::bits_of;
using testing::Problem;

// Formats on pairs of bf16: products of codes are exact, so that only sums round.
class PairedProduct : public ::testing::TestWithParam<const quant::WeightFormat*> {
 protected:
  void SetUp() override {
    if (!cpu::usable(cpu::Isa::kAvx512Bf16)) GTEST_SKIP() << "this CPU lacks avx512_bf16";
  }
  gemm::PanelFunction product() const {
    return mlp_functions_avx512_bf16(GetParam()->element, {}).product;
  }
};

// Plain rows of bf16, padded with zeros.
struct PairedRows {
  PairedRows(int64_t rows, int64_t k, std::mt19937& random)
      : count(rows), stride((k + 31) / 32 * 32), bits(static_cast<size_t>(rows * stride)) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < k; ++i) {
        const float value = static_cast<float>(random() & 0xffff) / 32768.0F - 1.0F;
        bits[static_cast<size_t>(r * stride + i)] = float_to_bf16(value);
      }
    }
  }
  float at(int64_t row, int64_t k) const {
    return bf16_to_float(bits[static_cast<size_t>(row * stride + k)]);
  }

  int64_t count;
  int64_t stride;
  std::vector<uint16_t> bits;
};

std::vector<float> run(Problem& problem, gemm::PanelFunction product, const PairedRows& rows,
                       int64_t first, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count * gemm::kPanelColumns));
  const void* data = rows.bits.data() + first * rows.stride;
  product({.panel = problem.bytes(),
           .next_panel = problem.bytes(),
           .k = problem.layout.k,
           .rows = static_cast<const std::byte*>(data),
           .row_bytes = rows.stride * int64_t{sizeof(uint16_t)},
           .num_rows = count,
           .bias = problem.bias.data(),
           .out = static_cast<std::byte*>(static_cast<void*>(out.data())),
           .out_row_bytes = gemm::kPanelColumns * int64_t{sizeof(float)},
           .valid_columns = gemm::kPanelColumns,
           .scales = problem.layout.scales(problem.bytes()),
           .scale_width = problem.layout.scale_width});
  return out;
}

// Every code but those of NaN and infinity.
void keep_numbers(Problem& problem, const quant::WeightFormat& format) {
  if (!format.codes->has_nan) return;
  for (int64_t i = 0; i < problem.code_bytes(); ++i) {
    std::byte& code = problem.bytes()[i];
    if (!std::isfinite(format.codes->decode(static_cast<uint8_t>(code)))) code &= std::byte{0xbf};
  }
}

TEST_P(PairedProduct, AnyShape_IsExactButForSums) {
  struct Shape {
    int64_t k, scale_width, rows;
  };
  for (const Shape& shape : {Shape{1, 1, 1},
                             {128, 128, 8},
                             {300, 128, 17},
                             {257, 40, 5},
                             {129, 129, 32},
                             {64, 24, 3},
                             {512, 512, 7},
                             {96, 6, 100}}) {
    Problem problem(GetParam()->element, shape.k, shape.scale_width,
                    static_cast<uint32_t>(shape.k));
    keep_numbers(problem, *GetParam());
    const PairedRows rows(shape.rows, shape.k, problem.random);
    const std::vector<float> out = run(problem, product(), rows, 0, shape.rows);
    const float* scales = problem.layout.scales(problem.bytes());
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t c = 0; c < gemm::kPanelColumns; ++c) {
        double sum = problem.bias[static_cast<size_t>(c)];
        double size = std::abs(sum);
        for (int64_t k = 0; k < shape.k; ++k) {
          const double weight = gemm::panel_value(problem.layout, problem.bytes(), k, c);
          const double part = double{rows.at(r, k)} * weight *
                              double{scales[k / shape.scale_width * gemm::kPanelColumns + c]};
          sum += part;
          size += std::abs(part);
        }
        EXPECT_NEAR(out[static_cast<size_t>(r * gemm::kPanelColumns + c)], sum, 1e-6 * size)
            << "k " << shape.k << " row " << r << " column " << c;
      }
    }
  }
}

TEST_P(PairedProduct, RowAmongOthers_HasTheBitsOfARowAlone) {
  Problem problem(GetParam()->element, 300, 128, 5);
  keep_numbers(problem, *GetParam());
  const PairedRows rows(131, 300, problem.random);
  const std::vector<float> all = run(problem, product(), rows, 0, rows.count);
  for (int64_t r = 0; r < rows.count; ++r) {
    const std::vector<float> alone = run(problem, product(), rows, r, 1);
    for (size_t c = 0; c < alone.size(); ++c) {
      ASSERT_EQ(bits_of(alone[c]), bits_of(all[static_cast<size_t>(r * gemm::kPanelColumns) + c]))
          << "row " << r << " column " << c;
    }
  }
}

std::vector<const quant::WeightFormat*> formats_exact_in_bf16(bool exact) {
  std::vector<const quant::WeightFormat*> formats;
  const auto catalog = quant::format_catalog();
  for (const quant::WeightFormat& format : catalog.rows()) {
    if (format.codes == nullptr || format.codes->exact_in_bf16 != exact) continue;
    formats.push_back(&format);
  }
  return formats;
}

INSTANTIATE_TEST_SUITE_P(Catalog, PairedProduct, ::testing::ValuesIn(formats_exact_in_bf16(true)),
                         [](const auto& test) { return std::string(test.param->name); });

TEST(PairedProducts, FormatsThatBf16DoesNotHold_HaveNone) {
  const auto formats = formats_exact_in_bf16(false);
  EXPECT_FALSE(formats.empty());
  for (const quant::WeightFormat* format : formats) {
    EXPECT_EQ(mlp_functions_avx512_bf16(format->element, {}).product, nullptr) << format->name;
  }
}

}  // namespace
}  // namespace conclave::experts
