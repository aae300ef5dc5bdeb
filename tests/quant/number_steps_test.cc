#include "quant/number_steps.h"

#include "core/float_convert.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <optional>
#include <vector>

namespace conclave::quant {
namespace {

constexpr int kMost = 15;

std::optional<float> unit_of(const std::vector<float>& numbers) {
  return unit_of_small_steps(numbers, kMost);
}

void expect_steps(const std::vector<float>& numbers) {
  const std::optional<float> unit = unit_of(numbers);
  ASSERT_TRUE(unit.has_value());
  EXPECT_EQ(f16_to_float(float_to_f16(*unit)), *unit);
  for (const float number : numbers) {
    int8_t step = 0;
    EXPECT_TRUE(find_step(number, *unit, step)) << number;
    EXPECT_GE(step, 0);
    EXPECT_LE(step, kMost);
  }
}

TEST(SmallSteps, EveryNumberOfF16_IsAUnit) {
  for (const uint16_t bits : std::initializer_list<uint16_t>{0x0001, 0x03ff, 0x0400, 0x3c01, 0x3fff,
                                                             0x7bff, 0xb7ff, 0x8001}) {
    const float unit = f16_to_float(bits);
    for (int first = 0; first <= kMost; ++first) {
      for (int second = 0; second <= kMost; ++second) {
        SCOPED_TRACE(::testing::Message() << bits << ", " << first << ", " << second);
        expect_steps({unit * static_cast<float>(first), 0.0F, unit * static_cast<float>(second)});
      }
    }
  }
}

TEST(SmallSteps, NumbersThatHaveNone_AreSaid) {
  EXPECT_FALSE(unit_of({1.0F, 16.0F}));
  EXPECT_FALSE(unit_of({1.0F, -1.0F}));
  EXPECT_FALSE(unit_of({1.0F, 1.5F, 15.0F}));
  EXPECT_FALSE(unit_of({0x1.00ap0F}));  // 2053 of 2^-11, and no product
  EXPECT_FALSE(unit_of({0x1p20F}));     // 2^16 is beyond f16
  EXPECT_EQ(unit_of({0x1p16F}), 0x1p15F);
  EXPECT_EQ(unit_of({0.0F, -0.0F}), 0.0F);
  EXPECT_EQ(unit_of({}), 0.0F);
}

}  // namespace
}  // namespace conclave::quant
