// Products of panels of codes: every code, every function with the bits of the reference.
#include "core/weight_types.h"
#include "cpu/isa.h"
#include "experts/cpu/mlp_functions.h"
#include "experts/product_case.h"
#include "gemm/reference_product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave::experts {
namespace {

using testing::Problem;
using testing::Rows;

const std::vector<testing::ProductFunction> kFunctions = {
    {"avx2", mlp_functions_avx2, [] { return cpu::best_isa() >= cpu::Isa::kAvx2; }},
    {"avx512", mlp_functions_avx512, [] { return cpu::best_isa() >= cpu::Isa::kAvx512; }}};

class CodedProduct : public testing::ProductTest {};

// Few codes that stand for NaN or infinity, so that most sums are numbers.
void spare_numbers(Problem& problem, const quant::WeightFormat& format) {
  for (int64_t i = 0; i < problem.code_bytes() && format.codes->has_nan; ++i) {
    std::byte& code = problem.bytes()[i];
    const float value = format.codes->decode(static_cast<uint8_t>(code));
    if (!std::isfinite(value) && i % 16 != 3) code &= std::byte{0xbf};
  }
}

TEST_P(CodedProduct, EveryCode_DecodesAsTheReference) {
  Problem problem(format().element, 16, 16, 1);
  problem.set_all_codes([](int64_t k, int64_t column) { return 65 * k + column; });
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
    spare_numbers(problem, format());
    Rows rows = testing::random_rows(problem, shape.rows, shape.row_scale_width, [&] {
      return format().row_codes->decode(static_cast<uint8_t>(problem.random() & 0xbf));
    });
    for (const bool plain : {true, false}) {
      rows.scale_width = plain ? 0 : shape.row_scale_width;
      EXPECT_EQ(problem.run(product(), rows, shape.columns), problem.reference(rows, shape.columns))
          << shape.k << (plain ? " plain" : "");
    }
  }
}

// Numbers of rows on both sides of those that decode for themselves; groups that a strip cuts.
TEST_P(CodedProduct, OffsetsAndOrders_HaveTheBitsOfTheReference) {
  struct Shape {
    int64_t k, scale_width, rows, columns, scale_skip = 0;
  };
  for (const Shape& shape : {Shape{1, 1, 1, 64},
                             {3, 128, 2, 64, 126},
                             {90, 32, 4, 64, 31},
                             {129, 24, 3, 33},
                             {257, 40, 5, 63},
                             {300, 128, 17, 64, 44},
                             {130, 130, 100, 64}}) {
    for (const bool has_offsets : {true, false}) {
      for (const int64_t groups : {int64_t{0}, shape.k / shape.scale_width + 3}) {
        SCOPED_TRACE(::testing::Message() << "k " << shape.k << " offsets " << has_offsets
                                          << " ordered groups " << groups);
        Problem problem({.dtype = format().element,
                         .k = shape.k,
                         .scale_width = shape.scale_width,
                         .scale_skip = shape.scale_skip,
                         .has_offsets = has_offsets,
                         .ordered_groups = groups},
                        static_cast<uint32_t>(shape.k));
        spare_numbers(problem, format());
        Rows rows{.count = shape.rows, .stride = shape.k};
        for (int64_t i = 0; i < shape.rows * shape.k; ++i) {
          rows.floats.push_back(problem.uniform() - 0.5F);
        }
        EXPECT_EQ(problem.run(product(), rows, shape.columns),
                  problem.reference(rows, shape.columns));
      }
    }
  }
}

// The reference itself: w = code * scale - offset, with the scale that the order names.
TEST_P(CodedProduct, Reference_MultipliesWithWhatCodesMean) {
  Problem problem({.dtype = format().element,
                   .k = 50,
                   .scale_width = 16,
                   .has_offsets = true,
                   .ordered_groups = 4},
                  7);
  for (int64_t i = 0; i < problem.code_bytes() && format().codes->has_nan; ++i) {
    const float code = format().codes->decode(static_cast<uint8_t>(problem.bytes()[i]));
    if (!std::isfinite(code)) problem.bytes()[i] = std::byte{0};
  }
  std::vector<float> x;
  for (int64_t k = 0; k < 50; ++k) x.push_back(problem.uniform() - 0.5F);
  float sums[gemm::kPanelColumns];
  gemm::reference_coded_product(problem.layout, problem.bytes(), x.data(), {}, problem.order(),
                                sums);
  const float* scales = problem.layout.scales(problem.bytes());
  const float* offsets = problem.layout.offsets(problem.bytes());
  for (int64_t c = 0; c < gemm::kPanelColumns; ++c) {
    double sum = 0;
    double size = 0;
    for (int64_t k = 0; k < 50; ++k) {
      const int64_t at = problem.tables[c < 32 ? 0 : 1][static_cast<size_t>(k)] * 64 + c;
      const double code = gemm::panel_value(problem.layout, problem.bytes(), k, c);
      const double scaled = code * double{scales[at]};
      sum += double{x[static_cast<size_t>(k)]} * (scaled - double{offsets[at]});
      size += std::abs(x[static_cast<size_t>(k)]) * (std::abs(scaled) + double{offsets[at]});
    }
    // 50 fused steps, each rounded once, of weights rounded once.
    EXPECT_NEAR(sums[c], sum, 51 * 0x1p-24 * size) << "column " << c;
  }
}

INSTANTIATE_TEST_SUITE_P(Catalog, CodedProduct,
                         ::testing::ValuesIn(testing::product_cases(
                             kFunctions, [](const quant::WeightFormat&) { return true; })),
                         testing::product_case_name);

}  // namespace
}  // namespace conclave::experts
