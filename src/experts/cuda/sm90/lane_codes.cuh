// Weights whose products with their scales bf16 holds: codes of e2m1 in the order of lanes, and
// scales of a byte.
#pragma once

#include "experts/cuda/lane_codes.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// A weight as bf16 has it lacks a factor, which multiplies sums in the end. `kPowers`: scales are
// powers of two, else of e4m3; `kNear`: bytes are ByteForm::kNear.
template <bool kPowers, bool kNear>
class LaneCodes {
 public:
  static constexpr int kStepsOfScale = kPowers ? 2 : 1;  // a step has 16 columns

  // A scale in both halves, from its byte.
  static __device__ __forceinline__ uint32_t scale_of(uint32_t byte) {
    if constexpr (kPowers) {
      const uint32_t powers = byte * 0x00800080U;
      // An exponent of 0 is that of 2^-127, which is subnormal.
      return kNear ? powers : max(powers, 0x00400040U);
    } else if constexpr (kNear) {
      return byte * 0x00100010U + 0x76007600U;
    } else {
      // The bits of e4m3, as those of bf16, are 2^-120 times as much; 2^118 times is wanted.
      constexpr uint32_t kHalfWay = 0x7b007b00U;  // 2^119
      return multiply(multiply(byte * 0x00100010U, kHalfWay), kHalfWay);
    }
  }

  // The weights of a word's four pairs of codes, of which `first` scales two and `second` two.
  static __device__ __forceinline__ void weights_of(uint32_t word, uint32_t first, uint32_t second,
                                                    uint32_t (&weights)[4]) {
    constexpr uint32_t kSigns = 0x80008000U;
    constexpr uint32_t kOthers = 0x01c001c0U;
    weights[0] = word & (kSigns | kOthers);
    weights[1] = word << 3 & (kSigns | kOthers);
    weights[2] = (word << 1 & kSigns) | (word >> 3 & kOthers);
    weights[3] = (word << 2 & kSigns) | (word << 6 & kOthers);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The bits of e2m1 in their place are 2^-126 times their value.
      if constexpr (kPowers && !kNear) weights[i] = multiply(weights[i], 0x7d807d80U);  // 2^124
      weights[i] = multiply(weights[i], i < 2 ? first : second);
    }
  }

 private:
  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  }
};

}  // namespace conclave::inline v0::experts
