#include "experts/cuda/scale_bytes.h"

#include "core/float8.h"
#include "quant/scale_type.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace conclave::inline v0::experts {
namespace {

// How far powers may lie apart: half of a code's unit, 2^-133, is the smallest number of bf16.
constexpr int32_t kMostDistance = 132;

// The byte that stands for a power of two; one beyond bytes if the scale is none.
constexpr uint32_t kNone = 0x100;
uint32_t byte_of_power(float scale) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  constexpr uint32_t kSubnormal = 0x00400000U;  // 2^-127
  if (bits == kSubnormal) return 0;
  const bool is_power = (bits & 0x007fffffU) == 0 && bits != 0 && bits < 0x7f800000U;
  return is_power ? bits >> 23 : kNone;
}

// ByteForm::kNear of a number that is not 0: an exponent from that of the smallest one on, and
// three bits of mantissa.
uint8_t near_byte(float scale) {
  constexpr uint32_t kLeastExponent = 127 - 9;
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  return static_cast<uint8_t>((bits >> 20) - (kLeastExponent << 3));
}

}  // namespace

ScaleBytes::ScaleBytes(ScaleValues values, ByteForm form, std::span<const float> scales)
    : values_(values), form_(form) {
  if (values == ScaleValues::kFloat8) {
    // A weight is 2^-8 times as much: a code's bits are 2^-126 times its value, a scale 2^118.
    sum_factor_ = 0x1p8F;
    fit_ = form == ByteForm::kAsStored || std::ranges::find(scales, 0.0F) == scales.end();
    return;
  }
  if (form == ByteForm::kAsStored) {
    sum_factor_ = 4.0F;
    return;
  }
  if (scales.empty()) return;
  const auto [least, most] = std::ranges::minmax(scales);
  largest_ = static_cast<int32_t>(byte_of_power(most));
  span_ = largest_ - static_cast<int32_t>(byte_of_power(least));
  fit_ = span_ <= kMostDistance;
  sum_factor_ = std::ldexp(1.0F, largest_ - 128);
}

uint8_t ScaleBytes::of(float scale) const {
  if (values_ == ScaleValues::kPowerOfTwo) {
    const auto stored = static_cast<int32_t>(byte_of_power(scale));
    return static_cast<uint8_t>(form_ == ByteForm::kAsStored ? stored
                                                             : kMostNear - (largest_ - stored));
  }
  if (scale == 0) return 0;  // without its sign
  if (form_ == ByteForm::kNear) return near_byte(scale);
  return quant::format_of(quant::type_of_scales(values_)).codes->encode(scale);
}

bool has_scale(ScaleValues values, float scale) {
  if (values == ScaleValues::kPowerOfTwo) return byte_of_power(scale) != kNone;
  const quant::CodeBook& codes = *quant::format_of(quant::type_of_scales(values)).codes;
  return codes.decode(codes.encode(scale)) == scale;
}

}  // namespace conclave::inline v0::experts
