// Products of panels of codes with rows of bf16: dot products of pairs, and tiles, emulated.
#include "core/float_convert.h"
#include "cpu/isa.h"
#include "experts/coded_problem.h"
#include "experts/cpu/mlp_functions.h"
#include "experts/emulated_row.h"
#include "quant/weight_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave::experts {
namespace {

using testing::bits_of;
using testing::Problem;

// How rows lie in memory: one after the other, or 16 interleaved by 32 values.
enum class Order { kRows, kGroups };

using Make = MlpFunctions (*)(DType weights, const activation::Activation& activation,
                              DType activated) noexcept;
struct Case {
  const char* name;
  Order order;
  Make make;
  cpu::Isa isa;  // that the CPU must have
  const quant::WeightFormat* format;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto catalog = quant::panel_catalog();
  for (const quant::WeightFormat& format : catalog.rows()) {
    if (format.codes == nullptr) continue;
    cases.push_back(
        {"pairs", Order::kRows, mlp_functions_avx512_bf16, cpu::Isa::kAvx512Bf16, &format});
    cases.push_back({"tiles", Order::kGroups, mlp_functions_amx, cpu::Isa::kAmx, &format});
    cases.push_back({"emulated_tiles", Order::kGroups, testing::mlp_functions_emulated,
                     cpu::Isa::kScalar, &format});
  }
  return cases;
}

// Plain rows of bf16, padded with zeros.
struct PairedRows {
  PairedRows(int64_t rows, int64_t k)
      : count(rows), stride((k + 31) / 32 * 32), bits(static_cast<size_t>(rows * stride)) {}
  PairedRows(int64_t rows, int64_t k, std::mt19937& random) : PairedRows(rows, k) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < k; ++i) {
        set(r, i, static_cast<float>(random() & 0xffff) / 32768.0F - 1.0F);
      }
    }
  }
  void set(int64_t row, int64_t k, float value) {
    bits[static_cast<size_t>(row * stride + k)] = float_to_bf16(value);
  }
  float at(int64_t row, int64_t k) const {
    return bf16_to_float(bits[static_cast<size_t>(row * stride + k)]);
  }
  // Rows [first, first + number) as `order` has them.
  std::vector<uint16_t> arranged(Order order, int64_t first, int64_t number) const {
    const auto begin = bits.begin() + first * stride;
    std::vector<uint16_t> rows(begin, begin + number * stride);
    if (order == Order::kRows) return rows;
    std::vector<uint16_t> groups(static_cast<size_t>((number + 15) / 16 * 16 * stride));
    for (int64_t r = 0; r < number; ++r) {
      for (int64_t k = 0; k < stride; ++k) {
        const int64_t at = r / 16 * 16 * stride + k / 32 * 512 + r % 16 * 32 + k % 32;
        groups[static_cast<size_t>(at)] = rows[static_cast<size_t>(r * stride + k)];
      }
    }
    return groups;
  }

  int64_t count;
  int64_t stride;
  std::vector<uint16_t> bits;
};

class PairedProduct : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const cpu::Isa isa = GetParam().isa;
    if (!cpu::usable(isa) || (isa != cpu::Isa::kScalar && !cpu::permutes_bytes())) {
      GTEST_SKIP() << "this CPU lacks " << cpu::to_string(isa) << " or avx512_vbmi";
    }
  }
  const quant::WeightFormat& format() const { return *GetParam().format; }

  // The biased products of rows [first, first + count).
  std::vector<float> run(Problem& problem, const PairedRows& rows, int64_t first,
                         int64_t count) const {
    const gemm::PanelFunction product = GetParam().make(format().element, {}, DType::kBF16).product;
    const std::vector<uint16_t> arranged = rows.arranged(GetParam().order, first, count);
    std::vector<float> out(static_cast<size_t>(count * gemm::kPanelColumns));
    product({.panel = problem.bytes(),
             .next_panel = problem.bytes(),
             .k = problem.layout.k,
             .rows = static_cast<const std::byte*>(static_cast<const void*>(arranged.data())),
             .row_bytes = rows.stride * int64_t{sizeof(uint16_t)},
             .num_rows = count,
             .bias = problem.bias.data(),
             .out = static_cast<std::byte*>(static_cast<void*>(out.data())),
             .out_row_bytes = gemm::kPanelColumns * int64_t{sizeof(float)},
             .valid_columns = gemm::kPanelColumns,
             .scales = {.floats = problem.layout.scales(problem.bytes())},
             .offsets = {.floats = problem.layout.offsets(problem.bytes())},
             .scale_width = problem.layout.scale_width,
             .scale_skip = problem.layout.scale_skip});
    return out;
  }
  // The terms of a code may leave this much of it.
  double relative_rest() const { return format().codes->exact_in_bf16 ? 0.0 : 0x1p-17; }
};

// Every code but those of NaN and infinity.
void keep_numbers(Problem& problem, const quant::WeightFormat& format) {
  if (!format.codes->has_nan) return;
  for (int64_t i = 0; i < problem.code_bytes(); ++i) {
    std::byte& code = problem.bytes()[i];
    if (!std::isfinite(format.codes->decode(static_cast<uint8_t>(code)))) code &= std::byte{0xbf};
  }
}

// Each row takes the weights of one k: nothing is added, and nothing rounds.
TEST_P(PairedProduct, EveryCode_HasItsValue) {
  constexpr int64_t kK = 16;
  Problem problem({.dtype = format().element, .k = kK, .scale_width = kK}, 1);
  for (int64_t i = 0; i < problem.code_bytes(); ++i) {
    problem.bytes()[i] = static_cast<std::byte>(i % 256);
  }
  keep_numbers(problem, format());
  problem.bias.assign(problem.bias.size(), 0.0F);
  PairedRows rows(kK, kK);
  for (int64_t k = 0; k < kK; ++k) rows.set(k, k, 1.0F);
  const float* scales = problem.layout.scales(problem.bytes());
  const std::vector<float> all = run(problem, rows, 0, kK);
  for (int64_t k = 0; k < kK; ++k) {
    const std::vector<float> alone = run(problem, rows, k, 1);
    for (int64_t c = 0; c < gemm::kPanelColumns; ++c) {
      const float value = gemm::panel_value(problem.layout, problem.bytes(), k, c) * scales[c];
      const double bound = relative_rest() * std::abs(value);
      EXPECT_NEAR(alone[static_cast<size_t>(c)], value, bound) << "k " << k << " column " << c;
      EXPECT_NEAR(all[static_cast<size_t>(k * gemm::kPanelColumns + c)], value, bound)
          << "k " << k << " column " << c;
    }
  }
}

TEST_P(PairedProduct, NotFiniteCode_ReachesItsColumnOnly) {
  if (!format().codes->has_nan) return;
  for (const int code : {0x7f, 0xff, 0x7c, 0xfc}) {
    const float value = format().codes->decode(static_cast<uint8_t>(code));
    if (std::isfinite(value)) continue;
    Problem problem(format().element, 40, 40, 3);
    keep_numbers(problem, format());
    problem.bytes()[31 * 64 + 17] = static_cast<std::byte>(code);
    for (const int64_t count : {1, 9}) {
      const PairedRows rows(count, 40, problem.random);
      const std::vector<float> out = run(problem, rows, 0, count);
      for (int64_t i = 0; i < count * gemm::kPanelColumns; ++i) {
        const float sum = out[static_cast<size_t>(i)];
        EXPECT_EQ(std::isfinite(sum), i % gemm::kPanelColumns != 17) << code << " at " << i;
        if (!std::isfinite(sum)) {
          EXPECT_GE(std::isnan(sum), std::isnan(value)) << code;
        }
      }
    }
  }
}

struct Shape {
  int64_t k, scale_width, rows;
  int64_t scale_skip = 0;
};
// Numbers of rows around those that decode for themselves, a tile, a strip's share and a group;
// scales that end between the two of a pair, within a strip, after several; slices.
const std::vector<Shape> kShapes = {
    {1, 1, 1},           {128, 128, 8},    {300, 128, 17},     {257, 40, 5},     {129, 129, 32},
    {64, 24, 3},         {512, 512, 7},    {96, 6, 100},       {33, 1, 2},       {95, 3, 13},
    {700, 16, 6},        {511, 32, 4},     {300, 128, 17, 44}, {3, 128, 2, 126}, {90, 32, 9, 31},
    {129, 512, 40, 500}, {290, 64, 96, 1}, {259, 16, 97, 13},  {64, 32, 0}};

TEST_P(PairedProduct, AnyShape_IsExactButForSums) {
  for (const Shape& shape : kShapes) {
    for (const bool has_offsets : {false, true}) {
      Problem problem({.dtype = format().element,
                       .k = shape.k,
                       .scale_width = shape.scale_width,
                       .scale_skip = shape.scale_skip,
                       .has_offsets = has_offsets},
                      static_cast<uint32_t>(shape.k));
      keep_numbers(problem, format());
      const PairedRows rows(shape.rows, shape.k, problem.random);
      const std::vector<float> out = run(problem, rows, 0, shape.rows);
      const float* scales = problem.layout.scales(problem.bytes());
      const float* offsets = problem.layout.offsets(problem.bytes());
      for (int64_t i = 0; i < shape.rows * gemm::kPanelColumns; ++i) {
        const int64_t c = i % gemm::kPanelColumns;
        double sum = problem.bias[static_cast<size_t>(c)];
        double size = std::abs(sum);
        for (int64_t k = 0; k < shape.k; ++k) {
          const int64_t at = problem.layout.group_of(k) * gemm::kPanelColumns + c;
          const double x = rows.at(i / gemm::kPanelColumns, k);
          const double code = gemm::panel_value(problem.layout, problem.bytes(), k, c);
          const double offset = has_offsets ? double{offsets[at]} : 0.0;
          sum += x * (code * double{scales[at]} - offset);
          size += std::abs(x) * (std::abs(code * double{scales[at]}) + offset);
        }
        EXPECT_NEAR(out[static_cast<size_t>(i)], sum, (1e-6 + relative_rest()) * size)
            << "k " << shape.k << " width " << shape.scale_width << " offsets " << has_offsets
            << " at " << i;
      }
    }
  }
}

// Rows of codes, as they lie in memory: values, padded with zeros, then scales of `width` k each.
// There is memory for one more, so that none have a place too.
struct RowsOfCodes {
  RowsOfCodes(int64_t count, int64_t k, int64_t width, std::mt19937& random)
      : values_bytes((k + 31) / 32 * 64),
        stride((values_bytes + (k + width - 1) / width * 4 + 63) / 64 * 64),
        bytes(static_cast<size_t>((count + 1) * stride / 4)),
        form{.first = begin() + values_bytes, .width = width} {
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < k; ++i) {
        const float code = static_cast<float>(static_cast<int>(random() % 31) - 15) * 0.125F;
        const uint16_t bits = float_to_bf16(code);
        std::memcpy(begin() + r * stride + 2 * i, &bits, sizeof(bits));
      }
      for (int64_t i = 0; i < k; i += width) {
        const float scale = 0.5F + static_cast<float>(random() & 0xff) / 64.0F;
        std::memcpy(begin() + r * stride + values_bytes + i / width * 4, &scale, sizeof(scale));
      }
    }
  }
  std::byte* begin() { return static_cast<std::byte*>(static_cast<void*>(bytes.data())); }
  double at(int64_t row, int64_t i) const {
    uint16_t bits;
    std::memcpy(&bits, form.first - values_bytes + row * stride + 2 * i, sizeof(bits));
    return double{bf16_to_float(bits)} * double{form.of_row(row, stride)[i / form.width]};
  }

  int64_t values_bytes;
  int64_t stride;
  std::vector<float> bytes;
  gemm::RowScales form;
};

std::vector<float> multiply(const Case& what, Problem& problem, RowsOfCodes& rows,
                            const std::vector<int64_t>& index, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count * gemm::kPanelColumns));
  what.make(what.format->element, {}, DType::kF32)
      .product({.panel = problem.bytes(),
                .next_panel = problem.bytes(),
                .k = problem.layout.k,
                .rows = rows.begin(),
                .row_index = index.empty() ? nullptr : index.data(),
                .row_bytes = rows.stride,
                .num_rows = count,
                .bias = problem.bias.data(),
                .out = static_cast<std::byte*>(static_cast<void*>(out.data())),
                .out_row_bytes = gemm::kPanelColumns * int64_t{sizeof(float)},
                .valid_columns = gemm::kPanelColumns,
                .scales = {.floats = problem.layout.scales(problem.bytes())},
                .scale_width = problem.layout.scale_width,
                .scale_skip = problem.layout.scale_skip,
                .row_scales = rows.form});
  return out;
}

// Scales of rows that end where those of weights do, within them, and after several.
TEST_P(PairedProduct, RowsOfCodes_AreExactButForSums) {
  for (const Shape& shape : kShapes) {
    for (const int64_t width : {shape.k, int64_t{16}}) {
      Problem problem({.dtype = format().element,
                       .k = shape.k,
                       .scale_width = shape.scale_width,
                       .scale_skip = shape.scale_skip},
                      static_cast<uint32_t>(shape.k));
      keep_numbers(problem, format());
      RowsOfCodes rows(shape.rows, shape.k, width, problem.random);
      std::vector<int64_t> backwards(static_cast<size_t>(shape.rows));
      for (int64_t r = 0; r < shape.rows; ++r) {
        backwards[static_cast<size_t>(r)] = shape.rows - 1 - r;
      }
      const std::vector<float> out = multiply(GetParam(), problem, rows, {}, shape.rows);
      const std::vector<float> back = multiply(GetParam(), problem, rows, backwards, shape.rows);
      const float* scales = problem.layout.scales(problem.bytes());
      for (int64_t i = 0; i < shape.rows * gemm::kPanelColumns; ++i) {
        const int64_t c = i % gemm::kPanelColumns;
        const int64_t row = i / gemm::kPanelColumns;
        double sum = problem.bias[static_cast<size_t>(c)];
        double size = std::abs(sum);
        for (int64_t k = 0; k < shape.k; ++k) {
          const int64_t at = problem.layout.group_of(k) * gemm::kPanelColumns + c;
          const double code = gemm::panel_value(problem.layout, problem.bytes(), k, c);
          const double term = rows.at(row, k) * code * double{scales[at]};
          sum += term;
          size += std::abs(term);
        }
        ASSERT_NEAR(out[static_cast<size_t>(i)], sum, (1e-6 + relative_rest()) * size)
            << "k " << shape.k << " width " << shape.scale_width << " of rows " << width << " at "
            << i;
        const int64_t mirrored = (shape.rows - 1 - row) * gemm::kPanelColumns + c;
        ASSERT_EQ(bits_of(out[static_cast<size_t>(i)]),
                  bits_of(back[static_cast<size_t>(mirrored)]))
            << "k " << shape.k << " at " << i;
      }
      if (shape.rows == 0) continue;
      const std::vector<float> alone = multiply(GetParam(), problem, rows, {}, 1);
      for (size_t c = 0; c < alone.size(); ++c) EXPECT_EQ(bits_of(alone[c]), bits_of(out[c]));
    }
  }
}

TEST_P(PairedProduct, RowAmongOthers_HasTheBitsOfARowAlone) {
  for (const int64_t width : {300, 128, 16, 15}) {
    for (const bool has_offsets : {false, true}) {
      if (has_offsets && width != 16) continue;
      Problem problem({.dtype = format().element,
                       .k = 300,
                       .scale_width = width,
                       .scale_skip = width / 2,
                       .has_offsets = has_offsets},
                      5);
      keep_numbers(problem, format());
      const PairedRows rows(97, 300, problem.random);
      for (const int64_t count : {2, 3, 4, 5, 6, 7, 12, 33, 97}) {
        const std::vector<float> all = run(problem, rows, 0, count);
        for (int64_t r = 0; r<count; r += count> 12 ? 5 : 1) {
          const std::vector<float> alone = run(problem, rows, r, 1);
          for (size_t c = 0; c < alone.size(); ++c) {
            ASSERT_EQ(bits_of(alone[c]),
                      bits_of(all[static_cast<size_t>(r * gemm::kPanelColumns) + c]))
                << "width " << width << " rows " << count << " row " << r << " column " << c;
          }
        }
      }
    }
  }
}

// Values that are subnormal, or make such sums, and values that are not finite: in a piece, and in
// the rest of a tile that it shares.
TEST_P(PairedProduct, ExtremeRowAmongOthers_HasTheBitsOfARowAlone) {
  constexpr int64_t kK = 130;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int64_t width : {130, 48, 15}) {
    Problem problem({.dtype = format().element, .k = kK, .scale_width = width}, 9);
    keep_numbers(problem, format());
    problem.bias.assign(problem.bias.size(), 0.0F);  // nothing hides small sums
    PairedRows rows(20, kK, problem.random);
    for (int64_t k = 0; k < kK; ++k) {
      rows.set(0, k, rows.at(0, k) * 0x1p-126F);
      rows.set(1, k, rows.at(1, k) * 0x1p-133F);
      rows.set(2, k, k % 3 == 0 ? 0x1p-127F : rows.at(2, k) * 0x1p-122F);
    }
    rows.set(3, 50, kInfinity);
    rows.set(4, 31, -kInfinity);
    rows.set(5, 64, std::numeric_limits<float>::quiet_NaN());
    rows.set(6, 129, 0x1p127F);
    const std::vector<float> all = run(problem, rows, 0, 20);
    for (int64_t r = 0; r < 8; ++r) {
      const std::vector<float> alone = run(problem, rows, r, 1);
      for (size_t c = 0; c < alone.size(); ++c) {
        const float among = all[static_cast<size_t>(r * gemm::kPanelColumns) + c];
        if (std::isnan(among) && std::isnan(alone[c])) continue;
        ASSERT_EQ(bits_of(alone[c]), bits_of(among))
            << "width " << width << " row " << r << " column " << c << ": " << alone[c] << " and "
            << among;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Catalog, PairedProduct, ::testing::ValuesIn(all_cases()),
                         [](const auto& test) {
                           return std::string(test.param.name) + "_" +
                                  std::string(test.param.format->name);
                         });

}  // namespace
}  // namespace conclave::experts
