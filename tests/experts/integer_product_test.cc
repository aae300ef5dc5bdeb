// Products of whole numbers: every pair of codes, sums at their limit, rows on their way to codes.
#include "core/checked.h"
#include "cpu/isa.h"
#include "experts/coded_rows.h"
#include "experts/cpu/mlp_functions.h"
#include "experts/emulated_row.h"
#include "experts/product_case.h"
#include "quant/activation_rows.h"
#include "support/in_sample.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace conclave::experts {
namespace {

using testing::PlacedRows;
using testing::Problem;
using testing::Rows;

const std::vector<testing::ProductFunction> kFunctions = {
    {"amx_int8", mlp_functions_amx_int8, [] { return bool{cpu::usable(cpu::Isa::kAmx)}; }},
    {"emulated_tiles", testing::integer_functions_emulated, [] { return true; }},
    {"avx512_vnni", mlp_functions_avx512_vnni,
     [] { return bool{cpu::usable(cpu::Isa::kAvx512Vnni)}; }},
    {"avx_vnni", mlp_functions_avx_vnni,
     [] { return cpu::usable(cpu::Isa::kAvx2) && cpu::has_avx_vnni(); }},
    {"avx2_int8", mlp_functions_avx2_int8, [] { return bool{cpu::usable(cpu::Isa::kAvx2)}; }}};

quant::ActivationRule rule_of(const quant::WeightFormat& format, ActivationScale form,
                              int64_t group = quant::kActivationGroup) {
  // A type that no tensor has stands for matrices of a layer of int8.
  const bool is_of_layers = quant::find_format(format.element) != nullptr;
  return quant::activation_rule(
      is_of_layers ? format.element : DType::kI8,
      {.activations = form, .activation_group = group, .activation_dtype = DType::kI8});
}

// The rows of float32 codes that products of float32 take, as those of whole numbers take them.
class ByteRows {
 public:
  ByteRows(const Rows& rows, const gemm::PanelLayout& panels)
      : codes_(round_up(panels.k, 64)),
        scales_(rows.stride - panels.k),
        bytes_(codes_ + scales_ * 8 + panels.k * 4 + 64) {
    memory_.resize(static_cast<size_t>(bytes_ * rows.count));
    const gemm::RowScales scales{.width = rows.scale_width, .exact_k = rows.exact_k};
    for (int64_t r = 0; r < rows.count; ++r) {
      const float* const from = rows.floats.data() + r * rows.stride;
      std::byte* const row = memory_.data() + r * bytes_;
      for (int64_t k = 0; k < panels.k; ++k) {
        row[k] = static_cast<std::byte>(static_cast<int8_t>(from[k]));
      }
      std::memcpy(row + codes_, from + panels.k, static_cast<size_t>(scales_) * 4);
      std::byte* sums = row + codes_ + scales_ * 4;
      for (int64_t begin = 0; begin < panels.k; sums += 4) {
        const int64_t end = gemm::segment_end(panels.groups(), scales, begin);
        const auto sum = static_cast<int32_t>(std::accumulate(from + begin, from + end, 0.0));
        std::memcpy(sums, &sum, 4);
        begin = end;
      }
    }
    placed_ = {.rows = memory_.data(),
               .row_bytes = bytes_,
               .count = rows.count,
               .scales = {.first = memory_.data() + codes_,
                          .width = rows.scale_width,
                          .exact_k = rows.exact_k,
                          .sums_at = scales_ * 4}};
  }

  PlacedRows placed() const { return placed_; }

 private:
  int64_t codes_;
  int64_t scales_;
  int64_t bytes_;
  std::vector<std::byte> memory_;
  PlacedRows placed_;
};

class IntegerProduct : public testing::ProductTest {
 protected:
  int64_t exact_k() const { return rule_of(format(), ActivationScale::kToken).exact_columns; }
};

TEST_P(IntegerProduct, EveryPairOfCodes_HasItsProduct) {
  const int64_t codes = int64_t{1} << bit_size(format().element);
  // Row `code` + 256 k has its code at k and zeros elsewhere.
  Rows rows{.count = 4 * 256, .stride = 5, .scale_width = 4, .exact_k = exact_k()};
  for (int64_t k = 0; k < 4; ++k) {
    for (int code = -128; code < 128; ++code) {
      for (int64_t i = 0; i < 4; ++i) rows.floats.push_back(i == k ? static_cast<float>(code) : 0);
      rows.floats.push_back(1.0F);
    }
  }
  for (int64_t first = 0; first < codes; first += 64) {
    Problem problem(format().element, 4, 4, 1);
    problem.set_all_codes([&](int64_t, int64_t column) { return first + column; });
    const ByteRows bytes(rows, problem.layout);
    EXPECT_EQ(problem.run(product(), bytes.placed(), 64), problem.reference(rows, 64)) << first;
    // Few rows go another way.
    for (int64_t row = 0; row < rows.count; row += 4) {
      Rows few = rows;
      few.count = 4;
      few.floats.assign(rows.floats.begin() + row * rows.stride,
                        rows.floats.begin() + (row + 4) * rows.stride);
      const ByteRows few_bytes(few, problem.layout);
      ASSERT_EQ(problem.run(product(), few_bytes.placed(), 64), problem.reference(few, 64)) << row;
    }
  }
}

TEST_P(IntegerProduct, AnyShape_HasTheBitsOfTheReference) {
  struct Shape {
    int64_t k, scale_width, row_scale_width;
    int64_t scale_skip = 0;
  };
  size_t place = 0;
  for (const Shape& shape :
       {Shape{1, 1, 1}, Shape{2, 1, 2}, Shape{3, 128, 128, 126}, Shape{90, 32, 90, 31},
        Shape{128, 128, 128}, Shape{300, 128, 128}, Shape{257, 40, 128}, Shape{129, 129, 32},
        Shape{64, 24, 64}, Shape{300, 128, 128, 44}, Shape{70, 1, 3}, Shape{1023, 1023, 1023},
        Shape{1030, 1030, 1030}, Shape{2051, 512, 2051, 500}}) {
    for (const int64_t count : {1, 2, 3, 5, 6, 7, 12, 15, 16, 17, 33, 96, 97}) {
      if (!testing::in_sample(place++, 5)) continue;
      for (const int64_t columns : {int64_t{64}, count % 64}) {
        Problem problem({.dtype = format().element,
                         .k = shape.k,
                         .scale_width = shape.scale_width,
                         .scale_skip = shape.scale_skip,
                         .has_offsets = place % 2 != 0},
                        static_cast<uint32_t>(shape.k));
        Rows rows = testing::random_rows(problem, count, shape.row_scale_width, [&] {
          return static_cast<float>(static_cast<int8_t>(problem.random()));
        });
        rows.exact_k = exact_k();
        const ByteRows bytes(rows, problem.layout);
        const auto wanted = problem.reference(rows, columns);
        ASSERT_EQ(problem.run(product(), bytes.placed(), columns), wanted)
            << shape.k << " " << count;
        // The same by an index, backwards.
        std::vector<int64_t> index(static_cast<size_t>(count));
        std::iota(index.rbegin(), index.rend(), int64_t{0});
        PlacedRows placed = bytes.placed();
        placed.index = index.data();
        const auto found = problem.run(product(), placed, columns);
        for (int64_t r = 0; r < count; ++r) {
          const auto row = [&](const std::vector<uint32_t>& bits, int64_t at) {
            return std::vector<uint32_t>(bits.begin() + at * columns,
                                         bits.begin() + (at + 1) * columns);
          };
          ASSERT_EQ(row(found, r), row(wanted, count - 1 - r)) << shape.k << " " << r;
        }
      }
    }
  }
}

// -128 x -128 as often as no int32 could hold: segments end before.
TEST_P(IntegerProduct, LargestSums_AreExact) {
  const int64_t k = 131072;
  float outermost = 0;
  uint8_t code_of_outermost = 0;
  for (int code = 0; code < 1 << bit_size(format().element); ++code) {
    const float value = format().codes->decode(static_cast<uint8_t>(code));
    if (std::abs(value) <= std::abs(outermost)) continue;
    outermost = value;
    code_of_outermost = static_cast<uint8_t>(code);
  }
  const bool halves = bit_size(format().element) == 4;
  Problem problem(format().element, k, k, 1);
  for (int64_t i = 0; i < problem.code_bytes(); ++i) {
    problem.bytes()[i] =
        static_cast<std::byte>(halves ? code_of_outermost * 17 : code_of_outermost);
  }
  std::fill_n(problem.panel.end() - 64, 64, 1.0F);
  std::ranges::fill(problem.bias, 0.0F);
  auto place = static_cast<size_t>(format().element);
  for (const int64_t count : {1, 6, 7}) {
    if (!testing::in_sample(place++, 3)) continue;
    Rows rows{.count = count, .stride = k + 1, .scale_width = k, .exact_k = exact_k()};
    for (int64_t r = 0; r < count; ++r) {
      rows.floats.insert(rows.floats.end(), static_cast<size_t>(k), -128.0F);
      rows.floats.push_back(1.0F);
    }
    const ByteRows bytes(rows, problem.layout);
    const auto found = problem.run(product(), bytes.placed(), 64);
    EXPECT_EQ(found, problem.reference(rows, 64));
    // A power of two times an odd number below 16: float32 holds it.
    const float wanted = -128.0F * outermost * static_cast<float>(k);
    EXPECT_EQ(found, std::vector<uint32_t>(found.size(), testing::bits_of(wanted)));
  }
}

// The rule gives the rows of float32 and those of bytes the same codes, scales and sums.
TEST_P(IntegerProduct, CodedRows_HaveTheCodesOfTheRule) {
  const float kInfinity = std::numeric_limits<float>::infinity();
  const gemm::CodeRowFunction code_row = functions().code_row;
  for (const int64_t columns : {1, 3, 4, 31, 64, 65, 130, 768, 2049}) {
    for (quant::ActivationRule rule :
         {rule_of(format(), ActivationScale::kTensorStatic),
          rule_of(format(), ActivationScale::kToken), rule_of(format(), ActivationScale::kGroup),
          rule_of(format(), ActivationScale::kGroup, 32),
          rule_of(format(), ActivationScale::kGroup, 7)}) {
      const bool is_static = rule.form == ActivationScale::kTensorStatic;
      for (const float special : {0.5F, 1e30F, 1e-40F, NAN, kInfinity, -kInfinity}) {
        rule.power_of_two_scales = !is_static && columns % 2 != 0;
        Problem problem(format().element, columns, 24, static_cast<uint32_t>(columns), 5);
        std::vector<float> values;
        for (int64_t i = 0; i < columns; ++i) values.push_back(problem.uniform() - 0.5F);
        values[static_cast<size_t>(columns / 2)] = special;
        rule.static_scale = 0.003F;

        std::vector<uint8_t> codes(values.size());
        std::vector<float> scales(static_cast<size_t>(quant::scales_per_row(rule, columns)));
        quant::quantize_activations(values.data(), columns, rule, codes.data(), scales.data());

        // In place of its values, with what was there before behind it.
        const int64_t value_bytes = round_up(columns, 64) * 4;
        const CodedRows rows({.rule = rule,
                              .value_bytes = value_bytes,
                              .panels = problem.layout,
                              .code_row = code_row});
        std::vector<std::byte> row(static_cast<size_t>(rows.row_bytes()), std::byte{0xff});
        std::memcpy(row.data(), values.data(), values.size() * sizeof(float));
        const auto* const in_place =
            static_cast<const float*>(static_cast<const void*>(row.data()));
        rows.prepare(nullptr, rule.static_scale, in_place, row.data());

        SCOPED_TRACE(::testing::Message() << columns << " " << special);
        ASSERT_EQ(std::memcmp(row.data(), codes.data(), codes.size()), 0);
        for (int64_t i = columns; i < round_up(columns, 64); ++i) {
          ASSERT_EQ(row[static_cast<size_t>(i)], std::byte{0}) << i;
        }
        const gemm::RowScales placed = rows.scales(row.data());
        for (size_t i = 0; i < scales.size(); ++i) {
          ASSERT_EQ(testing::bits_of(placed.of_row(0, 0)[i]), testing::bits_of(scales[i])) << i;
        }
        const std::byte* sums = placed.first + placed.sums_at;
        for (int64_t begin = 0; begin < columns; sums += 4) {
          const int64_t end = gemm::segment_end(problem.layout.groups(), placed, begin);
          int32_t wanted = 0;
          for (int64_t i = begin; i < end; ++i) {
            wanted += static_cast<int8_t>(codes[static_cast<size_t>(i)]);
          }
          int32_t found = 0;
          std::memcpy(&found, sums, sizeof(found));
          ASSERT_EQ(found, wanted) << begin;
          begin = end;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Catalog, IntegerProduct,
    ::testing::ValuesIn(testing::product_cases(
        kFunctions, [](const quant::WeightFormat& format) { return format.codes->whole.fit; })),
    testing::product_case_name);

}  // namespace
}  // namespace conclave::experts
