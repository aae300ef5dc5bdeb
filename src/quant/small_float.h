// Floats of fewer than 8 bits without infinity and NaN, whose largest exponent has values too: OCP
// Microscaling Formats 1.0.
#pragma once

#include <bit>
#include <cstdint>

namespace conclave::inline v0::quant {

template <int kExponent, int kMantissa>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t kSign = uint32_t{1} << (kExponent + kMantissa);
  // The exponent of float32 where the type's own begins.
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr int kDropped = 23 - kMantissa;
  static constexpr uint32_t kLargestBits = kRebias + ((kSign - 1) << kDropped);

  static constexpr float decode(uint8_t code) {
    const uint32_t magnitude = code & (kSign - 1);
    const uint32_t sign = (code & kSign) != 0 ? 0x80000000U : 0;
    // The bits are in place but the exponent is too small: exact for subnormal codes as well.
    const float scale = std::bit_cast<float>(static_cast<uint32_t>(254 - kBias) << 23);
    const float value = std::bit_cast<float>(magnitude << kDropped) * scale;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  // NaN becomes 0.
  static constexpr uint8_t encode(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 31) != 0 ? kSign : 0;
    const uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return 0;
    if (magnitude >= kLargestBits) return static_cast<uint8_t>(sign | (kSign - 1));
    if (magnitude < kRebias + (uint32_t{1} << 23)) {
      // Below the smallest normal value: adding this puts the unit of float32's last place at that
      // of the type's, so the FPU rounds for us.
      constexpr uint32_t kShift = kRebias + (static_cast<uint32_t>(kDropped + 1) << 23);
      const float shifted = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kShift);
      return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - kShift));
    }
    const uint32_t half = (uint32_t{1} << (kDropped - 1)) - 1;
    const uint32_t rounding = half + ((magnitude >> kDropped) & 1U);
    return static_cast<uint8_t>(sign | ((magnitude + rounding - kRebias) >> kDropped));
  }
};

}  // namespace conclave::inline v0::quant
