// Products of e4m3 panels: for every code, each function must give the bits of the reference.
#include "core/float8.h"
#include "cpu/isa.h"
#include "experts/cpu/e4m3_mlp.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace conclave::experts {
namespace {

struct Function {
  const char* name;
  E4m3PanelFunction product;
  cpu::Isa isa;
};
const std::vector<Function> kFunctions = {{"avx2", e4m3_product_avx2, cpu::Isa::kAvx2},
                                          {"avx512", e4m3_product_avx512, cpu::Isa::kAvx512}};

class E4m3Product : public ::testing::TestWithParam<Function> {
 protected:
  void SetUp() override {
    if (cpu::best_isa() < GetParam().isa) GTEST_SKIP() << "this CPU lacks " << GetParam().name;
  }
};

// A panel of the given codes, column by column, with scales that are not powers of two.
struct Problem {
  Problem(int64_t cols, int64_t group_width, uint32_t seed)
      : layout{.cols = cols, .group_width = group_width},
        panel(layout.bytes() / sizeof(float)),
        random(seed) {
    for (int64_t i = 0; i < cols * kE4m3PanelRows; ++i) {
      bytes()[i] = static_cast<std::byte>(random() & 0xff);
    }
    const size_t first = layout.code_bytes() / sizeof(float);
    for (size_t i = first; i < panel.size(); ++i) panel[i] = uniform();
  }
  std::byte* bytes() { return static_cast<std::byte*>(static_cast<void*>(panel.data())); }
  float uniform() { return 0.001F + static_cast<float>(random() & 0xffff) / 65536.0F; }

  // Returns the bits of the products, with all NaNs as one value.
  std::vector<uint32_t> run(E4m3PanelFunction product, const std::vector<float>& rows,
                            int64_t num_rows, int64_t stride, bool plain, int64_t width) {
    std::vector<float> out(static_cast<size_t>(num_rows * kE4m3PanelRows));
    E4m3PanelTask task{.layout = layout,
                       .values = rows.data(),
                       .scales = plain ? nullptr : rows.data() + layout.cols,
                       .scale_width = width,
                       .stride = stride,
                       .num_rows = num_rows,
                       .out = out.data()};
    set_panel(bytes(), task);
    product(task);
    std::vector<uint32_t> bits;
    for (const float value : out) {
      bits.push_back(std::isnan(value) ? 0x7fc00000U : std::bit_cast<uint32_t>(value));
    }
    return bits;
  }

  E4m3PanelLayout layout;
  std::vector<float> panel;
  std::mt19937 random;
};

TEST_P(E4m3Product, EveryCode_DecodesAsTheReference) {
  Problem problem(16, 16, 1);
  for (int64_t i = 0; i < 16 * kE4m3PanelRows; ++i) {
    problem.bytes()[i] = static_cast<std::byte>(i % 256);
  }
  // Column k is tested alone: row k of the activations is a unit vector.
  std::vector<float> rows;
  for (int64_t k = 0; k < 16; ++k) {
    for (int64_t i = 0; i < 16; ++i) rows.push_back(i == k ? 1.0F : 0.0F);
    rows.push_back(1.0F);
  }
  for (const bool plain : {true, false}) {
    EXPECT_EQ(problem.run(GetParam().product, rows, 16, 17, plain, 16),
              problem.run(reference_e4m3_product, rows, 16, 17, plain, 16));
  }
}

TEST_P(E4m3Product, AnyShape_HasTheBitsOfTheReference) {
  struct Shape {
    int64_t cols, group_width, width, rows;
  };
  for (const Shape& shape : {Shape{1, 1, 1, 1},
                             {128, 128, 128, 8},
                             {300, 128, 128, 17},
                             {257, 40, 128, 5},
                             {129, 129, 129, 32},
                             {64, 24, 64, 3}}) {
    Problem problem(shape.cols, shape.group_width, static_cast<uint32_t>(shape.cols));
    // Few codes are NaN, so that most sums are numbers.
    for (int64_t i = 0; i < shape.cols * kE4m3PanelRows; ++i) {
      std::byte& code = problem.bytes()[i];
      if ((code & std::byte{0x7f}) == std::byte{0x7f} && i % 16 != 3) code &= std::byte{0xbf};
    }
    const int64_t steps = (shape.cols + shape.width - 1) / shape.width;
    const int64_t stride = shape.cols + steps;
    std::vector<float> rows;
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t k = 0; k < shape.cols; ++k) {
        const auto code = static_cast<uint8_t>(problem.random() & 0xbf);
        rows.push_back(e4m3_to_float(code));
      }
      for (int64_t s = 0; s < steps; ++s) rows.push_back(problem.uniform());
    }
    for (const bool plain : {true, false}) {
      EXPECT_EQ(problem.run(GetParam().product, rows, shape.rows, stride, plain, shape.width),
                problem.run(reference_e4m3_product, rows, shape.rows, stride, plain, shape.width))
          << shape.cols << (plain ? " plain" : "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, E4m3Product, ::testing::ValuesIn(kFunctions),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace conclave::experts
