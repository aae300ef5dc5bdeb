#include "core/float_convert.h"

#include "support/f16c.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <immintrin.h>
#include <limits>
#include <random>

namespace conclave {
namespace {

// Describes a binary float narrower than float32, which is decoded and encoded from its definition
// in double arithmetic, independently of the bit manipulation under test.
struct NarrowFloat {
  int mantissa_bits;
  int exponent_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int min_exponent() const { return 1 - bias(); }

  double decode(uint16_t bits) const {
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) {
      return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                           : sign * std::numeric_limits<double>::infinity();
    }
    const int hidden = exponent != 0 ? 1 << mantissa_bits : 0;
    const int scale = (exponent != 0 ? exponent : 1) - bias() - mantissa_bits;
    return sign * std::ldexp(hidden + mantissa, scale);
  }

  // The nearest representable value, ties to even, as a double.
  double round(double value) const {
    if (!std::isfinite(value) || value == 0) return value;
    const int exponent = std::max(std::ilogb(value), min_exponent());
    const int quantum = exponent - mantissa_bits;
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -quantum)), quantum);
    const double limit = std::ldexp(1.0, bias() + 1);
    if (std::abs(rounded) < limit) return rounded;
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  }
};
constexpr NarrowFloat kF16{.mantissa_bits = 10, .exponent_bits = 5};
constexpr NarrowFloat kBf16{.mantissa_bits = 7, .exponent_bits = 8};

// The lower halves of a float32 that decide a rounding of either type: exact, just below, on and
// just above each tie, and the ends.
constexpr std::array<uint32_t, 20> kLowerHalves = {
    0x0000, 0x0001, 0x0800, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x2fff, 0x3000,
    0x3001, 0x5000, 0x7000, 0x7fff, 0x8000, 0x8001, 0x9000, 0xb000, 0xefff, 0xffff};

template <class Check>
void for_each_deciding_float(const Check& check) {
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const uint32_t lower : kLowerHalves) {
      check(std::bit_cast<float>((upper << 16) | lower));
      if (::testing::Test::HasFailure()) return;
    }
  }
  std::mt19937 random(20240601);
  for (int i = 0; i < 1 << 20; ++i) {
    check(std::bit_cast<float>(static_cast<uint32_t>(random())));
    if (::testing::Test::HasFailure()) return;
  }
}

void expect_same_double(double actual, double expected, uint32_t bits) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(actual)) << std::hex << bits;
  } else {
    EXPECT_EQ(std::bit_cast<uint64_t>(actual), std::bit_cast<uint64_t>(expected))
        << std::hex << bits << ": " << actual << " instead of " << expected;
  }
}

__attribute__((target("f16c"))) uint16_t hardware_to_f16(float value) {
  const __m128i codes = _mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT);
  return static_cast<uint16_t>(_mm_extract_epi16(codes, 0));
}

__attribute__((target("f16c"))) uint32_t hardware_from_f16(uint16_t bits) {
  return std::bit_cast<uint32_t>(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))));
}

TEST(F16ToFloat, EveryCode_MatchesDefinition) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    expect_same_double(f16_to_float(code), kF16.decode(code), bits);
  }
}

TEST(F16ToFloat, EveryCode_MatchesHardwareBitForBit) {
  if (!testing::machine_has_f16c()) GTEST_SKIP() << "CPU lacks f16c";
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    ASSERT_EQ(std::bit_cast<uint32_t>(f16_to_float(code)), hardware_from_f16(code))
        << std::hex << bits;
  }
}

TEST(Bf16ToFloat, EveryCode_MatchesDefinition) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    expect_same_double(bf16_to_float(code), kBf16.decode(code), bits);
  }
}

TEST(FloatToF16, EveryCodeDecoded_RoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    const bool nan = (bits & 0x7fff) > 0x7c00;
    ASSERT_EQ(float_to_f16(f16_to_float(code)), nan ? bits | 0x0200 : bits) << std::hex << bits;
  }
}

TEST(FloatToBf16, EveryCodeDecoded_RoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    const bool nan = (bits & 0x7fff) > 0x7f80;
    ASSERT_EQ(float_to_bf16(bf16_to_float(code)), nan ? bits | 0x0040 : bits) << std::hex << bits;
  }
}

TEST(FloatToF16, DecidingFloats_RoundToNearestEven) {
  for_each_deciding_float([](float value) {
    expect_same_double(kF16.decode(float_to_f16(value)), kF16.round(value),
                       std::bit_cast<uint32_t>(value));
  });
}

TEST(FloatToF16, DecidingFloats_MatchHardwareBitForBit) {
  if (!testing::machine_has_f16c()) GTEST_SKIP() << "CPU lacks f16c";
  for_each_deciding_float([](float value) {
    ASSERT_EQ(float_to_f16(value), hardware_to_f16(value))
        << std::hex << std::bit_cast<uint32_t>(value);
  });
}

TEST(FloatToBf16, DecidingFloats_RoundToNearestEven) {
  for_each_deciding_float([](float value) {
    expect_same_double(kBf16.decode(float_to_bf16(value)), kBf16.round(value),
                       std::bit_cast<uint32_t>(value));
  });
}

TEST(FloatToF16, AroundOverflow_RoundsToLargestOrInfinity) {
  EXPECT_EQ(float_to_f16(65504.0F), 0x7bff);
  EXPECT_EQ(float_to_f16(std::nextafter(65520.0F, 0.0F)), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.0F), 0x7c00);
  EXPECT_EQ(float_to_f16(-65520.0F), 0xfc00);
}

TEST(FloatToF16, AroundSmallestSubnormal_TiesToEven) {
  EXPECT_EQ(float_to_f16(0x1p-25F), 0x0000);
  EXPECT_EQ(float_to_f16(std::nextafter(0x1p-25F, 1.0F)), 0x0001);
  EXPECT_EQ(float_to_f16(0x1.8p-24F), 0x0002);
  EXPECT_EQ(float_to_f16(-0x1p-25F), 0x8000);
}

TEST(FloatToBf16, AboveLargestFinite_RoundsToInfinity) {
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x7f7f7fffU)), 0x7f7f);
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x7f7f8000U)), 0x7f80);
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(FloatToBf16, SignallingNanWithLowPayload_StaysNan) {
  // Truncation alone would give infinity; rounding would give a finite number or minus zero.
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x7f800001U)), 0x7fc0);
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0xffffffffU)), 0xffff);
  EXPECT_EQ(float_to_f16(std::bit_cast<float>(0x7f800001U)), 0x7e00);
  EXPECT_EQ(float_to_f16(std::bit_cast<float>(0xffffffffU)), 0xffff);
}

TEST(DoubleToBf16, JustAboveATie_RoundsOnce) {
  // 1 + 2^-8 is halfway between two bf16; the added bit is lost in float32, where the tie would
  // then go down to even.
  const double tie = 1.0 + 0x1p-8;
  EXPECT_EQ(double_to_bf16(tie), 0x3f80);
  EXPECT_EQ(double_to_bf16(tie + 0x1p-40), 0x3f81);
  EXPECT_EQ(float_to_bf16(static_cast<float>(tie + 0x1p-40)), 0x3f80) << "no double rounding here";
}

TEST(DoubleToBf16, NearEveryTie_MatchesDefinition) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    if ((code & 0x7fff) >= 0x7f7f) continue;
    const double low = kBf16.decode(code);
    const double high = kBf16.decode(static_cast<uint16_t>(code + 1));
    const double tie = (low + high) / 2;
    for (const double nudge : {0.0, 0x1p-45, -0x1p-45}) {
      const double value = tie + tie * nudge;
      expect_same_double(kBf16.decode(double_to_bf16(value)), kBf16.round(value), bits);
    }
    if (HasFailure()) return;
  }
}

TEST(DoubleToBf16, RandomDoubles_MatchDefinition) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponents(-140, 130);
  std::uniform_real_distribution<double> mantissas(-2, 2);
  for (int i = 0; i < 1 << 18; ++i) {
    const double value = mantissas(random) * std::exp2(exponents(random));
    expect_same_double(kBf16.decode(double_to_bf16(value)), kBf16.round(value), 0);
    if (HasFailure()) return;
  }
}

TEST(DoubleToBf16, SpecialValues_KeepTheirKind) {
  EXPECT_EQ(double_to_bf16(0.0), 0x0000);
  EXPECT_EQ(double_to_bf16(-0.0), 0x8000);
  EXPECT_EQ(double_to_bf16(1e300), 0x7f80);
  EXPECT_EQ(double_to_bf16(-std::numeric_limits<double>::infinity()), 0xff80);
  EXPECT_EQ(double_to_bf16(std::numeric_limits<double>::denorm_min()), 0x0000);
  EXPECT_TRUE(std::isnan(bf16_to_float(double_to_bf16(std::nan("")))));
}

}  // namespace
}  // namespace conclave
