#include "dispatch/round_row.h"

#include <bit>

namespace conclave::inline v0::dispatch {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffU;
constexpr uint32_t kInfinity = 0x7f800000U;

uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0U - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

uint32_t bf16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t nan = (bits >> 16) | 0x40U;
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  return select((bits & kMagnitude) > kInfinity, nan, rounded);
}

uint32_t f16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  // Below 2^-14, adding 0.5 puts the unit of the last place at 2^-24, so that the FPU rounds.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
  const uint32_t subnormal = std::bit_cast<uint32_t>(shifted) - 0x3f000000U;
  uint32_t half = select(magnitude < 0x38800000U, subnormal, normal);
  // 65520 lies halfway between the largest finite f16 and 2^16; it and all above round to infinity.
  half = select(magnitude >= 0x477ff000U, 0x7c00U, half);
  half = select(magnitude > kInfinity, 0x7e00U | ((magnitude >> 13) & 0x1ffU), half);
  return half | ((bits >> 16) & 0x8000U);
}

}  // namespace

void round_to_f16(const float* __restrict values, int64_t count,
                  uint16_t* __restrict out) noexcept {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint16_t>(f16_bits(values[i]));
}

void round_to_bf16(const float* __restrict values, int64_t count,
                   uint16_t* __restrict out) noexcept {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint16_t>(bf16_bits(values[i]));
}

}  // namespace conclave::inline v0::dispatch
