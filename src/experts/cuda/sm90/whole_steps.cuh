// Steps of scales and offsets as numbers of bf16, which multiply codes in their order or rows.
#pragma once

#include "experts/cuda/sm90/codes_in_order.cuh"

#include <cstdint>

namespace conclave::inline v0::experts {

// Bf16 holds the products of all codes and of small steps (short_scales.h). Larger steps are two
// numbers each, of their upper and their lower four bits, which are multiplied one after the other:
// products with either are exact.
struct StepPart {
  uint32_t mask;   // leaves the part's bits of two steps
  uint32_t least;  // what 0 stands for, in units of CodesInOrder, in both halves

  // `index` is below `count`, which is 1 or 2.
  __device__ __forceinline__ StepPart(int32_t index, int32_t count)
      : mask(count == 1   ? 0x00ff00ffU
             : index == 0 ? 0x00f000f0U
                          : 0x000f000fU),
        least(index == 0 ? 0xc000c000U : 0U) {
    static_assert(CodesInOrder::kUnit == 64);
  }
};

// The numbers of two steps, each 128 more in the lower byte of a half, in units of CodesInOrder.
__device__ __forceinline__ uint32_t numbers_of_steps(uint32_t steps, const StepPart& part) {
  return multiply_add(steps & part.mask, 0x7f007f00U, part.least);
}

// Scales of two groups that follow each other: of a pair of them, or of each one's scale and
// offset.
__device__ __forceinline__ uint32_t steps_of_pair(uint32_t pair) {
  return __byte_perm(pair, 0, 0x4140);
}
__device__ __forceinline__ uint32_t steps_of_pairs(uint32_t first, uint32_t second, bool offsets) {
  return __byte_perm(first, second, offsets ? 0x2521 : 0x2420);
}

// A number of both in both halves.
__device__ __forceinline__ uint32_t lower_in_both(uint32_t numbers) {
  return __byte_perm(numbers, 0, 0x1010);
}
__device__ __forceinline__ uint32_t upper_in_both(uint32_t numbers) {
  return __byte_perm(numbers, 0, 0x3232);
}

// The products of a pair of bf16 numbers and the lower or the upper one of another: instructions
// take a half in the place of both.
template <int kHalf>
__device__ __forceinline__ uint32_t multiply_by_half(uint32_t a, uint32_t b) {
  uint32_t products = 0;
  if constexpr (kHalf == 0) {
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\n"
        "mov.b32 both, {low, low};\nmul.rn.bf16x2 %0, %1, both;\n}"
        : "=r"(products)
        : "r"(a), "r"(b));
  } else {
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\n"
        "mov.b32 both, {high, high};\nmul.rn.bf16x2 %0, %1, both;\n}"
        : "=r"(products)
        : "r"(a), "r"(b));
  }
  return products;
}

// The products of two pairs of bf16 numbers.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t products = 0;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
  return products;
}

}  // namespace conclave::inline v0::experts
