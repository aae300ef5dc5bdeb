#include "gemm/panel_scales.h"

#include "core/float8.h"
#include "core/float_convert.h"
#include "cpu/isa.h"
#include "gemm/cpu/pack_numbers.h"
#include "gemm/cpu/widen_numbers.h"
#include "gemm/packed_layout.h"
#include "support/guarded.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

namespace conclave::testing {
namespace {

using gemm::kPanelColumns;
using gemm::NumberPlane;
using gemm::PanelNumbers;

constexpr std::array kIsas = {cpu::Isa::kAvx2, cpu::Isa::kAvx512};

// The numbers of a plane by column.
class Numbers {
 public:
  explicit Numbers(int64_t groups) : columns_(kPanelColumns) {
    for (auto& column : columns_) column.resize(static_cast<size_t>(groups));
  }
  float& at(int64_t group, int64_t column) {
    return columns_[static_cast<size_t>(column)][static_cast<size_t>(group)];
  }
  PanelNumbers pointers() const {
    PanelNumbers pointers{};
    for (size_t column = 0; column < columns_.size(); ++column) {
      pointers[column] = columns_[column].data();
    }
    return pointers;
  }

 private:
  std::vector<std::vector<float>> columns_;
};

// The number of columns that do not exist.
float none_of(ScaleValues values) { return values == ScaleValues::kPowerOfTwo ? 0x1p-127F : 0.0F; }

// Vectors pack the bytes that are packed without them, and write nothing beside these.
void expect_same_by_vectors(const NumberPlane& plane, const PanelNumbers& columns) {
  std::vector<std::byte> expected(plane.bytes(), std::byte{0x5a});
  const bool fits = gemm::pack_numbers(plane, columns, expected.data()).column == -1;
  for (const cpu::Isa isa : kIsas) {
    if (!cpu::usable(isa)) continue;
    for (const GuardSide side : {GuardSide::kBegin, GuardSide::kEnd}) {
      const GuardedBuffer packed(plane.bytes(), side, 0xa5);
      const bool is_done = gemm::numbers_function(isa)(plane, columns.data(), packed.data());
      if (!is_done) continue;  // it may leave any to the other
      EXPECT_TRUE(fits);
      const std::span<const std::byte> bytes(packed.data(), plane.bytes());
      EXPECT_TRUE(std::ranges::equal(bytes, expected)) << cpu::to_string(isa);
    }
  }
}

bool is_done_by_vectors(const NumberPlane& plane, const PanelNumbers& columns) {
  std::vector<std::byte> packed(plane.bytes());
  return std::ranges::all_of(kIsas, [&](cpu::Isa isa) {
    return !cpu::usable(isa) || gemm::numbers_function(isa)(plane, columns.data(), packed.data());
  });
}

// Packs numbers and expects them back, from every function that reads them.
void expect_kept(const NumberPlane& plane, const PanelNumbers& columns) {
  const GuardedBuffer packed(plane.bytes(), GuardSide::kEnd, 0xff);
  ASSERT_EQ(gemm::pack_numbers(plane, columns, packed.data()).column, -1);
  expect_same_by_vectors(plane, columns);
  const auto count = static_cast<size_t>(plane.groups * kPanelColumns);
  for (const cpu::Isa isa : kIsas) {
    if (!cpu::usable(isa)) continue;
    const GuardedBuffer widened(count * sizeof(float), GuardSide::kEnd, 0xff);
    auto* const floats = static_cast<float*>(static_cast<void*>(widened.data()));
    gemm::widen_function(isa)(gemm::packed_numbers(plane, packed.data()), plane.groups, floats);
    for (int64_t group = 0; group < plane.groups; ++group) {
      for (int64_t column = 0; column < kPanelColumns; ++column) {
        const float* const given = columns[static_cast<size_t>(column)];
        const float found = floats[group * kPanelColumns + column];
        ASSERT_EQ(found, given != nullptr ? given[group] : none_of(plane.values))
            << group << " " << column;
        const float one = gemm::number_at(plane, packed.data(), group, column);
        ASSERT_EQ(std::bit_cast<uint32_t>(found), std::bit_cast<uint32_t>(one));
      }
    }
  }
}

// Lays values out over as many groups as they fill.
void expect_all_kept(ScaleValues values, const std::vector<float>& all) {
  const auto groups = static_cast<int64_t>(all.size()) / kPanelColumns;
  Numbers numbers(groups);
  for (int64_t i = 0; i < groups * kPanelColumns; ++i) {
    numbers.at(i / kPanelColumns, i % kPanelColumns) = all[static_cast<size_t>(i)];
  }
  expect_kept({.values = values, .groups = groups}, numbers.pointers());
}

TEST(PanelNumbers, AllFloat16Numbers_AreKept) {
  std::vector<float> all;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = f16_to_float(static_cast<uint16_t>(bits));
    if (std::isfinite(value)) all.push_back(value);
  }
  expect_all_kept(ScaleValues::kF16, all);
}

TEST(PanelNumbers, AllPowersOfTwo_AreKept) {
  std::vector<float> all;
  for (int code = 0; code < 255; ++code) all.push_back(e8m0_to_float(static_cast<uint8_t>(code)));
  expect_all_kept(ScaleValues::kPowerOfTwo, all);
}

TEST(PanelNumbers, AnyFloats_AreKept) {
  std::mt19937 random(2);
  std::vector<float> all;
  while (all.size() < 4096) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(value)) all.push_back(value);
  }
  expect_all_kept(ScaleValues::kFloat, all);
}

TEST(PanelNumbers, StepsOfAnyUnit_AreKept) {
  std::mt19937 random(3);
  for (const int64_t unit_groups : {1, 2, 8, 16}) {
    for (const int64_t groups : {1, 7, 8, 9, 33}) {
      Numbers numbers(groups);
      for (int64_t column = 0; column < kPanelColumns; ++column) {
        float unit = 0;
        for (int64_t group = 0; group < groups; ++group) {
          if (group % unit_groups == 0) {
            do {
              unit = f16_to_float(static_cast<uint16_t>(random()));
            } while (!std::isfinite(unit));
          }
          // Some units share few or no steps with others, and have none but 0.
          const int range = column % 3 == 0 ? 255 : static_cast<int>(column % 7);
          const int step = range == 0 ? 0 : static_cast<int>(random() % 256U) % (range + 1) - 128;
          numbers.at(group, column) = static_cast<float>(step) * unit;
        }
      }
      expect_kept({.values = ScaleValues::kSteps, .groups = groups, .unit_groups = unit_groups},
                  numbers.pointers());
    }
  }
}

TEST(PanelNumbers, AllStepsOfOneUnit_AreKept) {
  constexpr int64_t kGroups = 256;
  Numbers numbers(kGroups);
  for (int64_t column = 0; column < kPanelColumns; ++column) {
    const float unit =
        std::ldexp(1.0F + static_cast<float>(column) / 1024.0F, static_cast<int>(column) - 60);
    for (int64_t group = 0; group < kGroups; ++group) {
      numbers.at(group, column) = static_cast<float>(group - 128) * unit;
    }
  }
  expect_kept({.values = ScaleValues::kSteps, .groups = kGroups, .unit_groups = kGroups},
              numbers.pointers());
}

TEST(PanelNumbers, ColumnsThatDoNotExist_AreZerosOrLeast) {
  const std::vector<float> numbers = {0.5F, 2, 0.25F};
  for (const ScaleValues values :
       {ScaleValues::kFloat, ScaleValues::kF16, ScaleValues::kPowerOfTwo, ScaleValues::kSteps}) {
    PanelNumbers columns{};
    for (const size_t column : {0U, 40U, 63U}) columns[column] = numbers.data();
    expect_kept({.values = values, .groups = 3, .unit_groups = 2}, columns);
    expect_kept({.values = values, .groups = 3, .unit_groups = 2}, {});
    expect_kept({.values = values, .groups = 0, .unit_groups = 2}, columns);
  }
}

TEST(PanelNumbers, NumbersWithoutAForm_AreNamed) {
  const auto unfit = [](ScaleValues values, std::vector<float> numbers) {
    PanelNumbers columns{};
    columns[17] = numbers.data();
    const NumberPlane plane{
        .values = values, .groups = static_cast<int64_t>(numbers.size()), .unit_groups = 4};
    std::vector<std::byte> packed(plane.bytes());
    const gemm::UnfitNumber found = gemm::pack_numbers(plane, columns, packed.data());
    expect_same_by_vectors(plane, columns);
    return found;
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(unfit(ScaleValues::kF16, {1, 0.1F}).column, 17);
  EXPECT_EQ(unfit(ScaleValues::kF16, {1, 0.1F}).value, 0.1F);
  EXPECT_EQ(unfit(ScaleValues::kF16, {65536}).column, 17);
  EXPECT_EQ(unfit(ScaleValues::kPowerOfTwo, {4, 3}).value, 3);
  for (const float value : {-1.0F, 0x1p-128F, kInfinity, kNan}) {
    EXPECT_EQ(unfit(ScaleValues::kPowerOfTwo, {value}).column, 17) << value;
  }
  EXPECT_EQ(unfit(ScaleValues::kSteps, {1, 2, 3, 129}).value, 129);
  EXPECT_EQ(unfit(ScaleValues::kSteps, {1, 128, -128}).column, 17);
  EXPECT_EQ(unfit(ScaleValues::kSteps, {1, 2, 3, 128}).column, -1);
  EXPECT_EQ(unfit(ScaleValues::kSteps, {1, 2, 3, -129}).value, -129);
  EXPECT_EQ(unfit(ScaleValues::kSteps, {1, 1.001F}).column, 17);
  EXPECT_EQ(unfit(ScaleValues::kSteps, {0x1p-140F, 0x1p100F}).column, 17);
  for (const float value : {kInfinity, -kInfinity, kNan}) {
    EXPECT_EQ(unfit(ScaleValues::kSteps, {1, value}).column, 17) << value;
    EXPECT_EQ(unfit(ScaleValues::kSteps, {value}).column, 17) << value;
  }
  // The next unit takes what the first has no steps for.
  EXPECT_EQ(unfit(ScaleValues::kSteps, {1, 2, 3, -128, 0.1F, 0.2F}).column, -1);
}

// Numbers of groups that no tile has whole, in columns that begin anywhere, some of them missing.
TEST(PanelNumbers, AnyNumberOfGroups_IsPackedByVectors) {
  std::mt19937 random(5);
  for (const ScaleValues values :
       {ScaleValues::kFloat, ScaleValues::kF16, ScaleValues::kPowerOfTwo, ScaleValues::kSteps}) {
    for (const int64_t unit_groups : {1, 2, 4, 8, 16}) {
      for (const int64_t groups : {1, 3, 6, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48, 129}) {
        const NumberPlane plane{.values = values, .groups = groups, .unit_groups = unit_groups};
        const auto bytes = static_cast<size_t>(groups) * sizeof(float);
        std::vector<GuardedBuffer> sources;
        PanelNumbers columns{};
        for (int64_t column = 0; column < kPanelColumns; ++column) {
          if (column % 5 == 3) continue;
          auto* const numbers = static_cast<float*>(
              static_cast<void*>(sources.emplace_back(bytes, GuardSide::kEnd, 0).data()));
          for (int64_t group = 0; group < groups; ++group) {
            const auto step = static_cast<float>(static_cast<int>(random() % 256) - 128);
            numbers[group] = values == ScaleValues::kPowerOfTwo
                                 ? std::ldexp(1.0F, static_cast<int>(random() % 255) - 127)
                                 : step * 0x3p-9F;
          }
          columns[static_cast<size_t>(column)] = numbers;
        }
        expect_same_by_vectors(plane, columns);
        EXPECT_TRUE(is_done_by_vectors(plane, columns));
      }
    }
  }
}

// Each column of a panel has a number that fits not, or that the vectors leave to other code.
TEST(PanelNumbers, OneOtherNumberAnywhere_IsSeenByVectors) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr int64_t kGroups = 19;
  const auto try_other = [](ScaleValues values, float other) {
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      Numbers numbers(kGroups);
      for (int64_t i = 0; i < kGroups * kPanelColumns; ++i) {
        numbers.at(i / kPanelColumns, i % kPanelColumns) = 0.5F;
      }
      numbers.at(column % kGroups, column) = other;
      const NumberPlane plane{.values = values, .groups = kGroups, .unit_groups = 8};
      expect_same_by_vectors(plane, numbers.pointers());
      std::vector<std::byte> packed(plane.bytes());
      const PanelNumbers columns = numbers.pointers();
      if (gemm::pack_numbers(plane, columns, packed.data()).column == -1) continue;
      for (const cpu::Isa isa : kIsas) {
        if (!cpu::usable(isa)) continue;
        EXPECT_FALSE(gemm::numbers_function(isa)(plane, columns.data(), packed.data()));
      }
    }
  };
  for (const ScaleValues values :
       {ScaleValues::kF16, ScaleValues::kPowerOfTwo, ScaleValues::kSteps}) {
    for (const float other :
         {0.1F,      -0.5F,    0.0F,        -0.0F,    kNan,     0x1p-127F,       0x1p-126F,
          0x1p-149F, 0x1p127F, 0x1.8p-127F, 0x1p-24F, 0x1p-25F, 65504.0F,        65536.0F,
          63.5F,     64.0F,    64.5F,       -64.0F,   -64.5F,   0x1.fffffep127F, HUGE_VALF}) {
      SCOPED_TRACE(other);
      try_other(values, other);
    }
  }
}

// Units are found whatever their size, with as many odd steps as there are.
TEST(PanelNumbers, UnitsOfLongNumbers_AreThoseOfTheScalarCode) {
  std::mt19937 random(6);
  constexpr int64_t kGroups = 16;
  for (const int64_t unit_groups : {2, 8, 16}) {
    const NumberPlane plane{
        .values = ScaleValues::kSteps, .groups = kGroups, .unit_groups = unit_groups};
    for (int round = 0; round < 200; ++round) {
      Numbers numbers(kGroups);
      for (int64_t column = 0; column < kPanelColumns; ++column) {
        const int bits = 1 + static_cast<int>(random() % 17);
        const auto odd = static_cast<float>(random() % (1U << bits) | 1U);
        const float unit = std::ldexp(odd, static_cast<int>(random() % 200) - 100);
        const auto range = 1 + random() % 127;
        for (int64_t group = 0; group < kGroups; ++group) {
          const auto step = static_cast<int>(random() % range);
          numbers.at(group, column) = static_cast<float>(random() % 2 == 0 ? step : -step) * unit;
        }
      }
      expect_same_by_vectors(plane, numbers.pointers());
      EXPECT_TRUE(is_done_by_vectors(plane, numbers.pointers()));
    }
  }
}

TEST(PanelNumbers, NarrowNumbers_TakeFewerBytes) {
  const auto bytes = [](ScaleValues values) {
    return NumberPlane{.values = values, .groups = 9, .unit_groups = 8}.bytes();
  };
  EXPECT_EQ(bytes(ScaleValues::kFloat), 9U * 64 * 4);
  EXPECT_EQ(bytes(ScaleValues::kF16), 9U * 64 * 2);
  EXPECT_EQ(bytes(ScaleValues::kPowerOfTwo), 9U * 64);
  EXPECT_EQ(bytes(ScaleValues::kSteps), 9U * 64 + 2U * 64 * 4);
  const gemm::PanelLayout layout{.dtype = DType::kI8,
                                 .k = 300,
                                 .scale_width = 32,
                                 .has_offsets = true,
                                 .scale_values = ScaleValues::kSteps,
                                 .offset_values = ScaleValues::kF16};
  EXPECT_EQ(layout.scale_plane().unit_groups, 8);
  EXPECT_EQ(layout.panel_bytes(), 300U * 64 + 10U * 64 + 2U * 64 * 4 + 10U * 64 * 2);
  EXPECT_EQ(gemm::layout_name(layout), "panel64.k1.I8.steps.zeros.f16.v1");
}

}  // namespace
}  // namespace conclave::testing
