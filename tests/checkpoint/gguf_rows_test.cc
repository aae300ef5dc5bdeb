// Rows of GGUF blocks as codes with scales and offsets, against the values that gguf-py gives them.
#include "checkpoint/gguf/row_reader.h"
#include "core/quant_spec.h"
#include "gemm/panel_scales.h"
#include "io/gguf/types.h"
#include "quant/gguf/block_type.h"
#include "quant/number_steps.h"
#include "quant/weight_format.h"
#include "support/gguf_blocks.h"

#include "conclave/gguf.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace conclave::checkpoint {
namespace {

std::vector<float> floats_of(RowReader& rows, const std::byte* row, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  rows.read(row, 0, count, static_cast<std::byte*>(static_cast<void*>(values.data())));
  return values;
}

// A type, and what its codes become.
class GgufRows : public ::testing::TestWithParam<std::tuple<std::string, DType>> {
 protected:
  void SetUp() override {
    const bool fits = codes() == DType::kI4   ? fits_4_bits(type())
                      : codes() == DType::kU4 ? fits_4_bits(type()) && type().least >= 0
                      : codes() == DType::kI8 ? true
                                              : codes() == type().element;
    if (!fits) GTEST_SKIP() << "has other codes";
  }
  const quant::BlockType& type() const { return *quant::find_block_type(std::get<0>(GetParam())); }
  DType codes() const { return std::get<1>(GetParam()); }
};

// Two blocks are a row. Codes are those of a layer, of any part of the row.
TEST_P(GgufRows, CodesScalesAndOffsets_StandForTheValues) {
  const Tensor blocks = testing::gguf_blocks().load(std::get<0>(GetParam()));
  const Tensor values = testing::gguf_blocks().load(std::get<0>(GetParam()) + ".values");
  const quant::WeightFormat& format = quant::format_of(codes());
  const int64_t cols = 2 * type().elements;
  const bool shifted = codes() == DType::kI4 && type().largest > 7;
  for (int64_t row = 0; row < blocks.shape()[0] / 2; ++row) {
    const std::byte* const stored = blocks.as<std::byte>() + row * 2 * type().bytes;
    for (const int64_t begin : {int64_t{0}, int64_t{7}}) {
      const int64_t count = cols - begin;
      std::vector<std::byte> packed(static_cast<size_t>(count));
      code_rows(type(), codes())->read(stored, begin, cols, packed.data());
      std::vector<float> decoded(static_cast<size_t>(count));
      format.decode(packed.data(), 0, count, decoded.data());
      const int64_t groups = cols / type().group;
      const auto scales = floats_of(*scale_rows(type(), codes(), type().group, 1), stored, groups);
      const auto offsets =
          floats_of(*offset_rows(type(), codes(), type().group, 1), stored, groups);
      for (int64_t i = 0; i < count; ++i) {
        const auto group = static_cast<size_t>((begin + i) / type().group);
        const float wanted = values.as<float>()[row * cols + begin + i];
        if (!std::isfinite(wanted) || !std::isfinite(scales[group])) continue;
        const float found =
            std::fma(decoded[static_cast<size_t>(i)], scales[group], -offsets[group]);
        // Only the offset of codes that were shifted is rounded, and then the value once more.
        const double offset = std::abs(double{offsets[group]});
        const double bound = shifted ? 0x1p-24 * (offset + std::abs(wanted)) : 0;
        EXPECT_NEAR(found, wanted, bound) << "row " << row << " column " << begin + i;
      }
    }
  }
}

TEST_P(GgufRows, Factors_MultiplyScalesAndOffsets) {
  const Tensor blocks = testing::gguf_blocks().load(std::get<0>(GetParam()));
  const int64_t groups = type().groups();
  const std::byte* const stored = blocks.as<std::byte>();
  const auto scales = floats_of(*scale_rows(type(), codes(), type().group, 1), stored, groups);
  const auto twice = floats_of(*scale_rows(type(), codes(), type().group, 2), stored, groups);
  const auto offsets = floats_of(*offset_rows(type(), codes(), type().group, 1), stored, groups);
  const auto doubled = floats_of(*offset_rows(type(), codes(), type().group, 2), stored, groups);
  for (size_t group = 0; group < scales.size(); ++group) {
    if (!std::isfinite(scales[group]) || !std::isfinite(offsets[group])) continue;
    EXPECT_EQ(twice[group], 2 * scales[group]);
    EXPECT_EQ(doubled[group], 2 * offsets[group]);
    if (!type().has_offset) {
      EXPECT_EQ(offsets[group], 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, GgufRows,
                         ::testing::Combine(::testing::ValuesIn(testing::gguf_block_types()),
                                            ::testing::Values(DType::kI8, DType::kI4, DType::kU4,
                                                              DType::kF4, DType::kIQ4)),
                         [](const auto& row) {
                           return std::get<0>(row.param) + "_" +
                                  std::string(to_string(std::get<1>(row.param)));
                         });

TEST(GgufRowTypes, CodesOf4Bits_AreThoseOfTheseTypes) {
  std::vector<std::string> fitting;
  for (const std::string& name : testing::gguf_block_types()) {
    if (fits_4_bits(*quant::find_block_type(name))) fitting.push_back(name);
  }
  EXPECT_EQ(fitting, (std::vector<std::string>{"Q1_0", "Q2_0", "Q2_K", "Q3_K", "Q4_0", "Q4_1",
                                               "Q4_K", "TQ1_0", "TQ2_0"}));
}

TEST(GgufRowTypes, LayersOfOneType_HaveItsOwnCodes) {
  const auto dtype_of = [](std::string_view name) {
    for (const WeightForm& form : gguf_block_forms()) {
      if (form.name == name) return form.dtype;
    }
    return DType::kBool;
  };
  EXPECT_EQ(dtype_of("IQ4_NL"), DType::kIQ4);
  EXPECT_EQ(dtype_of("IQ4_XS"), DType::kIQ4);
  EXPECT_EQ(dtype_of("MXFP4"), DType::kF4);
  EXPECT_EQ(dtype_of("NVFP4"), DType::kF4);
  EXPECT_EQ(dtype_of("Q4_0"), DType::kI4);
  EXPECT_EQ(dtype_of("Q4_K"), DType::kU4);
  EXPECT_EQ(dtype_of("Q4_1"), DType::kU4);
  EXPECT_EQ(dtype_of("Q2_K"), DType::kI4);
  EXPECT_EQ(dtype_of("Q6_K"), DType::kI8);
}

TEST(GgufRowTypes, CodesOf6Bits_AreKnownToBeSo) {
  std::vector<std::string> narrow;
  for (const WeightForm& form : gguf_block_forms()) {
    EXPECT_EQ(form.quant.gate_up_codes, form.quant.down_codes) << form.name;
    if (form.quant.gate_up_codes.dtype != DType::kI6) continue;
    EXPECT_EQ(form.dtype, DType::kI8) << form.name;
    narrow.emplace_back(form.name);
  }
  EXPECT_EQ(narrow,
            (std::vector<std::string>{"Q5_0", "Q5_1", "Q5_K", "Q6_K", "IQ1_S", "IQ3_S", "IQ1_M"}));
  for (const WeightForm& form : gguf_mixed_forms()) {
    if (form.name != "Q5_K+Q6_K") continue;
    EXPECT_EQ(form.quant.gate_up_codes.dtype, DType::kI6);
    EXPECT_EQ(form.quant.gate_up_codes.block_cols, 32);
    EXPECT_EQ(form.quant.down_codes.dtype, DType::kI6);
    EXPECT_FALSE(form.quant.down_codes.has_zeros);
  }
}

TEST(GgufRowTypes, CodesOf2Bits_AreKnownWhereAllMatricesHaveThem) {
  for (const WeightForm& form : gguf_block_forms()) {
    EXPECT_EQ(form.quant.gate_up_codes.dtype == DType::kU2, form.name == "Q2_K") << form.name;
  }
  for (const WeightForm& form : gguf_mixed_forms()) {
    EXPECT_NE(form.quant.gate_up_codes.dtype, DType::kU2) << form.name;
    EXPECT_NE(form.quant.down_codes.dtype, DType::kU2) << form.name;
  }
}

// Rows of random blocks, with no number that is not finite, of 1024 elements.
std::vector<std::byte> random_rows(const quant::BlockType& type, int64_t rows,
                                   std::mt19937& random) {
  std::vector<std::byte> bytes;
  std::vector<std::byte> block(static_cast<size_t>(type.bytes));
  quant::BlockParts parts;
  const auto is_finite = [&] {
    type.take_apart(block.data(), parts);
    return std::ranges::all_of(std::span(parts.scales).first(static_cast<size_t>(type.groups())),
                               [](float scale) { return std::isfinite(2 * scale); }) &&
           (!type.has_offset ||
            std::ranges::all_of(std::span(parts.offsets).first(static_cast<size_t>(type.groups())),
                                [](float offset) { return std::isfinite(offset); }));
  };
  for (int64_t i = 0; i < rows * 1024 / type.elements; ++i) {
    do {
      for (std::byte& byte : block) byte = static_cast<std::byte>(random() & 0xff);
    } while (!is_finite());
    bytes.insert(bytes.end(), block.begin(), block.end());
  }
  return bytes;
}

TEST(GgufRowTypes, ScalesAndOffsets_AreWhatTheirFormsSay) {
  std::mt19937 random(7);
  for (const WeightForm& form : gguf_block_forms()) {
    const quant::BlockType& type = *quant::find_block_type(form.name);
    const auto blocks = random_rows(type, gemm::kPanelColumns, random);
    const int64_t groups = 1024 / form.quant.block_cols;
    const auto expect_packed = [&](ScaleValues values, const auto& make_rows) {
      std::vector<std::vector<float>> numbers;
      gemm::PanelNumbers columns{};
      for (int64_t row = 0; row < gemm::kPanelColumns; ++row) {
        const std::byte* const stored = blocks.data() + row * 1024 / type.elements * type.bytes;
        numbers.push_back(floats_of(*make_rows(), stored, groups));
        columns[static_cast<size_t>(row)] = numbers.back().data();
      }
      const gemm::NumberPlane plane{
          .values = values, .groups = groups, .unit_groups = kStepColumns / form.quant.block_cols};
      std::vector<std::byte> packed(plane.bytes());
      EXPECT_EQ(gemm::pack_numbers(plane, columns, packed.data()).column, -1) << form.name;
      if (form.quant.gate_up_codes.dtype != DType::kU2) return;
      // A GPU has them in half a byte each.
      for (const std::vector<float>& row : numbers) {
        for (size_t first = 0; first < row.size(); first += 16) {
          EXPECT_TRUE(quant::unit_of_small_steps(std::span(row).subspan(first, 16), 15));
        }
      }
    };
    EXPECT_NE(form.quant.scale_values, ScaleValues::kFloat) << form.name;
    expect_packed(form.quant.scale_values,
                  [&] { return scale_rows(type, form.dtype, form.quant.block_cols, 1); });
    if (form.quant.zeros == WeightZero::kNone) continue;
    EXPECT_NE(form.quant.zero_values, ScaleValues::kFloat) << form.name;
    expect_packed(form.quant.zero_values,
                  [&] { return offset_rows(type, form.dtype, form.quant.block_cols, 1); });
  }
}

}  // namespace
}  // namespace conclave::checkpoint
