// Weights that bf16 holds, made of codes and scales in the registers from which wgmma reads its A
// operand.
#pragma once

#include "experts/cuda/scale_bytes.h"
#include "experts/cuda/sm90/lane_codes.cuh"
#include "experts/cuda/sm90/stream/lane_words.cuh"
#include "experts/cuda/sm90/stream/rounded_operand.cuh"

namespace conclave::inline v0::experts::stream {

template <class Config, bool kNear>
class ExactOperand {
 public:
  static constexpr float kUnit = 1.0F;  // sums have factors of their own
  static constexpr bool kPowers = Config::kCodes.exact == ExactScales::kPowers;
  using Lane = LaneCodes<kPowers, kNear>;

  __device__ __forceinline__ ExactOperand(const Params& /*params*/,
                                          const SharedStorage<Config>& shared, int32_t warp,
                                          int32_t lane, bool /*gated*/)
      : shared_(shared), row_(16 * warp + lane / 4), pair_(lane % 4) {}

  // Makes weights of columns 64 atom to 64 atom + 63 of the stage in `slot`.
  __device__ __forceinline__ void decode(int32_t slot, int32_t atom, RoundedFragments& a) const {
    const LaneWords<Config> words(shared_, slot, atom, row_, pair_);
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
        Lane::weights_of(words.of(row, word), first, second, weights);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const FragmentPlace place = fragment_of(word, row, i);
          a.step[place.step][place.element] = weights[i];
        }
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
