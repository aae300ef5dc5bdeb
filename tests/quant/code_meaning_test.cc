// Tests of which numbers give codes a meaning, wherever they lie among others.

#include "quant/code_meaning.h"

#include "conclave/error.h"
#include "conclave/weights.h"

#include <gtest/gtest.h>

#include <algorithm>
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

}  // namespace
}  // namespace conclave::testing
