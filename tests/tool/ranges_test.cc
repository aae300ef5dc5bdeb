#include "input/ranges.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

namespace conclave::tool {
namespace {

using Numbers = std::vector<int64_t>;

Numbers parse(std::string_view text) { return parse_number_list(text, {.option = "--tokens"}); }

TEST(Ranges, List_KeepsOrderAndRepeats) { EXPECT_EQ(parse("4,1,1,2"), (Numbers{4, 1, 1, 2})); }

TEST(Ranges, SingleNumber_IsItself) {
  EXPECT_EQ(parse("0"), (Numbers{0}));
  EXPECT_EQ(parse("9223372036854775807"), (Numbers{INT64_MAX}));
}

TEST(Ranges, PlainRange_CountsByOne) { EXPECT_EQ(parse("0-3,7"), (Numbers{0, 1, 2, 3, 7})); }

TEST(Ranges, AddRange_StopsAtOrBeforeLast) {
  EXPECT_EQ(parse("1-9+2"), (Numbers{1, 3, 5, 7, 9}));
  EXPECT_EQ(parse("1-8+3"), (Numbers{1, 4, 7}));
}

TEST(Ranges, MultiplyRange_StopsAtOrBeforeLast) {
  EXPECT_EQ(parse("1-64*2"), (Numbers{1, 2, 4, 8, 16, 32, 64}));
  EXPECT_EQ(parse("3-100*10"), (Numbers{3, 30}));
}

TEST(Ranges, RangeOfOne_IsOneNumber) { EXPECT_EQ(parse("5-5"), (Numbers{5})); }

TEST(Ranges, StepBeyondInt64_Ends) {
  EXPECT_EQ(parse("1-9223372036854775807*4611686018427387904").size(), 2U);
  EXPECT_EQ(parse("9223372036854775806-9223372036854775807").size(), 2U);
}

class BadRange : public ::testing::TestWithParam<const char*> {};

TEST_P(BadRange, Parse_ThrowsNamingOptionAndText) {
  try {
    parse(GetParam());
    FAIL() << "accepted " << GetParam();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.detail().tensor, "--tokens");
    EXPECT_FALSE(error.detail().found.empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Ranges, BadRange,
                         ::testing::Values("", ",", "1,", ",1", "a", "1.5", "-1", "-", "1-",
                                           "1-2-3", "9-1", "1-9+0", "1-9*1", "1-9*0", "0-9*2",
                                           "1-9+", "1-9+-2", "1 2", " 1", "9223372036854775808",
                                           "0x10", "1-100000", "1-64**2", "+1"));

TEST(Ranges, ValueOutsideLimits_ThrowsNamingLimit) {
  const ListLimits limits{.option = "--threads", .lowest = 1, .highest = 8};
  EXPECT_EQ(parse_number_list("1-8", limits).size(), 8U);
  for (const char* text : {"0", "9", "1-9"}) {
    try {
      parse_number_list(text, limits);
      FAIL() << "accepted " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.detail().limit, "1 to 8");
    }
  }
}

TEST(Ranges, LongestList_IsTakenAndOneMoreRefused) {
  EXPECT_EQ(parse("1-10000").size(), 10000U);
  EXPECT_THROW(parse("1-10000,1"), Error);
}

TEST(Ranges, ByteSizes_TakeDecimalAndBinaryUnits) {
  EXPECT_EQ(parse_byte_size("512", "--shard-size"), 512U);
  EXPECT_EQ(parse_byte_size("64kB", "--shard-size"), 64000U);
  EXPECT_EQ(parse_byte_size("1.5GB", "--shard-size"), 1500000000U);
  EXPECT_EQ(parse_byte_size("2GiB", "--shard-size"), uint64_t{2} << 30);
}

TEST(Ranges, BadByteSizes_Throw) {
  for (const char* text : {"", "GB", "0", "-1", "1XB", "1 GB", "1e3", "1..5", "99999999TB", "."}) {
    EXPECT_THROW(parse_byte_size(text, "--shard-size"), Error) << text;
  }
}

}  // namespace
}  // namespace conclave::tool
