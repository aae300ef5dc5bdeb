// Codes of 4 bits that stand for values by a table, against the tables of their specifications.
#include "core/code_bits.h"
#include "quant/formats.h"
#include "quant/weight_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace conclave::quant {
namespace {

using Values = std::array<float, 16>;

template <class Format>
void expect_values(const Values& values) {
  for (uint8_t code = 0; code < 16; ++code) {
    EXPECT_EQ(Format::decode(code), values[code]) << int{code};
    EXPECT_EQ(std::signbit(Format::decode(code)), std::signbit(values[code])) << int{code};
    EXPECT_EQ(kValuesByCode<Format>.of[code], values[code]) << int{code};
    EXPECT_EQ(Format::encode(values[code]), code);
  }
}

// OCP Microscaling Formats 1.0, table 5.
TEST(FourBits, E2m1_IsTheFloatOfItsSpecification) {
  expect_values<E2m1>({0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F, -0.0F, -0.5F, -1.0F, -1.5F,
                       -2.0F, -3.0F, -4.0F, -6.0F});
}

// bitsandbytes, get_4bit_type("nf4").
TEST(FourBits, Nf4_HasTheQuantilesOfBitsandbytes) {
  expect_values<Nf4>({-1.0F, -0.6961928009986877F, -0.5250730514526367F, -0.39491748809814453F,
                      -0.28444138169288635F, -0.18477343022823334F, -0.09105003625154495F, 0.0F,
                      0.07958029955625534F, 0.16093020141124725F, 0.24611230194568634F,
                      0.33791524171829224F, 0.44070982933044434F, 0.5626170039176941F,
                      0.7229568362236023F, 1.0F});
}

// bitsandbytes, get_4bit_type("fp4"): divided by the largest, 12.
TEST(FourBits, BnbFp4_HasTheValuesOfBitsandbytes) {
  Values values{};
  const std::array<float, 8> twelfths = {0.0F, 0.0625F, 8.0F, 12.0F, 4.0F, 6.0F, 2.0F, 3.0F};
  for (size_t code = 0; code < twelfths.size(); ++code) {
    values[code] = twelfths[code] / 12.0F;
    values[code + 8] = -values[code];
  }
  expect_values<BnbFp4>(values);
}

// ggml, kvalues_iq4nl.
TEST(FourBits, Iq4_HasTheNumbersOfGgml) {
  expect_values<Iq4>({-127.0F, -104.0F, -83.0F, -65.0F, -49.0F, -35.0F, -22.0F, -10.0F, 1.0F, 13.0F,
                      25.0F, 38.0F, 53.0F, 69.0F, 89.0F, 113.0F});
}

// Those of GGUF's types with offsets.
TEST(FourBits, Uint4_StandsForItself) {
  expect_values<Uint4>({0.0F, 1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F, 7.0F, 8.0F, 9.0F, 10.0F, 11.0F,
                        12.0F, 13.0F, 14.0F, 15.0F});
}

template <class Format>
void expect_nearest() {
  for (int i = -4000; i <= 4000; ++i) {
    const float value = static_cast<float>(i) * (1.25F / 4000) * Format::kLargest;
    const auto distance = [&](int code) {
      return std::abs(static_cast<double>(Format::decode(static_cast<uint8_t>(code))) - value);
    };
    const uint8_t found = Format::encode(value);
    for (int code = 0; code < 16; ++code) {
      EXPECT_LE(distance(found), distance(code)) << value;
      const bool is_tie = distance(found) == distance(code) &&
                          Format::decode(found) != Format::decode(static_cast<uint8_t>(code));
      if (is_tie) {
        EXPECT_EQ(found & 1, 0) << value;
      }
    }
  }
}

TEST(FourBits, AnyValue_GetsTheNearestCode) {
  expect_nearest<E2m1>();
  expect_nearest<Nf4>();
  expect_nearest<BnbFp4>();
  expect_nearest<Iq4>();
  expect_nearest<Uint4>();
}

// Codes change in the middle of two values, which few floats are: these lie next to it.
template <class Format>
void expect_nearest_at_middles() {
  Values ascending = {};
  for (uint8_t code = 0; code < 16; ++code) ascending[code] = Format::decode(code);
  std::ranges::sort(ascending);
  for (size_t i = 0; i + 1 < ascending.size(); ++i) {
    const double middle = (double{ascending[i]} + double{ascending[i + 1]}) / 2;
    const float nearest = static_cast<float>(middle);
    for (const float value :
         {std::nextafterf(nearest, -INFINITY), nearest, std::nextafterf(nearest, INFINITY)}) {
      const float found = Format::decode(Format::encode(value));
      if (value < middle) {
        EXPECT_EQ(found, ascending[i]) << value;
      } else if (value > middle) {
        EXPECT_EQ(found, ascending[i + 1]) << value;
      } else {
        EXPECT_TRUE(found == ascending[i] || found == ascending[i + 1]) << value;
      }
    }
  }
}

TEST(FourBits, ValuesNextToTheMiddleOfTwo_GetTheNearerOne) {
  expect_nearest_at_middles<E2m1>();
  expect_nearest_at_middles<Nf4>();
  expect_nearest_at_middles<BnbFp4>();
  expect_nearest_at_middles<Iq4>();
}

TEST(FourBits, RowsOfAnyBeginAndLength_KeepTheCodesAroundThem) {
  std::array<float, 131> values{};
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 16) * 0.125F - 1;
  const WeightFormat& format = format_of(DType::kNF4);
  for (const int64_t begin : {0, 1, 2, 7}) {
    for (const int64_t count : {0, 1, 2, 63, 64, 65, 128, 131}) {
      std::array<std::byte, 80> row{};
      row.fill(std::byte{0xa5});
      format.encode(values.data(), begin, count, row.data());
      for (int64_t i = 0; i < 160; ++i) {
        const bool is_written = i >= begin && i < begin + count;
        const uint8_t expected = is_written   ? Nf4::encode(values[static_cast<size_t>(i - begin)])
                                 : i % 2 == 0 ? 0x5
                                              : 0xa;
        EXPECT_EQ(code_at(row.data(), i, 4), expected) << begin << " " << count << " " << i;
      }
    }
  }
}

TEST(FourBits, WhatIsNotFinite_GetsZeroOrTheOutermostCode) {
  const auto expect_codes = []<class Format>(Format) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(Format::decode(Format::encode(nan)), 0.0F) << Format::kName;
    EXPECT_EQ(Format::decode(Format::encode(-nan)), 0.0F) << Format::kName;
    EXPECT_EQ(Format::decode(Format::encode(INFINITY)), Format::kLargest) << Format::kName;
    EXPECT_EQ(Format::decode(Format::encode(-INFINITY)), -Format::kLargest) << Format::kName;
  };
  expect_codes(E2m1{});
  expect_codes(Nf4{});
  expect_codes(BnbFp4{});
}

TEST(FourBits, Iq4_HasNoZeroAndNoEqualEnds) {
  EXPECT_EQ(Iq4::decode(Iq4::encode(std::numeric_limits<float>::quiet_NaN())), 1.0F);
  EXPECT_EQ(Iq4::decode(Iq4::encode(0)), 1.0F);
  EXPECT_EQ(Iq4::decode(Iq4::encode(INFINITY)), 113.0F);
  EXPECT_EQ(Iq4::decode(Iq4::encode(-INFINITY)), -127.0F);
}

TEST(FourBits, ExactnessInBf16_IsThatOfTheValues) {
  EXPECT_TRUE(exact_in_bf16<E2m1>());
  EXPECT_TRUE(exact_in_bf16<E5m2>());
  EXPECT_TRUE(exact_in_bf16<Iq4>());
  EXPECT_FALSE(exact_in_bf16<Nf4>());
  EXPECT_FALSE(exact_in_bf16<BnbFp4>());
  EXPECT_FALSE(find_format(DType::kNF4)->codes->exact_in_bf16);
}

}  // namespace
}  // namespace conclave::quant
