#include "quant/weight_format.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

namespace conclave::quant {
namespace {

ErrorCode code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

// Values that each plain format holds exactly.
std::vector<float> exact_values() {
  return {0.0F,
          -0.0F,
          1.0F,
          -1.0F,
          0.5F,
          1.5F,
          -2.25F,
          96.0F,
          0x1p-14F,
          -0x1p-10F,
          std::numeric_limits<float>::infinity()};
}

class EveryFormat : public testing::TestWithParam<const WeightFormat*> {
 protected:
  const WeightFormat& format() const { return *GetParam(); }
  size_t code_bytes() const { return row_bytes(format(), 1); }
};

TEST_P(EveryFormat, ExactValues_RoundTripBitForBit) {
  const std::vector<float> values = exact_values();
  const auto count = static_cast<int64_t>(values.size());
  std::vector<std::byte> codes(row_bytes(format(), count));
  format().encode(values.data(), 0, count, {.codes = codes.data()});
  std::vector<float> decoded(values.size());
  format().decode({.codes = codes.data()}, 0, count, decoded.data());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(decoded[i]), std::bit_cast<uint32_t>(values[i])) << i;
  }
}

TEST_P(EveryFormat, MiddleOfARow_TouchesNothingElse) {
  const std::vector<float> values = {1.0F, -2.0F, 0.5F};
  std::vector<std::byte> codes(row_bytes(format(), 8), std::byte{0x5a});
  format().encode(values.data(), 2, 3, {.codes = codes.data()});
  for (size_t i = 0; i < codes.size(); ++i) {
    const size_t column = i / code_bytes();
    if (column < 2 || column >= 5) {
      EXPECT_EQ(codes[i], std::byte{0x5a}) << i;
    }
  }
  std::vector<float> decoded(5, 77.0F);
  format().decode({.codes = codes.data()}, 2, 3, decoded.data() + 1);
  EXPECT_EQ(decoded, (std::vector<float>{77.0F, 1.0F, -2.0F, 0.5F, 77.0F}));
}

TEST_P(EveryFormat, CodesAtAnOddAddress_Decode) {
  const std::vector<float> values = {3.0F, -0.25F};
  std::vector<std::byte> storage(row_bytes(format(), 2) + 1);
  format().encode(values.data(), 0, 2, {.codes = storage.data() + 1});
  std::vector<float> decoded(2);
  format().decode({.codes = storage.data() + 1}, 0, 2, decoded.data());
  EXPECT_EQ(decoded, values);
}

TEST_P(EveryFormat, NoColumns_WritesNothing) {
  float untouched = 5.0F;
  format().decode({.codes = nullptr}, 0, 0, &untouched);
  EXPECT_EQ(untouched, 5.0F);
  EXPECT_EQ(row_bytes(format(), 0), 0U);
}

TEST_P(EveryFormat, Nan_StaysNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<std::byte> codes(row_bytes(format(), 1));
  format().encode(&nan, 0, 1, {.codes = codes.data()});
  float decoded = 0;
  format().decode({.codes = codes.data()}, 0, 1, &decoded);
  EXPECT_TRUE(std::isnan(decoded));
}

std::vector<const WeightFormat*> all_formats() {
  const Catalog<WeightFormat> catalog = format_catalog();
  std::vector<const WeightFormat*> formats;
  for (const WeightFormat& format : catalog.rows()) formats.push_back(&format);
  return formats;
}

INSTANTIATE_TEST_SUITE_P(Catalog, EveryFormat, testing::ValuesIn(all_formats()),
                         [](const auto& test) { return std::string(test.param->name); });

// Every 16-bit code keeps its bits through decode and encode, except a signalling NaN.
TEST(SixteenBitFormats, EveryCode_RoundTripsThroughTheCodec) {
  struct Case {
    DType element;
    uint16_t infinity;
    uint16_t quiet;
  };
  for (const Case& c : {Case{DType::kF16, 0x7c00, 0x0200}, Case{DType::kBF16, 0x7f80, 0x0040}}) {
    const WeightFormat& format = plain_format(c.element);
    std::vector<uint16_t> codes(0x10000);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
    std::vector<float> values(codes.size());
    std::vector<uint16_t> encoded(codes.size());
    const auto count = static_cast<int64_t>(codes.size());
    format.decode({.codes = reinterpret_cast<const std::byte*>(codes.data())}, 0, count,
                  values.data());
    format.encode(values.data(), 0, count, {.codes = reinterpret_cast<std::byte*>(encoded.data())});
    for (size_t i = 0; i < codes.size(); ++i) {
      const bool nan = (codes[i] & 0x7fff) > c.infinity;
      const auto expected = static_cast<uint16_t>(nan ? codes[i] | c.quiet : codes[i]);
      ASSERT_EQ(encoded[i], expected) << std::hex << i;
    }
  }
}

TEST(FormatCatalog, Names_AreUniqueAndFindable) {
  const auto catalog = format_catalog();
  std::set<std::string_view> names;
  for (const WeightFormat& format : catalog.rows()) {
    EXPECT_TRUE(names.insert(format.name).second) << format.name;
    EXPECT_EQ(&catalog.find(format.name, "weight format"), &format);
  }
}

TEST(FormatCatalog, UnknownName_ListsTheKnown) {
  try {
    static_cast<void>(format_catalog().find("q9", "weight format"));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnknownName);
    EXPECT_EQ(error.detail().found, "q9");
    EXPECT_NE(error.detail().expected.find("bf16"), std::string::npos);
  }
}

TEST(PlainFormat, ElementType_SelectsItsRow) {
  EXPECT_EQ(plain_format(DType::kBF16).name, "bf16");
  EXPECT_EQ(plain_format(DType::kF16).name, "f16");
  EXPECT_EQ(plain_format(DType::kF32).name, "f32");
}

TEST(PlainFormat, ElementTypeWithoutRow_IsATypedError) {
  EXPECT_EQ(code_of([] { static_cast<void>(plain_format(DType::kF8E4M3)); }), ErrorCode::kDType);
  EXPECT_EQ(code_of([] { static_cast<void>(plain_format(DType::kI32)); }), ErrorCode::kDType);
}

TEST(RowBytes, SizesThatDoNotFit_AreTypedErrors) {
  const WeightFormat& bf16 = plain_format(DType::kBF16);
  EXPECT_EQ(row_bytes(bf16, int64_t{1} << 40), size_t{1} << 41);
  EXPECT_EQ(code_of([&] { row_bytes(bf16, std::numeric_limits<int64_t>::max()); }),
            ErrorCode::kSizeOverflow);
  EXPECT_EQ(code_of([&] { row_bytes(bf16, -1); }), ErrorCode::kSizeOverflow);
}

TEST(RowBytes, CodesBelowAByteOddCount_IsAShapeError) {
  WeightFormat four_bits = plain_format(DType::kBF16);
  four_bits.element = DType::kF4;
  EXPECT_EQ(row_bytes(four_bits, 6), 3U);
  EXPECT_EQ(code_of([&] { row_bytes(four_bits, 7); }), ErrorCode::kShape);
}

}  // namespace
}  // namespace conclave::quant
