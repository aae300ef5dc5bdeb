#include "gemm/packed_layout.h"

#include "core/code_bits.h"
#include "core/float_convert.h"
#include "core/weight_types.h"
#include "gemm/panel_reader.h"
#include "quant/weight_format.h"
#include "support/guarded.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>
#include <vector>

namespace conclave::testing {
namespace {

using gemm::kPanelColumns;
using gemm::PanelColumns;
using gemm::PanelLayout;

// The value is exact in every float type, and differs for all (column, k) of one test.
float cell(int64_t column, int64_t k) {
  return static_cast<float>((column * 31 + k * 7) % 251 + 1);
}

std::vector<std::byte> encode(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(byte_size(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + i * 4, &values[i], 4);
    } else {
      const uint16_t bits =
          dtype == DType::kBF16 ? float_to_bf16(values[i]) : float_to_f16(values[i]);
      std::memcpy(bytes.data() + i * 2, &bits, 2);
    }
  }
  return bytes;
}

class PackPanel : public ::testing::TestWithParam<DType> {};

TEST_P(PackPanel, EachK_ReadsBackWithZerosAround) {
  for (const int64_t k : {1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 130}) {
    for (const int64_t columns : {1, 31, 32, 63, 64}) {
      const PanelLayout layout{.dtype = GetParam(), .k = k};
      std::vector<std::vector<std::byte>> sources;
      PanelColumns pointers{};
      for (int64_t c = 0; c < columns; ++c) {
        std::vector<float> values;
        for (int64_t i = 0; i < k; ++i) values.push_back(cell(c, i));
        sources.push_back(encode(GetParam(), values));
      }
      for (int64_t c = 0; c < columns; ++c) {
        pointers[static_cast<size_t>(c)] = sources[static_cast<size_t>(c)].data();
      }
      for (const GuardSide side : {GuardSide::kEnd, GuardSide::kBegin}) {
        const GuardedBuffer panel(layout.panel_bytes(), side, 0xff);
        gemm::pack_panel(layout, pointers, panel.data());
        for (int64_t i = 0; i < layout.padded_k(); ++i) {
          for (int64_t c = 0; c < kPanelColumns; ++c) {
            const float expected = i < k && c < columns ? cell(c, i) : 0.0F;
            ASSERT_EQ(gemm::panel_value(layout, panel.data(), i, c), expected)
                << "k " << i << " of " << k << ", column " << c << " of " << columns;
          }
        }
      }
    }
  }
}

TEST_P(PackPanel, SourceAtAPageEndAndOdd_IsReadOnlyToItsEnd) {
  const PanelLayout layout{.dtype = GetParam(), .k = 37};
  const auto row_bytes =
      static_cast<size_t>(layout.k) * static_cast<size_t>(byte_size(layout.dtype));
  const GuardedBuffer source(row_bytes, GuardSide::kEnd, 0);
  PanelColumns pointers{};
  pointers.fill(source.data());
  std::vector<std::byte> panel(layout.panel_bytes());
  gemm::pack_panel(layout, pointers, panel.data());
  EXPECT_EQ(gemm::panel_value(layout, panel.data(), 36, 63), 0.0F);
}

INSTANTIATE_TEST_SUITE_P(Types, PackPanel,
                         ::testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& tested) { return std::string(to_string(tested.param)); });

// Every bit of a panel is random, and no column is left out. A code may stand for no number.
TEST(PanelReader, EveryType_HasTheValuesOfTheirPlaces) {
  std::mt19937 random(11);
  std::vector<DType> types = {DType::kF32, DType::kF16, DType::kBF16};
  for (const quant::WeightFormat& format : quant::panel_catalog().rows()) {
    if (format.codes != nullptr) types.push_back(format.element);
  }
  ASSERT_GT(types.size(), 8U);
  for (const DType type : types) {
    const PanelLayout layout{.dtype = type, .k = 37};
    std::vector<std::byte> panel(layout.weight_bytes());
    for (std::byte& byte : panel) byte = static_cast<std::byte>(random());
    const gemm::PanelReader reader(layout, panel.data());
    for (int64_t k = 0; k < layout.padded_k(); ++k) {
      for (const int64_t first : {0, 1, 31, 32, 63}) {
        std::vector<float> values(static_cast<size_t>(kPanelColumns - first));
        reader.read(k, first, kPanelColumns - first, values.data());
        for (int64_t c = first; c < kPanelColumns; ++c) {
          ASSERT_EQ(std::bit_cast<uint32_t>(values[static_cast<size_t>(c - first)]),
                    std::bit_cast<uint32_t>(gemm::panel_value(layout, panel.data(), k, c)))
              << to_string(type) << " k " << k << ", column " << c;
        }
      }
    }
  }
}

TEST(PanelLayout, Bf16_PairsOfKShareALane) {
  const PanelLayout layout{.dtype = DType::kBF16, .k = 33};
  EXPECT_EQ(layout.padded_k(), 64);
  EXPECT_EQ(layout.row_bytes(), 256U);
  EXPECT_EQ(layout.panel_bytes(), 64U * 64 * 2);
  EXPECT_EQ(gemm::layout_name(layout), "panel64.k2.v1");
  EXPECT_EQ(gemm::layout_name({.dtype = DType::kF32, .k = 33}), "panel64.k1.v1");
}

TEST(PanelLayout, OffsetsFollowScales_AndNamesTell) {
  PanelLayout layout{.dtype = DType::kI8, .k = 50, .scale_width = 16, .scale_skip = 3};
  EXPECT_EQ(layout.num_groups(), 4);
  EXPECT_EQ(layout.panel_bytes(), 50U * 64 + 4U * 64 * sizeof(float));
  EXPECT_EQ(layout.offsets(nullptr), nullptr);
  EXPECT_EQ(gemm::layout_name(layout), "panel64.k1.I8.v1");
  layout.has_offsets = true;
  EXPECT_EQ(layout.panel_bytes(), 50U * 64 + 8U * 64 * sizeof(float));
  EXPECT_EQ(gemm::layout_name(layout), "panel64.k1.I8.zeros.v1");
  layout.ordered_groups = 9;
  EXPECT_EQ(layout.num_groups(), 9);
  EXPECT_EQ(layout.panel_bytes(), 50U * 64 + 18U * 64 * sizeof(float));
  EXPECT_EQ(gemm::layout_name(layout, ".bias"), "panel64.k1.I8.zeros.order.bias.v1");
}

// Codes of all widths; neighbours differ in every bit.
TEST(PackPanelOfCodes, EachKAndColumn_ReadBackFromSourcesReadToTheirEnd) {
  const auto code_of = [](int64_t column, int64_t k) {
    return static_cast<uint8_t>(column * 5 + k * 11 + k / 3);
  };
  for (const DType dtype : {DType::kI4, DType::kI6, DType::kI8}) {
    const int64_t bits = bit_size(dtype);
    for (const int64_t k : {1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 130}) {
      const PanelLayout layout{.dtype = dtype, .k = k, .scale_width = k};
      const auto row_bytes = static_cast<size_t>(packed_bytes(dtype, k));
      std::vector<GuardedBuffer> rows;
      rows.reserve(kPanelColumns);
      PanelColumns columns{};
      for (int64_t c = 0; c < kPanelColumns; ++c) {
        if (c % 9 == 4) continue;
        rows.emplace_back(row_bytes, GuardSide::kEnd, 0xff);
        columns[static_cast<size_t>(c)] = rows.back().data();
        for (int64_t i = 0; i < k; ++i) {
          set_code(rows.back().data(), i, bits,
                   static_cast<uint8_t>(code_of(c, i) & ((1 << bits) - 1)));
        }
      }
      const std::vector<float> ones(static_cast<size_t>(k), 1.0F);
      gemm::PanelNumbers scales{};
      scales.fill(ones.data());
      const GuardedBuffer panel(layout.panel_bytes(), GuardSide::kEnd, 0xff);
      gemm::pack_panel(layout, columns, panel.data(), scales);
      EXPECT_EQ(layout.weight_bytes(), static_cast<size_t>(k * 64 * bits / 8));
      const int least = dtype == DType::kI8 ? 0 : 1 << (bits - 1);
      for (int64_t i = 0; i < k; ++i) {
        for (int64_t c = 0; c < kPanelColumns; ++c) {
          const int code = c % 9 == 4 ? 0 : code_of(c, i) & ((1 << bits) - 1);
          const int value = dtype == DType::kI8 ? static_cast<int8_t>(code) : code - least;
          ASSERT_EQ(gemm::panel_value(layout, panel.data(), i, c), static_cast<float>(value))
              << to_string(dtype) << " k " << i << " of " << k << ", column " << c;
        }
      }
    }
  }
  EXPECT_EQ(gemm::layout_name({.dtype = DType::kI6, .k = 8, .scale_width = 4}), "panel64.k1.I6.v1");
}

TEST(PackPanelOfCodes, ScalesAndOffsets_ReadBackWithZerosAround) {
  const PanelLayout layout{.dtype = DType::kI8, .k = 37, .scale_width = 16, .has_offsets = true};
  const std::vector<std::byte> codes(37, std::byte{5});
  const std::vector<float> scales = {1, 2, 3};
  const std::vector<float> offsets = {-4, -5, -6};
  PanelColumns columns{};
  gemm::PanelNumbers of_scales{};
  gemm::PanelNumbers of_offsets{};
  for (const size_t column : {0U, 40U, 63U}) {
    columns[column] = codes.data();
    of_scales[column] = scales.data();
    of_offsets[column] = offsets.data();
  }
  const GuardedBuffer panel(layout.panel_bytes(), GuardSide::kEnd, 0xff);
  EXPECT_EQ(gemm::pack_panel(layout, columns, panel.data(), of_scales, of_offsets).column, -1);
  for (int64_t group = 0; group < 3; ++group) {
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const bool exists = c == 0 || c == 40 || c == 63;
      const auto at = static_cast<size_t>(group * kPanelColumns + c);
      const auto g = static_cast<size_t>(group);
      ASSERT_EQ(layout.scales(panel.data())[at], exists ? scales[g] : 0.0F) << group << " " << c;
      ASSERT_EQ(layout.offsets(panel.data())[at], exists ? offsets[g] : 0.0F) << group << " " << c;
    }
  }
}

}  // namespace
}  // namespace conclave::testing
