// Tests of which numbers give codes a meaning, wherever they lie among others.

#include "quant/code_meaning.h"

#include "conclave/error.h"
#include "conclave/weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

constexpr WeightId kScales = weights::kUp.with(WeightPlane::kScale);

// One row of float32 scales.
class Scales final : public WeightSource {
 public:
  explicit Scales(std::vector<float> values) : values_(std::move(values)) {}
  WeightInfo describe(WeightId) const override {
    return {.count = 1, .rows = 1, .cols = std::ssize(values_), .dtype = DType::kF32};
  }
  void read(WeightId, int64_t, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (destination.empty()) return;
    std::memcpy(destination.data(), values_.data() + block.col_begin, destination.size());
  }

 private:
  std::vector<float> values_;
};

std::optional<ErrorCode> refusal(const std::vector<float>& values, bool signed_scales) {
  const Scales source(values);
  try {
    const std::vector<float> loaded = load_scales({.signed_scales = signed_scales}, source, kScales,
                                                  0, {0, 1, 0, std::ssize(values)});
    EXPECT_TRUE(
        std::ranges::equal(std::as_bytes(std::span(loaded)), std::as_bytes(std::span(values))));
    return std::nullopt;
  } catch (const Error& error) {
    return error.code();
  }
}

TEST(LoadScales, OneOtherNumberAnywhere_DecidesWhetherAllAreTaken) {
  struct Case {
    float number;
    bool with_signs;
    bool without_signs;
  };
  using Limits = std::numeric_limits<float>;
  const std::vector<Case> cases = {{0.0F, true, true},
                                   {-0.0F, true, true},
                                   {Limits::denorm_min(), true, true},
                                   {-Limits::denorm_min(), true, false},
                                   {Limits::max(), true, true},
                                   {Limits::lowest(), true, false},
                                   {-1.0F, true, false},
                                   {Limits::infinity(), false, false},
                                   {-Limits::infinity(), false, false},
                                   {Limits::quiet_NaN(), false, false},
                                   {-Limits::quiet_NaN(), false, false},
                                   {Limits::signaling_NaN(), false, false}};
  for (const int64_t count : {1, 3, 4, 9, 16, 35}) {
    for (int64_t at = 0; at < count; ++at) {
      for (const auto& [number, with_signs, without_signs] : cases) {
        std::vector<float> values(static_cast<size_t>(count), 0.5F);
        values[static_cast<size_t>(at)] = number;
        SCOPED_TRACE(::testing::Message() << number << " at " << at << " of " << count);
        EXPECT_EQ(!refusal(values, true), with_signs);
        EXPECT_EQ(!refusal(values, false), without_signs);
        if (!without_signs) EXPECT_EQ(refusal(values, false), ErrorCode::kTensorValue);
      }
    }
  }
  EXPECT_EQ(refusal({}, false), std::nullopt);
}

// Scales of a byte, 1 but for one, in rows that lie apart.
class ByteScales final : public WeightSource {
 public:
  ByteScales(DType dtype, uint8_t one, uint8_t other) : dtype_(dtype) {
    bytes_.fill(std::byte{0xff});
    for (int64_t row = 0; row < kRows; ++row) {
      std::fill_n(bytes_.begin() + row * kStride, kCols, std::byte{one});
    }
    bytes_[kStride + 4] = std::byte{other};
  }
  WeightInfo describe(WeightId id) const override {
    if (id.plane() != WeightPlane::kScale) {
      return {.count = 1, .rows = kRows, .cols = kCols * 32, .dtype = DType::kF4};
    }
    return {.count = 1, .rows = kRows, .cols = kCols, .dtype = dtype_};
  }
  ConstTensorView view(WeightId, int64_t) const override {
    return {.data = bytes_.data(), .dtype = dtype_, .shape = {kRows, kCols}, .row_stride = kStride};
  }
  void read(WeightId, int64_t, const WeightBlock&, std::span<std::byte>) const override {
    ADD_FAILURE() << "views are read where they are";
  }

 private:
  static constexpr int64_t kRows = 3;
  static constexpr int64_t kCols = 5;
  static constexpr int64_t kStride = 8;

  DType dtype_;
  std::array<std::byte, kRows * kStride> bytes_;
};

template <class Action>
bool throws(const Action& action) {
  try {
    action();
    return false;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTensorValue);
    return true;
  }
}

TEST(CheckMeaning, EveryByte_IsRefusedWhereLoadingRefusesIt) {
  for (const auto& [dtype, one] :
       {std::pair{DType::kF8E8M0, uint8_t{127}}, {DType::kF8E4M3, uint8_t{0x38}}}) {
    for (const bool signed_scales : {false, true}) {
      const QuantSpec quant{.weights = WeightScale::kBlock,
                            .block_rows = 1,
                            .block_cols = 32,
                            .signed_scales = signed_scales};
      int refused = 0;
      for (int32_t byte = 0; byte < 256; ++byte) {
        const ByteScales source(dtype, one, static_cast<uint8_t>(byte));
        const WeightBlock block{0, 3, 0, 160};
        const bool expected = throws([&] { load_meaning(quant, source, weights::kUp, 0, block); });
        EXPECT_EQ(throws([&] { check_meaning(quant, source, weights::kUp, 0, block); }), expected)
            << byte;
        EXPECT_FALSE(throws([&] {
          check_meaning(quant, source, weights::kUp, 0, {0, 1, 0, 160});
        }));
        refused += expected ? 1 : 0;
      }
      // One byte of e8m0 is NaN, and two of e4m3, where 126 more are numbers below zero.
      EXPECT_EQ(refused, dtype == DType::kF8E8M0 ? 1 : signed_scales ? 2 : 128);
    }
  }
}

}  // namespace
}  // namespace conclave::testing
