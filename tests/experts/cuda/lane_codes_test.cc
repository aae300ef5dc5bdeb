// The order of codes that kernels for tensor cores read, and the bits that they make of it.
#include "experts/cuda/lane_codes.h"

#include "core/float_convert.h"
#include "experts/cuda/short_scales.h"
#include "quant/weight_format.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace conclave {
namespace {

using experts::CodeOrder;
using experts::lane_bits;
using experts::lane_code;
using experts::lane_place;
using experts::LanePlace;

template <CodeOrder kOrder>
void expect_bits_of_its_own() {
  std::array<uint32_t, 8> taken = {};
  for (int32_t column = 0; column < experts::kLaneColumns; ++column) {
    const LanePlace place = lane_place(column);
    const uint32_t bits = lane_bits<kOrder>(place, 0xf);
    EXPECT_EQ(std::popcount(bits), 4) << column;
    EXPECT_EQ(taken.at(static_cast<size_t>(place.word)) & bits, 0U) << column;
    taken.at(static_cast<size_t>(place.word)) |= bits;
  }
  for (const uint32_t word : taken) EXPECT_EQ(word, 0xffffffffU);
}
TEST(LaneCodes, EveryColumn_HasBitsOfItsOwn) {
  expect_bits_of_its_own<CodeOrder::kLanesOfFloats>();
  expect_bits_of_its_own<CodeOrder::kLanesOfNumbers>();
  expect_bits_of_its_own<CodeOrder::kLanesOfPairs>();
}

TEST(LaneCodes, SmallNumbers_HaveTwoBitsOfTheirOwn) {
  std::array<uint32_t, experts::kLaneColumns / experts::kSmallWordColumns> taken = {};
  for (int32_t column = 0; column < experts::kLaneColumns; ++column) {
    uint32_t& word = taken.at(static_cast<size_t>(experts::small_lane_word(column)));
    const uint32_t bits = 3U << experts::small_lane_bit(column);
    EXPECT_EQ(word & bits, 0U) << column;
    word |= bits;
    // Those of a step are at the same place of each byte, even columns in the lower half.
    EXPECT_EQ(experts::small_lane_bit(column) % 8, column / 16 * 2) << column;
    EXPECT_EQ(experts::small_lane_bit(column) / 16, column % 2) << column;
    // A lane has the columns that it has of wider codes.
    EXPECT_EQ(experts::small_lane_word(column), lane_place(column).word / 2) << column;
  }
  for (const uint32_t word : taken) EXPECT_EQ(word, 0xffffffffU);
}

template <CodeOrder kOrder>
void expect_codes_back() {
  for (int32_t column = 0; column < experts::kLaneColumns; ++column) {
    const LanePlace place = lane_place(column);
    const uint32_t all = lane_bits<kOrder>(place, 15);
    for (uint32_t code = 0; code < 16; ++code) {
      EXPECT_EQ(lane_code<kOrder>(place, lane_bits<kOrder>(place, code)), code);
      EXPECT_EQ(lane_code<kOrder>(place, lane_bits<kOrder>(place, code) | ~all), code);
    }
  }
}
TEST(LaneCodes, Codes_ComeBack) {
  expect_codes_back<CodeOrder::kLanesOfFloats>();
  expect_codes_back<CodeOrder::kLanesOfNumbers>();
  expect_codes_back<CodeOrder::kLanesOfPairs>();
}

// A word of weights becomes eight bytes side by side, the even columns' first, and rows of bytes
// have their columns so. Bytes of a half are in the order in which pairs have their bits.
TEST(LaneCodes, BytesOfRows_FollowTheWordsOfWeights) {
  std::array<int32_t, experts::kWordColumns> columns = {};
  columns.fill(-1);
  for (int32_t column = 0; column < experts::kWordColumns; ++column) {
    const int32_t byte = experts::lane_byte(column);
    ASSERT_GE(byte, 0);
    ASSERT_LT(byte, experts::kWordColumns);
    EXPECT_EQ(columns.at(static_cast<size_t>(byte)), -1) << column;
    columns.at(static_cast<size_t>(byte)) = column;
    // A block of 64 columns repeats it.
    EXPECT_EQ(experts::lane_byte(column + experts::kWordColumns), byte);
  }
  for (int32_t byte = 0; byte < experts::kWordColumns; ++byte) {
    const LanePlace place = lane_place(columns.at(static_cast<size_t>(byte)));
    EXPECT_EQ(place.word / 2, byte / 8) << byte;
    EXPECT_EQ(place.half, byte % 8 / 4) << byte;
    if (byte % 4 == 0) continue;
    const LanePlace before = lane_place(columns.at(static_cast<size_t>(byte - 1)));
    EXPECT_GT(experts::lane_low_bit(place), experts::lane_low_bit(before)) << byte;
  }
}

// The A operand of a product of 16 columns: lane p of four has columns 2 p, 2 p + 1 and these
// plus 8.
TEST(LaneCodes, LanesOfAProduct_HaveTheirColumnsInTwoWords) {
  for (int32_t column = 0; column < experts::kLaneColumns; ++column) {
    const LanePlace place = lane_place(column);
    EXPECT_EQ(place.word / 2, column % 8 / 2) << column;
    EXPECT_EQ(place.word % 2, column / 32) << column;
    EXPECT_EQ(place.pair, column / 16 % 2 * 2 + column / 8 % 2) << column;
    EXPECT_EQ(place.half, column % 2) << column;
  }
}

// Kernels move a word's four pairs so; the value is that of bf16 bits times 2^126.
TEST(LaneCodes, MovedBits_AreBf16NumbersOfTheirValues) {
  const quant::CodeBook& codes = *quant::format_of(DType::kF4).codes;
  constexpr uint32_t kSigns = 0x80008000U;
  constexpr uint32_t kOthers = 0x01c001c0U;
  for (int32_t column = 0; column < experts::kLaneColumns; ++column) {
    const LanePlace place = lane_place(column);
    for (uint32_t code = 0; code < 16; ++code) {
      // The other pairs have all bits.
      constexpr CodeOrder kFloats = CodeOrder::kLanesOfFloats;
      const uint32_t word = lane_bits<kFloats>(place, code) | ~lane_bits<kFloats>(place, 15);
      const std::array<uint32_t, 4> pairs = {word & (kSigns | kOthers),
                                             word << 3 & (kSigns | kOthers),
                                             (word << 1 & kSigns) | (word >> 3 & kOthers),
                                             (word << 2 & kSigns) | (word << 6 & kOthers)};
      const uint32_t pair = pairs.at(static_cast<size_t>(place.pair));
      const uint32_t number = pair >> (16 * place.half) & 0xffffU;
      EXPECT_EQ(std::bit_cast<float>(number << 16) * 0x1p126F,
                codes.decode(static_cast<uint8_t>(code)))
          << column << " " << code;
    }
  }
}

// Bytes of a word, and of what lies above them, are numbers with 2^-133 as unit.
TEST(LaneCodes, MovedNumbers_AreBf16NumbersOfTheirCodes) {
  constexpr CodeOrder kNumbers = CodeOrder::kLanesOfNumbers;
  for (int32_t column = 0; column < experts::kLaneColumns; ++column) {
    const LanePlace place = lane_place(column);
    for (uint32_t code = 0; code < 16; ++code) {
      const uint32_t word = lane_bits<kNumbers>(place, code) | ~lane_bits<kNumbers>(place, 15);
      const std::array<uint32_t, 4> pairs = {word & 0x000f000fU, word & 0x00f000f0U,
                                             word >> 8 & 0x000f000fU, word >> 8 & 0x00f000f0U};
      const uint32_t pair = pairs.at(static_cast<size_t>(place.pair));
      const uint32_t number = pair >> (16 * place.half) & 0xffffU;
      const float unit = place.pair % 2 == 0 ? 0x1p127F : 0x1p123F;
      EXPECT_EQ(std::bit_cast<float>(number << 16) * unit * 0x1p6F, static_cast<float>(code))
          << column << " " << code;
    }
  }
}

// A byte of a word is the pair that a table has at its place: the earlier column lower.
TEST(LaneCodes, Pairs_AreTheBytesOfAWord) {
  constexpr CodeOrder kPairs = CodeOrder::kLanesOfPairs;
  for (int32_t column = 0; column < experts::kLaneColumns; ++column) {
    const LanePlace place = lane_place(column);
    EXPECT_EQ(lane_bits<kPairs>(place, 0xb), 0xbU << (8 * place.pair + column % 2 * 4)) << column;
  }
}

TEST(ShortScales, AreThoseThatBf16HoldsWithTheirMultiples) {
  EXPECT_TRUE(experts::is_short_scale(0.0F, -8));
  EXPECT_TRUE(experts::is_short_scale(0x1.fep-7F, -8));
  EXPECT_TRUE(experts::is_short_scale(-0x1.02p3F, -8));
  EXPECT_TRUE(experts::is_short_scale(0x1p40F, 0));
  EXPECT_FALSE(experts::is_short_scale(0x1.01p-7F, -8)) << "nine bits";
  EXPECT_FALSE(experts::is_short_scale(0x1.02p-7F, -7)) << "a multiple of more bits";
  EXPECT_FALSE(experts::is_short_scale(0x1p-41F, -8));
  EXPECT_FALSE(experts::is_short_scale(0x1.02p40F, -8));
  EXPECT_FALSE(experts::is_short_scale(std::numeric_limits<float>::infinity(), -8));
  EXPECT_FALSE(experts::is_short_scale(std::numeric_limits<float>::quiet_NaN(), -8));
}

TEST(ShortScales, ShortSteps_HaveProductsOfEightBits) {
  for (const int32_t least : {-8, 0}) {
    for (int step = -128; step <= 127; ++step) {
      bool holds = true;
      for (int32_t code = least; code < least + 16; ++code) {
        const auto product = static_cast<float>(code * step);
        holds = holds && bf16_to_float(float_to_bf16(product)) == product;
      }
      // Some steps of fewer bits would do as well.
      EXPECT_TRUE(holds || !experts::is_short_step(step, least)) << step << " " << least;
    }
  }
  // GGUF's Q3_K has six bits, of which one is a sign, and Q2_K four.
  EXPECT_TRUE(experts::is_short_step(-32, -8));
  EXPECT_TRUE(experts::is_short_step(31, -8));
  EXPECT_TRUE(experts::is_short_step(15, 0));
  EXPECT_FALSE(experts::is_short_step(37, -8)) << "7 times 37 has nine bits";
  EXPECT_FALSE(experts::is_short_step(63, 0));
  EXPECT_FALSE(experts::is_short_step(-128, -8));
}

}  // namespace
}  // namespace conclave
