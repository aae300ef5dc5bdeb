#include "conclave/tensor.h"

#include "core/float_convert.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace conclave {
namespace {

template <class Action>
ErrorCode code_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode{0};
}

TEST(DType, EveryType_RoundTripsThroughItsName) {
  for (int value = 0; value <= static_cast<int>(DType::kF6E3M2); ++value) {
    const auto dtype = static_cast<DType>(value);
    EXPECT_EQ(parse_dtype(to_string(dtype)), dtype);
    EXPECT_GT(bit_size(dtype), 0);
  }
  EXPECT_EQ(parse_dtype("bfloat16"), DType::kBF16);
  EXPECT_EQ(parse_dtype("bf16"), std::nullopt);
  EXPECT_EQ(bit_size(static_cast<DType>(200)), 0);
}

TEST(DType, BytesOfTypesBelowAByte_AreRefused) {
  EXPECT_EQ(byte_size(DType::kF8E4M3), 1);
  EXPECT_EQ(byte_size(DType::kI64), 8);
  for (const DType dtype : {DType::kF4, DType::kI4, DType::kF6E3M2, static_cast<DType>(200)}) {
    EXPECT_EQ(code_of([&] { static_cast<void>(byte_size(dtype)); }), ErrorCode::kDType);
  }
}

TEST(Shape, TooManyOrNegativeDimensions_Throw) {
  const std::vector<int64_t> nine(9, 1);
  EXPECT_EQ(code_of([&] { Shape{std::span<const int64_t>(nine)}; }), ErrorCode::kShape);
  EXPECT_EQ(code_of([] { Shape{2, -1}; }), ErrorCode::kShape);
}

TEST(Shape, ElementCount_IsCheckedForOverflow) {
  EXPECT_EQ((Shape{}.num_elements()), 1);
  EXPECT_EQ((Shape{3, 0, 5}.num_elements()), 0);
  const int64_t half = int64_t{1} << 32;
  EXPECT_EQ(code_of([&] {
              static_cast<void>(Shape{half, half}.num_elements());
            }),
            ErrorCode::kSizeOverflow);
}

TEST(DenseBytes, SubByteTypes_MustFillWholeBytes) {
  EXPECT_EQ(dense_bytes(DType::kF4, {3, 2}), 3U);
  EXPECT_EQ(code_of([] { static_cast<void>(dense_bytes(DType::kF4, {3})); }), ErrorCode::kShape);
  EXPECT_EQ(code_of([] { static_cast<void>(dense_bytes(DType::kF64, {int64_t{1} << 61})); }),
            ErrorCode::kSizeOverflow);
}

TEST(Tensor, Fresh_IsZeroAndAligned) {
  const Tensor tensor(DType::kF32, {3, 5});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.as<float>()) % 64, 0U);
  for (int i = 0; i < 15; ++i) EXPECT_EQ(tensor.as<float>()[i], 0.0F);
  const Tensor empty(DType::kF32, {0, 5});
  EXPECT_FALSE(empty.view().empty());
  EXPECT_EQ(empty.size_bytes(), 0U);
}

TEST(Tensor, AbsurdSize_IsOutOfMemory) {
  EXPECT_EQ(code_of([] { Tensor(DType::kU8, {int64_t{1} << 58}); }), ErrorCode::kOutOfMemory);
}

TEST(Convert, StridedRows_AreFollowed) {
  const std::array<float, 6> source = {1, 2, 99, 3, 4, 99};
  std::array<uint16_t, 4> target{};
  convert({.data = source.data(), .dtype = DType::kF32, .shape = {2, 2}, .row_stride = 3},
          {.data = target.data(), .dtype = DType::kBF16, .shape = {2, 2}});
  EXPECT_EQ(bf16_to_float(target[2]), 3.0F);
  EXPECT_EQ(bf16_to_float(target[3]), 4.0F);
}

TEST(Convert, WrongTypesOrShapes_Throw) {
  float value = 1;
  int32_t integer = 0;
  const ConstTensorView from{.data = &value, .dtype = DType::kF32, .shape = {1}};
  EXPECT_EQ(code_of([&] { convert(from, {.data = &integer, .dtype = DType::kI32, .shape = {1}}); }),
            ErrorCode::kDType);
  EXPECT_EQ(code_of([&] {
              convert(from, {.data = &value, .dtype = DType::kF32, .shape = {1, 1}});
            }),
            ErrorCode::kShape);
}

// Rounding from double must not go through a rounded float: the double lies just above the midpoint
// of two neighbours, and rounding to float first would put it on the midpoint.
TEST(DoubleToShortFloat, JustAboveAMidpoint_RoundsUpOnce) {
  const double bf16_midpoint = 1.0 + 0x1p-8;
  EXPECT_EQ(bf16_to_float(double_to_bf16(bf16_midpoint)), 1.0F);
  EXPECT_EQ(bf16_to_float(double_to_bf16(bf16_midpoint + 0x1p-40)), 1.0F + 0x1p-7F);
  EXPECT_EQ(bf16_to_float(double_to_bf16(-bf16_midpoint - 0x1p-40)), -1.0F - 0x1p-7F);
  const double f16_midpoint = 1.0 + 0x1p-11;
  EXPECT_EQ(f16_to_float(double_to_f16(f16_midpoint)), 1.0F);
  EXPECT_EQ(f16_to_float(double_to_f16(f16_midpoint + 0x1p-45)), 1.0F + 0x1p-10F);
  EXPECT_EQ(f16_to_float(double_to_f16(f16_midpoint - 0x1p-45)), 1.0F);
}

TEST(DoubleToShortFloat, OutOfRangeAndSpecial_BehaveAsOneRounding) {
  EXPECT_TRUE(std::isinf(bf16_to_float(double_to_bf16(1e300))));
  EXPECT_TRUE(std::isinf(f16_to_float(double_to_f16(-1e300))));
  EXPECT_EQ(f16_to_float(double_to_f16(65519.999)), 65504.0F);
  EXPECT_TRUE(std::isnan(bf16_to_float(double_to_bf16(std::numeric_limits<double>::quiet_NaN()))));
  EXPECT_EQ(f16_to_float(double_to_f16(0x1p-25)), 0.0F);
  EXPECT_EQ(f16_to_float(double_to_f16(0x1.0000001p-25)), 0x1p-24F);
}

}  // namespace
}  // namespace conclave
