// Every row of the format table, whatever it is: what its codes mean, and that its functions agree.
#include "quant/weight_format.h"

#include "core/weight_types.h"
#include "quant/activation_rows.h"
#include "quant/code_quotient.h"
#include "quant/code_rows.h"
#include "quant/formats.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

namespace conclave::quant {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<const WeightFormat*> all_formats(bool coded, bool plain) {
  std::vector<const WeightFormat*> formats;
  const auto catalog = panel_catalog();
  for (const WeightFormat& format : catalog.rows()) {
    if (format.codes != nullptr ? coded : plain) formats.push_back(&format);
  }
  return formats;
}
std::string name_of(const testing::TestParamInfo<const WeightFormat*>& test) {
  return std::string(test.param->name);
}

// Values that the format holds exactly, not all of them one.
std::vector<float> few_values(const WeightFormat& format) {
  if (format.codes == nullptr) return {1.0F, -2.0F, 3.0F};
  std::vector<float> values;
  for (const float value : {0.2F, -0.3F, 1.0F}) {
    const float scaled = value * format.codes->largest;
    values.push_back(format.codes->decode(format.codes->encode(scaled)));
  }
  return values;
}

// All values of a type of codes, and some of others, that the format holds exactly.
std::vector<float> exact_values(const WeightFormat& format) {
  if (format.codes == nullptr) {
    return {0.0F,   -0.0F,    1.0F,  -1.0F,     0.5F,
            -2.25F, 0x1p-14F, 96.0F, -0x1p-10F, std::numeric_limits<float>::infinity()};
  }
  std::vector<float> values;
  for (int code = 0; code < 1 << bit_size(format.element); ++code) {
    const float value = format.codes->decode(static_cast<uint8_t>(code));
    if (!std::isnan(value)) values.push_back(value);
  }
  return values;
}

class EveryFormat : public testing::TestWithParam<const WeightFormat*> {
 protected:
  const WeightFormat& format() const { return *GetParam(); }
  std::vector<std::byte> row_of(int64_t columns, uint8_t fill = 0) const {
    return std::vector<std::byte>(static_cast<size_t>(packed_bytes(format().element, columns)),
                                  std::byte{fill});
  }
};

TEST_P(EveryFormat, ExactValues_RoundTripBitForBit) {
  const std::vector<float> values = exact_values(format());
  const auto count = static_cast<int64_t>(values.size());
  std::vector<std::byte> row = row_of(count);
  format().encode(values.data(), 0, count, row.data());
  std::vector<float> decoded(values.size());
  format().decode(row.data(), 0, count, decoded.data());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(decoded[i]), std::bit_cast<uint32_t>(values[i])) << i;
  }
}

TEST_P(EveryFormat, MiddleOfARow_TouchesNothingElse) {
  const std::vector<float> values = few_values(format());
  for (const int64_t begin : {1, 2, 3}) {
    std::vector<std::byte> row = row_of(8, 0x35);
    std::vector<float> before(8);
    format().decode(row.data(), 0, 8, before.data());
    format().encode(values.data(), begin, 3, row.data());
    std::vector<float> after(8);
    format().decode(row.data(), 0, 8, after.data());
    for (int64_t i = 0; i < 8; ++i) {
      const bool inside = i >= begin && i < begin + 3;
      const auto at = static_cast<size_t>(i);
      EXPECT_EQ(after[at], inside ? values[at - static_cast<size_t>(begin)] : before[at]) << i;
    }
    std::vector<float> part(5, 77.0F);
    format().decode(row.data(), begin, 3, part.data() + 1);
    EXPECT_EQ(part, (std::vector<float>{77.0F, values[0], values[1], values[2], 77.0F}));
  }
}

TEST_P(EveryFormat, CodesAtAnOddAddress_Decode) {
  const std::vector<float> values = few_values(format());
  std::vector<std::byte> storage = row_of(4);
  storage.resize(storage.size() + 1);
  format().encode(values.data(), 0, 3, storage.data() + 1);
  std::vector<float> decoded(3);
  format().decode(storage.data() + 1, 0, 3, decoded.data());
  EXPECT_EQ(decoded, values);
}

TEST_P(EveryFormat, NoColumns_WritesNothing) {
  float untouched = 5.0F;
  format().decode(nullptr, 0, 0, &untouched);
  EXPECT_EQ(untouched, 5.0F);
}

INSTANTIATE_TEST_SUITE_P(Catalog, EveryFormat, testing::ValuesIn(all_formats(true, true)), name_of);

class EveryPlainFormat : public EveryFormat {};

TEST_P(EveryPlainFormat, Nan_StaysNan) {
  std::vector<std::byte> row = row_of(1);
  format().encode(&kNan, 0, 1, row.data());
  float decoded = 0;
  format().decode(row.data(), 0, 1, &decoded);
  EXPECT_TRUE(std::isnan(decoded));
}

TEST_P(EveryPlainFormat, ItsType_IsPlain) { EXPECT_TRUE(is_plain(format().element)); }

INSTANTIATE_TEST_SUITE_P(Catalog, EveryPlainFormat, testing::ValuesIn(all_formats(false, true)),
                         name_of);

class EveryCodedFormat : public EveryFormat {
 protected:
  const CodeBook& codes() const { return *format().codes; }
  std::vector<float> finite_values() const {
    std::vector<float> all = exact_values(format());
    std::erase_if(all, [](float value) { return std::isinf(value); });
    std::sort(all.begin(), all.end());
    return all;
  }
};

TEST_P(EveryCodedFormat, ItsType_IsNotPlainAndItsParts_AreThere) {
  EXPECT_FALSE(is_plain(format().element));
  EXPECT_EQ(codes().element, format().element);
  ASSERT_NE(format().row_codes, nullptr);
  EXPECT_EQ(bit_size(format().row_codes->element), 8) << "rows have a code per byte";
  ASSERT_NE(format().takes, nullptr);
  EXPECT_TRUE(format().takes({.weights = WeightScale::kChannel, .zeros = WeightZero::kOffset}) ||
              format().takes({.weights = WeightScale::kChannel}));
}

TEST_P(EveryCodedFormat, Largest_IsTheLargestMagnitudeThatEverySignHas) {
  const std::vector<float> all = finite_values();
  EXPECT_EQ(all.back(), codes().largest);
  EXPECT_TRUE(all.front() == 0 || all.front() <= -codes().largest) << all.front();
  EXPECT_EQ(codes().decode(codes().encode(1e30F)), codes().largest);
  EXPECT_EQ(codes().decode(codes().encode(-1e30F)), all.front());
}

// The nearest of all values, ties to the one whose code ends in a zero.
TEST_P(EveryCodedFormat, NumbersInOrder_AreTheCodesFromTheLeastOn) {
  const CodeBook& codes = *format().codes;
  bool in_order = codes.whole.fit;
  for (int code = 0; code < 1 << bit_size(codes.element); ++code) {
    const float value = codes.decode(static_cast<uint8_t>(code));
    in_order = in_order && value == static_cast<float>(code + codes.whole.least);
  }
  EXPECT_EQ(codes.whole.in_order, in_order);
  const bool is_known = codes.element == DType::kI4 || codes.element == DType::kU4;
  EXPECT_TRUE(codes.whole.in_order || !is_known);
}

TEST_P(EveryCodedFormat, BetweenTwoValues_TheNearestIsTakenTiesToEven) {
  const std::vector<float> all = finite_values();
  for (size_t i = 0; i + 1 < all.size(); ++i) {
    const float low = all[i];
    const float high = all[i + 1];
    if (low == high) continue;  // the two zeros
    const double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2;
    const auto rounded = static_cast<float>(middle);
    const auto nearest = [&](float value) { return codes().decode(codes().encode(value)); };
    const float below = rounded < middle ? rounded : std::nextafter(rounded, low);
    const float above = rounded > middle ? rounded : std::nextafter(rounded, high);
    EXPECT_EQ(nearest(below), low) << low << " " << high;
    EXPECT_EQ(nearest(above), high) << low << " " << high;
    if (rounded == middle) {
      EXPECT_EQ(codes().encode(rounded) & 1U, 0U) << middle;
    }
  }
}

TEST_P(EveryCodedFormat, Nan_HasACodeOrNone) {
  EXPECT_EQ(std::isnan(codes().decode(codes().encode(kNan))), codes().has_nan);
}

// A value that is not finite must show in the row, by its code or by the scale.
TEST_P(EveryCodedFormat, RowsThatAreNotFinite_StayThat) {
  const CodeBook& row_codes = *format().row_codes;
  for (const ActivationScale form :
       {ActivationScale::kToken, ActivationScale::kGroup, ActivationScale::kTensorStatic}) {
    for (const float bad : {kNan, INFINITY, -INFINITY}) {
      const ActivationRule rule{.form = form, .static_scale = 0.5F, .codes = &row_codes};
      std::vector<float> row(130, 1.0F);
      row[129] = bad;
      std::vector<float> scales(static_cast<size_t>(scales_per_row(form, 130)));
      round_to_activation_codes(row.data(), 130, rule, scales.data());
      EXPECT_FALSE(std::isfinite(row[129] * scales.back())) << bad;
      if (scales.size() > 1) {
        EXPECT_TRUE(std::isfinite(row[0] * scales[0]));
      }
    }
  }
}

// Steps may be so small that quotients leave float32: such a code is that of any large value.
TEST_P(EveryCodedFormat, QuotientsBeyondFloat32_AreThoseOfLargeValues) {
  const CodeBook& row_codes = *format().row_codes;
  for (const float value : {10.0F, -10.0F}) {
    const uint8_t code = activation_code(row_codes, value, 1e-38F);
    EXPECT_EQ(code, row_codes.encode(std::copysign(1e30F, value)));
    EXPECT_EQ(code, activation_code(row_codes, value, 1e-30F));
  }
}

template <class... Formats>
void expect_device_rule(FormatList<Formats...>) {
  const auto expect_same = []<class Codes>(Codes) {
    for (const float step : {1e-45F, 1e-38F, 0x1p-20F, 0.037F, 1.0F, 1e30F}) {
      for (const float value : {0.0F, 1e-42F, -0.5F, 1.0F, 3.3F, -447.9F, 1e20F, -3e38F}) {
        EXPECT_EQ(row_code<Codes>(value, step), activation_code(kCodeBook<Codes>, value, step))
            << value << " / " << step;
      }
    }
    for (const float bad : {kNan, INFINITY, -INFINITY}) {
      const float found = Codes::decode(row_code<Codes>(bad, 0.5F));
      EXPECT_EQ(std::isnan(found), Codes::kHasNan) << bad;
    }
  };
  (expect_same(typename Formats::Rows{}), ...);
}
// Plain kernels on a device make codes by a function of their own.
TEST(CodedFormats, RowsOnADevice_HaveTheCodesOfTheRule) { expect_device_rule(CodedFormats{}); }

TEST_P(EveryCodedFormat, DynamicRows_UseEveryCode) {
  const CodeBook& row_codes = *format().row_codes;
  const ActivationRule rule{.form = ActivationScale::kToken, .codes = &row_codes};
  std::vector<float> row = {3.0F, -6.0F, 0.0F};
  float scale = 0;
  round_to_activation_codes(row.data(), 3, rule, &scale);
  EXPECT_EQ(scale, 6.0F / row_codes.largest);
  EXPECT_EQ(row[1], -row_codes.largest);
  EXPECT_EQ(row[2], 0.0F);
}

INSTANTIATE_TEST_SUITE_P(Catalog, EveryCodedFormat, testing::ValuesIn(all_formats(true, false)),
                         name_of);

// Every 16-bit code keeps its bits through decode and encode, except a signalling NaN.
TEST(SixteenBitFormats, EveryCode_RoundTripsThroughTheCodec) {
  struct Case {
    DType element;
    uint16_t infinity;
    uint16_t quiet;
  };
  for (const Case& c : {Case{DType::kF16, 0x7c00, 0x0200}, Case{DType::kBF16, 0x7f80, 0x0040}}) {
    const WeightFormat& format = format_of(c.element);
    std::vector<uint16_t> codes(0x10000);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
    std::vector<float> values(codes.size());
    std::vector<uint16_t> encoded(codes.size());
    const auto count = static_cast<int64_t>(codes.size());
    format.decode(reinterpret_cast<const std::byte*>(codes.data()), 0, count, values.data());
    format.encode(values.data(), 0, count, reinterpret_cast<std::byte*>(encoded.data()));
    for (size_t i = 0; i < codes.size(); ++i) {
      const bool nan = (codes[i] & 0x7fff) > c.infinity;
      const auto expected = static_cast<uint16_t>(nan ? codes[i] | c.quiet : codes[i]);
      ASSERT_EQ(encoded[i], expected) << std::hex << i;
    }
  }
}

TEST(FormatCatalog, NamesAndTypes_AreUniqueAndFindable) {
  const auto catalog = format_catalog();
  std::set<std::string_view> names;
  for (const WeightFormat& format : catalog.rows()) {
    EXPECT_TRUE(names.insert(format.name).second) << format.name;
    EXPECT_EQ(&catalog.find(format.name, "weight format"), &format);
    EXPECT_EQ(find_format(format.element), &format);
    EXPECT_NE(known_formats(true).find(to_string(format.element)), std::string::npos);
    EXPECT_EQ(known_formats(false).find(to_string(format.element)) == std::string::npos,
              format.codes != nullptr);
  }
}

TEST(FormatCatalog, PanelFormats_AreTheFormatsAndTypesThatNoTensorHas) {
  const auto catalog = format_catalog();
  for (const WeightFormat& format : panel_catalog().rows()) {
    EXPECT_EQ(find_panel_format(format.element), &format);
    const auto same = std::ranges::find(catalog.rows(), format.element, &WeightFormat::element);
    EXPECT_EQ(same == catalog.rows().end(), find_format(format.element) == nullptr);
  }
  for (const WeightFormat& format : catalog.rows()) {
    EXPECT_NE(find_panel_format(format.element), nullptr) << format.name;
  }
  EXPECT_EQ(find_format(DType::kI6), nullptr);
  ASSERT_NE(find_panel_format(DType::kI6), nullptr);
  EXPECT_TRUE(has_values_of(DType::kI8, DType::kI6));
  EXPECT_FALSE(has_values_of(DType::kI6, DType::kI8));
  EXPECT_TRUE(has_values_of(DType::kI6, DType::kU4));
}

TEST(FormatCatalog, KnownFormats_AreThoseOfPanelsAndNarrowerOnes) {
  for (const WeightFormat& format : panel_catalog().rows()) {
    EXPECT_NE(find_known_format(format.element), nullptr) << format.name;
  }
  EXPECT_EQ(find_panel_format(DType::kU2), nullptr);
  const WeightFormat* const small = find_known_format(DType::kU2);
  ASSERT_NE(small, nullptr);
  for (int code = 0; code < 4; ++code) {
    EXPECT_EQ(small->codes->decode(static_cast<uint8_t>(code)), static_cast<float>(code));
    EXPECT_EQ(small->codes->encode(static_cast<float>(code)), code);
  }
  for (const auto& [value, code] :
       {std::pair{-1.0F, 0}, {0.5F, 0}, {1.5F, 2}, {2.5F, 2}, {2.6F, 3}, {9.0F, 3}}) {
    EXPECT_EQ(small->codes->encode(value), code) << value;
  }
  for (const DType wider : {DType::kU4, DType::kI4, DType::kI6, DType::kI8}) {
    EXPECT_TRUE(has_values_of(wider, DType::kU2)) << to_string(wider);
    EXPECT_FALSE(has_values_of(DType::kU2, wider)) << to_string(wider);
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

TEST(FormatCatalog, OtherTypes_AreNoFormat) {
  for (const DType dtype : {DType::kBool, DType::kI32, DType::kF64, DType::kF8E8M0}) {
    EXPECT_EQ(find_format(dtype), nullptr) << to_string(dtype);
  }
}

}  // namespace
}  // namespace conclave::quant
