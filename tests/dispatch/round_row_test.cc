#include "dispatch/round_row.h"

#include "core/float_convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <vector>

namespace conclave {
namespace {

// All signs, exponents and leading mantissa bits, with the trailing bits that decide a rounding.
std::vector<float> probes() {
  std::vector<float> values;
  for (uint32_t high = 0; high < 0x10000U; ++high) {
    for (const uint32_t low : {0x0000U, 0x0001U, 0x0fffU, 0x1000U, 0x1001U, 0x2000U, 0x7fffU,
                               0x8000U, 0x8001U, 0xefffU, 0xf000U, 0xffffU}) {
      values.push_back(std::bit_cast<float>((high << 16) | low));
    }
  }
  return values;
}

TEST(RoundRow, EveryKindOfValue_EqualsTheScalarConversion) {
  const std::vector<float> values = probes();
  std::vector<uint16_t> f16(values.size());
  std::vector<uint16_t> bf16(values.size());
  dispatch::round_to_f16(values.data(), static_cast<int64_t>(values.size()), f16.data());
  dispatch::round_to_bf16(values.data(), static_cast<int64_t>(values.size()), bf16.data());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(f16[i], float_to_f16(values[i])) << std::bit_cast<uint32_t>(values[i]);
    ASSERT_EQ(bf16[i], float_to_bf16(values[i])) << std::bit_cast<uint32_t>(values[i]);
  }
}

TEST(RoundRow, NoValues_WritesNothing) {
  uint16_t sentinel = 0xabcd;
  dispatch::round_to_f16(nullptr, 0, &sentinel);
  dispatch::round_to_bf16(nullptr, 0, &sentinel);
  EXPECT_EQ(sentinel, 0xabcd);
}

}  // namespace
}  // namespace conclave
