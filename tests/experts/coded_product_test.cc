// Products of panels of codes: every code, every function with the bits of the reference.
#include "core/float_convert.h"
#include "core/weight_types.h"
#include "cpu/isa.h"
#include "experts/cpu/mlp_functions.h"
#include "gemm/reference_product.h"
#include "quant/weight_format.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace conclave::experts {
namespace {

using Make = MlpFunctions (*)(DType weights, const activation::Activation& activation);

struct Function {
  const char* name;
  Make make;
  cpu::Isa isa;
};
const std::vector<Function> kFunctions = {{"avx2", mlp_functions_avx2, cpu::Isa::kAvx2},
                                          {"avx512", mlp_functions_avx512, cpu::Isa::kAvx512}};

struct Case {
  Function function;
  const quant::WeightFormat* format;
};
std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto catalog = quant::format_catalog();
  for (const Function& function : kFunctions) {
    for (const quant::WeightFormat& format : catalog.rows()) {
      if (format.codes != nullptr) cases.push_back({function, &format});
    }
  }
  return cases;
}

class CodedProduct : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Function& function = GetParam().function;
    if (cpu::best_isa() < function.isa) GTEST_SKIP() << "this CPU lacks " << function.name;
  }
  const quant::WeightFormat& format() const { return *GetParam().format; }
  gemm::PanelFunction product() const {
    return GetParam().function.make(format().element, {}).product;
  }
};

// Rows of `k` values, then of scales.
struct Rows {
  std::vector<float> floats = {};
  int64_t count = 0;
  int64_t stride = 0;       // floats
  int64_t scale_width = 0;  // 0: plain

  const std::byte* bytes() const {
    return static_cast<const std::byte*>(static_cast<const void*>(floats.data()));
  }
};

uint32_t bits_of(float value) {
  return std::isnan(value) ? 0x7fc00000U : std::bit_cast<uint32_t>(value);
}

// A panel of random codes; scales that are no powers of two.
struct Problem {
  Problem(DType type, int64_t k, int64_t scale_width, uint32_t seed, int64_t scale_skip = 0)
      : layout{.dtype = type, .k = k, .scale_width = scale_width, .scale_skip = scale_skip},
        panel(layout.panel_bytes() / sizeof(float)),
        random(seed) {
    for (int64_t i = 0; i < code_bytes(); ++i) {
      bytes()[i] = static_cast<std::byte>(random() & 0xff);
    }
    const size_t first = layout.weight_bytes() / sizeof(float);
    for (size_t i = first; i < panel.size(); ++i) panel[i] = uniform();
    for (float& value : bias) value = uniform();
  }
  int64_t code_bytes() const { return static_cast<int64_t>(layout.weight_bytes()); }
  std::byte* bytes() { return static_cast<std::byte*>(static_cast<void*>(panel.data())); }
  float uniform() { return 0.001F + static_cast<float>(random() & 0xffff) / 65536.0F; }

  gemm::RowScales scales_of(const Rows& rows, int64_t row) const {
    if (rows.scale_width == 0) return {};
    const int64_t skipped = (row * rows.stride + layout.k) * int64_t{sizeof(float)};
    return {.first = rows.bytes() + skipped, .width = rows.scale_width};
  }

  // Bits of the biased products of `columns` columns, NaN as one value.
  std::vector<uint32_t> run(gemm::PanelFunction product, const Rows& rows, int64_t columns) {
    std::vector<float> out(static_cast<size_t>(rows.count * columns));
    product({.panel = bytes(),
             .next_panel = bytes(),
             .k = layout.k,
             .rows = rows.bytes(),
             .row_bytes = rows.stride * int64_t{sizeof(float)},
             .num_rows = rows.count,
             .bias = bias.data(),
             .out = static_cast<std::byte*>(static_cast<void*>(out.data())),
             .out_row_bytes = columns * int64_t{sizeof(float)},
             .valid_columns = columns,
             .scales = layout.scales(bytes()),
             .scale_width = layout.scale_width,
             .scale_skip = layout.scale_skip,
             .row_scales = scales_of(rows, 0)});
    std::vector<uint32_t> bits;
    for (const float value : out) bits.push_back(bits_of(value));
    return bits;
  }

  std::vector<uint32_t> reference(const Rows& rows, int64_t columns) {
    std::vector<uint32_t> bits;
    for (int64_t r = 0; r < rows.count; ++r) {
      float sums[gemm::kPanelColumns];
      gemm::reference_coded_product(layout, bytes(), rows.floats.data() + r * rows.stride,
                                    scales_of(rows, r), sums);
      for (int64_t c = 0; c < columns; ++c) {
        bits.push_back(bits_of(sums[c] + bias[static_cast<size_t>(c)]));
      }
    }
    return bits;
  }

  gemm::PanelLayout layout;
  std::vector<float> panel;
  std::vector<float> bias = std::vector<float>(static_cast<size_t>(gemm::kPanelColumns));
  std::mt19937 random;
};

TEST_P(CodedProduct, EveryCode_DecodesAsTheReference) {
  Problem problem(format().element, 16, 16, 1);
  for (int64_t i = 0; i < problem.code_bytes(); ++i) {
    problem.bytes()[i] = static_cast<std::byte>(i % 256);
  }
  // Row k takes the weights of k alone.
  Rows rows{.count = 16, .stride = 17};
  for (int64_t k = 0; k < 16; ++k) {
    for (int64_t i = 0; i < 16; ++i) rows.floats.push_back(i == k ? 1.0F : 0.0F);
    rows.floats.push_back(1.0F);
  }
  for (const int64_t width : {0, 16}) {
    rows.scale_width = width;
    EXPECT_EQ(problem.run(product(), rows, 64), problem.reference(rows, 64)) << width;
  }
}

TEST_P(CodedProduct, AnyShape_HasTheBitsOfTheReference) {
  struct Shape {
    int64_t k, scale_width, row_scale_width, rows, columns;
    int64_t scale_skip = 0;
  };
  for (const Shape& shape : {Shape{1, 1, 1, 1, 64},
                             {128, 128, 128, 8, 64},
                             {300, 128, 128, 17, 64},
                             {257, 40, 128, 5, 63},
                             {129, 129, 129, 32, 1},
                             {64, 24, 64, 3, 33},
                             {512, 512, 128, 7, 40},
                             {300, 128, 128, 17, 64, 44},
                             {3, 128, 128, 2, 64, 126},
                             {90, 32, 90, 9, 64, 31},
                             {129, 512, 128, 40, 64, 500}}) {
    Problem problem(format().element, shape.k, shape.scale_width, static_cast<uint32_t>(shape.k),
                    shape.scale_skip);
    // Few codes that stand for NaN or infinity, so that most sums are numbers.
    for (int64_t i = 0; i < problem.code_bytes() && format().codes->has_nan; ++i) {
      std::byte& code = problem.bytes()[i];
      const float value = format().codes->decode(static_cast<uint8_t>(code));
      if (!std::isfinite(value) && i % 16 != 3) code &= std::byte{0xbf};
    }
    const int64_t scales = (shape.k + shape.row_scale_width - 1) / shape.row_scale_width;
    Rows rows{.count = shape.rows, .stride = shape.k + scales};
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t k = 0; k < shape.k; ++k) {
        const auto code = static_cast<uint8_t>(problem.random() & 0xbf);
        rows.floats.push_back(format().row_codes->decode(code));
      }
      for (int64_t s = 0; s < scales; ++s) rows.floats.push_back(problem.uniform());
    }
    for (const bool plain : {true, false}) {
      rows.scale_width = plain ? 0 : shape.row_scale_width;
      EXPECT_EQ(problem.run(product(), rows, shape.columns), problem.reference(rows, shape.columns))
          << shape.k << (plain ? " plain" : "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Catalog, CodedProduct, ::testing::ValuesIn(all_cases()),
                         [](const auto& test) {
                           return std::string(test.param.function.name) + "_" +
                                  std::string(test.param.format->name);
                         });

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
  for (const Case& one : all_cases()) {
    if (one.function.isa == cpu::Isa::kAvx2 && one.format->codes->exact_in_bf16 == exact) {
      formats.push_back(one.format);
    }
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
