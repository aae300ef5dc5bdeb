// The values of codes that kernels for tensor cores look up.
#include "experts/cuda/sm90/code_values.h"

#include "core/float_convert.h"
#include "core/weight_types.h"
#include "quant/weight_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

namespace conclave {
namespace {

// The most that a value loses in one term, and in two, relative to it.
struct Loss {
  double of_one = 0;
  double of_two = 0;
};
Loss loss_of(DType dtype) {
  const quant::CodeBook& codes = *quant::format_of(dtype).codes;
  const experts::Bf16Values values = experts::bf16_values(dtype);
  Loss loss;
  for (int code = 0; code < 1 << bit_size(dtype); ++code) {
    const double value = codes.decode(static_cast<uint8_t>(code));
    if (!std::isfinite(value)) continue;
    const double first = bf16_to_float(static_cast<uint16_t>(values.of[code]));
    const double second = bf16_to_float(static_cast<uint16_t>(values.of[code] >> 16));
    EXPECT_EQ(first == 0, value == 0) << code;
    if (value == 0) continue;
    const auto unit = static_cast<double>(values.unit);
    loss.of_one = std::max(loss.of_one, std::abs(first * unit / value - 1));
    loss.of_two = std::max(loss.of_two, std::abs((first + second) * unit / value - 1));
  }
  return loss;
}

TEST(CodeValues, ThatBf16Holds_StayAsTheyAre) {
  for (const quant::WeightFormat& format : quant::format_catalog().rows()) {
    if (format.codes == nullptr || !format.codes->exact_in_bf16) continue;
    SCOPED_TRACE(std::string(format.name));
    EXPECT_FALSE(experts::takes_two_terms(format.element));
    EXPECT_EQ(experts::bf16_values(format.element).unit, 1.0F);
    EXPECT_EQ(loss_of(format.element).of_one, 0.0);
  }
}

// bf16 holds three times its values, which are thirds; the unit is rounded to float32.
TEST(CodeValues, Fp4OfBitsandbytes_TakesOneTermInAUnit) {
  EXPECT_FALSE(experts::takes_two_terms(DType::kBnbFP4));
  EXPECT_EQ(experts::bf16_values(DType::kBnbFP4).unit, 1.0F / 3);
  EXPECT_LT(loss_of(DType::kBnbFP4).of_one, 0x1p-23);
}

TEST(CodeValues, Nf4_TakesTwoTerms) {
  EXPECT_TRUE(experts::takes_two_terms(DType::kNF4));
  EXPECT_EQ(experts::bf16_values(DType::kNF4).unit, 1.0F);
  EXPECT_LT(loss_of(DType::kNF4).of_two, 0x1p-17);
}

TEST(CodeValues, NanStaysNan) {
  const experts::Bf16Values values = experts::bf16_values(DType::kF8E4M3);
  EXPECT_TRUE(std::isnan(bf16_to_float(static_cast<uint16_t>(values.of[0x7f]))));
}

}  // namespace
}  // namespace conclave
