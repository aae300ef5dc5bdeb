// Tests that panels made by vector code have the bytes of those made without it.

#include "gemm/cpu/transpose_lanes.h"

#include "core/weight_types.h"
#include "cpu/isa.h"
#include "cpu/memory.h"
#include "gemm/cpu/pack_numbers.h"
#include "gemm/pack_by_lanes.h"
#include "gemm/packed_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

namespace conclave::gemm {
namespace {

std::vector<cpu::Isa> vector_isas() {
  std::vector<cpu::Isa> isas;
  for (const cpu::Isa isa : {cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    if (cpu::usable(isa)) isas.push_back(isa);
  }
  return isas;
}

class TransposeLanes : public ::testing::TestWithParam<std::tuple<DType, int64_t, int64_t>> {};

// Columns begin at any byte, end where their memory ends, and may be missing anywhere.
TEST_P(TransposeLanes, Panels_HaveTheBytesOfPackPanel) {
  const auto [dtype, k, skipped] = GetParam();
  const PanelLayout layout{.dtype = dtype, .k = k};
  const auto column_bytes = static_cast<size_t>(packed_bytes(dtype, k));
  std::mt19937_64 random(static_cast<uint64_t>(k));
  std::vector<std::vector<std::byte>> sources;
  PanelColumns columns{};
  for (size_t i = 0; i < columns.size(); ++i) {
    const size_t begin = i % 5;
    std::vector<std::byte>& column = sources.emplace_back(begin + column_bytes);
    for (std::byte& byte : column) byte = static_cast<std::byte>(random());
    const bool is_missing = skipped != 0 && static_cast<int64_t>(i) % skipped == 1;
    columns[i] = is_missing ? nullptr : column.data() + begin;
  }
  std::vector<std::byte> expected(layout.panel_bytes(), std::byte{0x5a});
  pack_panel(layout, columns, expected.data());
  // Panels that begin with a line are written past the caches.
  for (const size_t begin : {0U, 32U, 33U}) {
    for (const cpu::Isa isa : vector_isas()) {
      cpu::Buffer memory(cpu::default_allocator(), begin + layout.panel_bytes() + 64);
      std::ranges::fill(memory.span(), std::byte{0xa5});
      std::byte* const made = memory.data() + begin;
      pack_panel_by_lanes(layout, columns, columns, {.transpose = transpose_function(isa)}, made,
                          {}, {});
      EXPECT_TRUE(std::ranges::equal(std::span(made, expected.size()), expected))
          << cpu::to_string(isa) << " at " << begin;
      const auto others = {memory.span().first(begin), memory.span().last(64)};
      for (const std::span<std::byte> other : others) {
        EXPECT_EQ(std::ranges::count(other, std::byte{0xa5}), std::ssize(other));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, TransposeLanes,
    ::testing::Combine(::testing::Values(DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3,
                                         DType::kI4),
                       ::testing::Values(1, 2, 15, 16, 17, 31, 32, 33, 64, 83, 192, 647),
                       ::testing::Values(0, 3, 64)),
    [](const auto& row) {
      return std::string(to_string(std::get<0>(row.param))) + "_k" +
             std::to_string(std::get<1>(row.param)) + "_skip" +
             std::to_string(std::get<2>(row.param));
    });

// Whole panels of the forms that layers have: codes, then scales, then offsets.
TEST(PackByLanes, CodesWithTheirNumbers_HaveTheBytesOfPackPanel) {
  using enum ScaleValues;
  std::mt19937_64 random(7);
  const auto step = [&] { return static_cast<float>(random() % 127) * 0x1p-9F; };
  const auto power = [&] { return std::ldexp(1.0F, static_cast<int>(random() % 200) - 100); };
  for (const int64_t k : {31, 128, 300, 647}) {
    const std::array layouts = {
        PanelLayout{.dtype = DType::kI4, .k = k, .scale_width = 128},
        PanelLayout{.dtype = DType::kI4, .k = k, .scale_width = 32, .scale_skip = 5},
        PanelLayout{.dtype = DType::kU4, .k = k, .scale_width = 64, .has_offsets = true},
        PanelLayout{.dtype = DType::kI4, .k = k, .scale_width = 64, .ordered_groups = 21},
        PanelLayout{.dtype = DType::kF4, .k = k, .scale_width = 32, .scale_values = kPowerOfTwo},
        PanelLayout{.dtype = DType::kF4, .k = k, .scale_width = 16},
        PanelLayout{.dtype = DType::kIQ4, .k = k, .scale_width = 32, .scale_values = kF16},
        PanelLayout{.dtype = DType::kU4,
                    .k = k,
                    .scale_width = 32,
                    .has_offsets = true,
                    .scale_values = kSteps,
                    .offset_values = kSteps},
        PanelLayout{.dtype = DType::kI8, .k = k, .scale_width = 16, .scale_values = kSteps},
        PanelLayout{.dtype = DType::kF8E4M3, .k = k, .scale_width = k}};
    for (const PanelLayout& layout : layouts) {
      const auto column_bytes = static_cast<size_t>(packed_bytes(layout.dtype, k));
      const auto groups = static_cast<size_t>(layout.num_groups());
      std::vector<std::vector<std::byte>> codes(kPanelColumns);
      std::vector<std::vector<float>> numbers(2 * kPanelColumns);
      PanelColumns columns{};
      PanelNumbers scales{};
      PanelNumbers offsets{};
      for (size_t i = 0; i < columns.size(); ++i) {
        if (i % 11 == 7) continue;
        for (size_t n = 0; n < column_bytes; ++n) {
          codes[i].push_back(static_cast<std::byte>(random()));
        }
        columns[i] = codes[i].data();
        const bool in_powers = layout.scale_values == kPowerOfTwo;
        for (size_t group = 0; group < groups; ++group) {
          numbers[2 * i].push_back(in_powers ? power() : step());
          numbers[2 * i + 1].push_back(step());
        }
        scales[i] = numbers[2 * i].data();
        if (layout.has_offsets) offsets[i] = numbers[2 * i + 1].data();
      }
      SCOPED_TRACE(layout_name(layout) + " k " + std::to_string(k));
      std::vector<std::byte> expected(layout.panel_bytes(), std::byte{0x5a});
      ASSERT_EQ(pack_panel(layout, columns, expected.data(), scales, offsets).column, -1);
      for (const cpu::Isa isa : vector_isas()) {
        const PackFunctions functions{.transpose = transpose_function(isa),
                                      .numbers = numbers_function(isa)};
        std::vector<std::byte> made(layout.panel_bytes(), std::byte{0xa5});
        const UnfitNumber unfit =
            pack_panel_by_lanes(layout, columns, {}, functions, made.data(), scales, offsets);
        EXPECT_EQ(unfit.column, -1);
        EXPECT_TRUE(made == expected) << cpu::to_string(isa);
      }
      if (layout.scale_values == kFloat) continue;
      // A number without a form is named by its column and value, whoever packs.
      numbers[2 * 41][groups - 1] = 0.1F;
      for (const cpu::Isa isa : vector_isas()) {
        const PackFunctions functions{.transpose = transpose_function(isa),
                                      .numbers = numbers_function(isa)};
        const UnfitNumber unfit =
            pack_panel_by_lanes(layout, columns, {}, functions, expected.data(), scales, offsets);
        const UnfitNumber scalar = pack_panel(layout, columns, expected.data(), scales, offsets);
        EXPECT_EQ(unfit.column, scalar.column);
        EXPECT_EQ(unfit.value, scalar.value);
        if (groups > 1) EXPECT_EQ(unfit.column, 41);
      }
    }
  }
}

TEST(TransposeFunctions, EveryVectorSet_TakesWholeSquaresOnly) {
  const std::vector<std::byte> zeros(64 * 4);
  PanelColumns columns{};
  columns.fill(zeros.data());
  std::vector<std::byte> panel(64 * 64 * 4);
  EXPECT_EQ(transpose_function(cpu::Isa::kScalar), nullptr);
  const auto taken = [&](TransposeFunction transpose, int64_t element_bits, int64_t count) {
    return transpose({.columns = columns.data(),
                      .next = columns.data(),
                      .element_bits = element_bits,
                      .count = count},
                     panel.data());
  };
  for (const cpu::Isa isa : vector_isas()) {
    const TransposeFunction transpose = transpose_function(isa);
    const int64_t square = isa == cpu::Isa::kAvx2 ? 8 : 16;
    EXPECT_EQ(taken(transpose, 32, square - 1), 0);
    EXPECT_EQ(taken(transpose, 32, 2 * square + 1), 2 * square);
    EXPECT_EQ(taken(transpose, 16, 2 * square + 1), 2 * square);
    EXPECT_EQ(taken(transpose, 8, 4 * square - 1), 0);
    EXPECT_EQ(taken(transpose, 8, 4 * square + 3), 4 * square);
    EXPECT_EQ(taken(transpose, 4, 8 * square + 7), 8 * square);
    EXPECT_EQ(taken(transpose, 6, 64), 0);
  }
}

}  // namespace
}  // namespace conclave::gemm
