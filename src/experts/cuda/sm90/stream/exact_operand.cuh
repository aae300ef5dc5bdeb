// Weights that bf16 holds, made of codes and scales in the registers from which wgmma reads its A
// operand.
#pragma once

#include "experts/cuda/scale_bytes.h"
#include "experts/cuda/sm90/lane_codes.cuh"
#include "experts/cuda/sm90/stream/rounded_operand.cuh"

namespace conclave::inline v0::experts::stream {

template <class Config, bool kNear>
class ExactOperand {
 public:
  static constexpr bool kPowers = Config::kCodes.exact == ExactScales::kPowers;
  using Lane = LaneCodes<kPowers, kNear>;

  __device__ __forceinline__ ExactOperand(const Params& /*params*/,
                                          const SharedStorage<Config>& shared, int32_t warp,
                                          int32_t lane, bool /*gated*/)
      : shared_(shared), row_(16 * warp + lane / 4), pair_(lane % 4) {}

  // Makes weights of columns 64 atom to 64 atom + 63 of the stage in `slot`.
  __device__ __forceinline__ void decode(int32_t slot, int32_t atom, RoundedFragments& a) const {
    const uint8_t* const codes = shared_.weights[slot][0] + row_ * Config::kAtomBytes +
                                 ((2 * atom + pair_ / 2) ^ (row_ % 8)) * 16 + pair_ % 2 * 8;
    uint32_t words[2][2];  // two rows have these, the second eight below
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint2 both = *reinterpret_cast<const uint2*>(codes + row * 8 * Config::kAtomBytes);
      words[row][0] = both.x;
      words[row][1] = both.y;
    }
    const uint8_t* scales =
        shared_.codes.factors[slot] + row_ +
        atom * (RoundedFragments::kSteps / Lane::kStepsOfScale) * Config::kWeightRows;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint8_t* const of_row = scales + row * 8;
        const uint32_t first = Lane::scale_of(of_row[0]);
        const uint32_t second = kPowers ? first : Lane::scale_of(of_row[Config::kWeightRows]);
        uint32_t weights[4];
        Lane::weights_of(words[row][word], first, second, weights);
#pragma unroll
        for (int i = 0; i < 4; ++i) a.step[2 * word + i / 2][i % 2 * 2 + row] = weights[i];
      }
      scales += 2 / Lane::kStepsOfScale * Config::kWeightRows;
    }
  }

 private:
  const SharedStorage<Config>& shared_;
  int32_t row_;
  int32_t pair_;  // the thread has columns 2 pair and 2 pair + 1 of each eight
};

}  // namespace conclave::inline v0::experts::stream
