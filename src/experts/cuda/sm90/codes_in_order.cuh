// Codes of 4 bits that stand for whole numbers in their order become bf16 without a table.
#pragma once

#include <cstdint>

namespace conclave::inline v0::experts {

// A byte n, taken as the bits of a bf16 number, is n 2^-133: a product and a sum make its two codes
// the numbers that they stand for. Both are exact. The numbers have a unit, by which sums of them
// are multiplied in the end.
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

  // Both numbers of byte `byte` of `codes`, the lower code in the lower half.
  __device__ __forceinline__ uint32_t of_byte(uint32_t codes, uint32_t byte) const {
    uint32_t both = 0;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(both) : "r"(codes), "r"(0x4040U + byte * 0x101U));
    // The upper code has four zeros behind it.
    constexpr uint32_t kScales = 0x7d007f00U;  // 2^123 and 2^127
    uint32_t numbers = 0;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(numbers)
        : "r"(both & 0x00f0000fU), "r"(kScales), "r"(least_));
    return numbers;
  }

 private:
  // `number` is one of bf16.
  static __device__ __forceinline__ uint32_t in_units(float number) {
    return __byte_perm(__float_as_uint(number / kUnit), 0, 0x3232);
  }

  uint32_t least_;
};

}  // namespace conclave::inline v0::experts
