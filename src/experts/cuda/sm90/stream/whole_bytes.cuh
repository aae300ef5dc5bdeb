// Codes of a byte that are whole numbers in the complement of two become bf16 without a table.
#pragma once

#include "experts/cuda/sm90/codes_in_order.cuh"
#include "experts/cuda/sm90/stream/code_operand.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// Config::kCodes.in_order beside 8 bits, with offsets: codes are int8, as they are stored.
template <class Config>
inline constexpr bool kIsWholeBytes =
    Config::kCodeBits == 8 && Config::kCodes.in_order && Config::kCodes.offsets;

template <class Config>
  requires kIsWholeBytes<Config>
class CodeOperand<Config> {
 public:
  using Fragments = CodeFragments<1>;

  __device__ __forceinline__ CodeOperand(const Params& /*params*/,
                                         const SharedStorage<Config>& shared, int32_t warp,
                                         int32_t lane, bool /*gated*/)
      : shared_(shared), row_(16 * warp + lane / 4), pair_(lane % 4) {}

  // Decodes columns 64 atom to 64 atom + 63 of the stage in `slot`.
  __device__ __forceinline__ void decode(int32_t slot, int atom, Fragments& a) const {
    const uint8_t* const codes = shared_.weights[slot][0] + row_ * Config::kAtomBytes + 2 * pair_;
#pragma unroll
    for (int step = 0; step < Fragments::kSteps; ++step) {
      const uint8_t* const chunk = codes + ((4 * atom + step) ^ (row_ % 8)) * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a.step[step][0][i] = numbers_of_bytes(
            *reinterpret_cast<const uint16_t*>(chunk + i % 2 * 8 * Config::kAtomBytes + i / 2 * 8));
      }
    }
  }

 private:
  const SharedStorage<Config>& shared_;
  int32_t row_;   // the thread's first row; the second is eight rows below
  int32_t pair_;  // the thread has columns 2 pair and 2 pair + 1 of each eight
};

}  // namespace conclave::inline v0::experts::stream
