#include "quant/scale_type.h"

#include "core/float8.h"
#include "quant/code_quotient.h"
#include "quant/plane_types.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>

namespace conclave::inline v0::quant {
namespace {

// No format of weights has this type: it has no sign, no zero and no fractions.
constexpr bool is_exponent(DType dtype) { return dtype == DType::kF8E8M0; }

uint8_t exponent_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint8_t>(bits >> 23);
}

// Scales of these types are known to be more than floats.
struct NarrowScale {
  DType type;
  ScaleValues values;
};
constexpr std::array kNarrowScales = {NarrowScale{DType::kF8E8M0, ScaleValues::kPowerOfTwo},
                                      NarrowScale{DType::kF8E4M3, ScaleValues::kFloat8},
                                      NarrowScale{DType::kF16, ScaleValues::kF16}};

using Bytes = std::array<std::byte, sizeof(float)>;

float decode(DType dtype, const Bytes& bytes) {
  float value = 0;
  format_of(dtype).decode(bytes.data(), 0, 1, &value);
  return value;
}

// The pattern of the smallest positive number is 1 in every type.
float smallest(DType dtype) { return decode(dtype, {std::byte{1}}); }

}  // namespace

Support is_scale_type(DType dtype) {
  const std::span<const DType> types = types_of(PlaneType::kScale);
  if (std::ranges::find(types, dtype) != types.end()) return Support::yes();
  return Support::no("scales are never " + std::string(to_string(dtype)));
}

DType scale_type_of(DType codes, const QuantSpec& quant, DType stored) {
  const WeightFormat* const format = find_format(codes);
  const bool of_floats =
      format != nullptr && format->codes != nullptr && format->codes->mantissa_bits.has_value();
  const bool are_exponents = stored == DType::kU8 && of_floats && !quant.has_global_scale;
  return are_exponents ? DType::kF8E8M0 : stored;
}

ScaleValues values_of_scales(DType dtype) {
  const auto* const found = std::ranges::find(kNarrowScales, dtype, &NarrowScale::type);
  return found == kNarrowScales.end() ? ScaleValues::kFloat : found->values;
}

DType type_of_scales(ScaleValues values) {
  const auto* const found = std::ranges::find(kNarrowScales, values, &NarrowScale::values);
  return found == kNarrowScales.end() ? DType::kF32 : found->type;
}

float scale_of_byte(DType type, uint8_t byte) {
  return is_exponent(type) ? e8m0_to_float(byte) : format_of(type).codes->decode(byte);
}

float largest_scale(DType dtype) {
  if (is_exponent(dtype)) return 0x1p127F;
  const WeightFormat& format = format_of(dtype);
  if (format.codes != nullptr) return format.codes->largest;
  constexpr float kMost = std::numeric_limits<float>::max();
  // The pattern before infinity's.
  Bytes bytes{};
  format.encode(&kMost, 0, 1, bytes.data());
  const float rounded = decode(dtype, bytes);
  if (std::isfinite(rounded)) return rounded;
  const bool borrow = bytes[0] == std::byte{0};
  bytes[0] = static_cast<std::byte>(static_cast<uint8_t>(bytes[0]) - 1);
  if (borrow) bytes[1] = static_cast<std::byte>(static_cast<uint8_t>(bytes[1]) - 1);
  return decode(dtype, bytes);
}

float round_scale(DType dtype, float value) {
  if (value == 0) return 1.0F;
  if (is_exponent(dtype)) {
    // step_of stops at the smallest normal power; a code lies below it.
    if (value <= 0x1p-127F) return 0x1p-127F;
    return std::min(step_of(value, 1.0F, true), 0x1p127F);
  }
  const float within = std::min(value, largest_scale(dtype));
  Bytes bytes{};
  format_of(dtype).encode(&within, 0, 1, bytes.data());
  const float rounded = decode(dtype, bytes);
  return rounded == 0 ? smallest(dtype) : rounded;
}

void append_scales(DType dtype, std::span<const float> scales, std::vector<std::byte>& bytes) {
  const size_t begin = bytes.size();
  if (is_exponent(dtype)) {
    for (const float scale : scales) bytes.push_back(static_cast<std::byte>(exponent_of(scale)));
    return;
  }
  bytes.resize(begin + scales.size() * static_cast<size_t>(byte_size(dtype)));
  format_of(dtype).encode(scales.data(), 0, static_cast<int64_t>(scales.size()),
                          bytes.data() + begin);
}

}  // namespace conclave::inline v0::quant
