// Codes of 2 bits in CodeOrder::kLanesOfSmallNumbers, and their steps, become bf16 without a table.
#pragma once

#include "experts/cuda/sm90/whole_steps.cuh"

#include <cstdint>

namespace conclave::inline v0::experts {

// A thread's codes of 64 columns of a row: for each 16 of these, two pairs.
class SmallCodes {
 public:
  static constexpr int kSteps = 4;  // each has 16 columns

  __device__ __forceinline__ explicit SmallCodes(uint32_t word) : halves_{word, word >> 8} {}

  // A pair as bits of bf16 numbers, with 4^step 2^-133 as unit. `pair` is 0 or 1.
  __device__ __forceinline__ uint32_t bits(int step, int pair) const {
    return halves_[pair] & 0x00030003U << 2 * step;
  }
  // The same as numbers, in units of CodesInOrder.
  __device__ __forceinline__ uint32_t numbers(int step, int pair) const {
    return multiply_pairs(bits(step, pair), 0x7f007f00U - 0x01000100U * step);
  }

 private:
  uint32_t halves_[2];
};

// Steps of four groups of 16 columns, a byte each: the scale's in the lower half, the offset's in
// the upper one.
class SmallSteps {
 public:
  // Products of a pair's bits and a scale are in units of this.
  static constexpr float kUnit = 0x1p13F;

  __device__ __forceinline__ explicit SmallSteps(uint32_t word) : scales_(word & 0x0f0f0f0fU) {}

  // The scales of steps 2 `pair` and 2 `pair` + 1, for SmallCodes::bits of the same steps: 2^120
  // 4^-step times as much. 128 and a number below that are in one byte behind a number's exponent.
  __device__ __forceinline__ uint32_t scale_pair(int pair) const {
    const uint32_t raised = __byte_perm(scales_, 0x43434343U, 0x4140U + 0x0202U * pair);
    return multiply_add(raised, pair == 0 ? 0x7a807b80U : 0x78807980U,
                        pair == 0 ? 0xfe00ff00U : 0xfc00fd00U);
  }

  // The offsets of two groups, from their bytes, in units of CodesInOrder.
  static __device__ __forceinline__ uint32_t offsets(uint32_t bytes) {
    return multiply_pairs(__byte_perm(bytes, 0, 0x4140) & 0x00f000f0U, 0x7d007d00U);
  }

 private:
  uint32_t scales_;
};

}  // namespace conclave::inline v0::experts
