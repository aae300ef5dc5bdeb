// Codes of 4 bits that stand for whole numbers in their order, CodeOrder::kLanesOfNumbers, become
// bf16 without a table.
#pragma once

#include <cstdint>

namespace conclave::inline v0::experts {

// A word's four pairs of codes as the bits of bf16 numbers: a byte n is n 2^-133, and codes of odd
// pairs have four zeros behind them.
struct LaneCodeBits {
  uint32_t of[4];

  __device__ __forceinline__ explicit LaneCodeBits(uint32_t word)
      : of{word & kLower, word & kUpper, word >> 8 & kLower, word >> 8 & kUpper} {}

  static constexpr uint32_t kLower = 0x000f000fU;
  static constexpr uint32_t kUpper = 0x00f000f0U;
};

__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum = 0;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// A product and a sum make a code the number that it stands for. Both are exact. The numbers have a
// unit, by which sums of them are multiplied in the end.
class CodesInOrder {
 public:
  static constexpr float kUnit = 64;

  // `least` is what code 0 stands for.
  __device__ __forceinline__ explicit CodesInOrder(int32_t least)
      : least_(in_units(static_cast<float>(least))) {}

  // A zero point of bf16 in the same unit, in both halves.
  static __device__ __forceinline__ uint32_t zero_of(uint16_t zero) {
    return in_units(__uint_as_float(uint32_t{zero} << 16));
  }

  // The numbers of a word's four pairs of codes.
  __device__ __forceinline__ void of_word(uint32_t word, uint32_t (&numbers)[4]) const {
    const LaneCodeBits codes(word);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      numbers[i] = multiply_add(codes.of[i], i % 2 == 0 ? 0x7f007f00U : 0x7d007d00U, least_);
    }
  }

 private:
  // `number` is one of bf16.
  static __device__ __forceinline__ uint32_t in_units(float number) {
    return __byte_perm(__float_as_uint(number / kUnit), 0, 0x3232);
  }

  uint32_t least_;
};

// The numbers of two codes, in units of CodesInOrder. A byte n in the place of bf16 is n 2^-133,
// and the numbers plus 128 are such bytes. A product and a sum, both exact, make these the numbers.
__device__ __forceinline__ uint32_t numbers_of_bytes(uint32_t codes) {
  constexpr uint32_t kLeast = 0xc000c000U;  // -128
  static_assert(CodesInOrder::kUnit == 64);
  const uint32_t bytes = __byte_perm(codes, 0, 0x4140) ^ 0x00800080U;
  return multiply_add(bytes, 0x7f007f00U, kLeast);
}

// The weights of such codes where is_short_scale holds: they need no more than a sum of the bits'
// product, which is rounded once.
class ShortWeights {
 public:
  // Weights are 2^-64 times as much.
  static constexpr float kUnit = 0x1p64F;

  ShortWeights() = default;
  // All products are exact.
  __device__ __forceinline__ ShortWeights(float scale, int32_t least)
      : ShortWeights(in_both(scale), in_both(0x1p-64F * static_cast<float>(least))) {}

  __device__ __forceinline__ void of_word(uint32_t word, uint32_t (&weights)[4]) const {
    const LaneCodeBits codes(word);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = multiply_add(codes.of[i], i % 2 == 0 ? lower_ : upper_, least_);
    }
  }

 private:
  __device__ __forceinline__ ShortWeights(uint32_t scales, uint32_t leasts)
      : lower_(multiply(scales, 0x62006200U)),  // 2^69
        upper_(multiply(scales, 0x60006000U)),  // 2^65
        least_(multiply(scales, leasts)) {}

  static __device__ __forceinline__ uint32_t in_both(float number) {
    return __byte_perm(__float_as_uint(number), 0, 0x3232);
  }
  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  }

  uint32_t lower_;
  uint32_t upper_;
  uint32_t least_;
};

}  // namespace conclave::inline v0::experts
