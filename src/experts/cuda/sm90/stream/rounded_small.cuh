// Codes of 2 bits become weights of bf16, rounded once with their steps and units.
#pragma once

#include "experts/cuda/sm90/factor_steps.cuh"
#include "experts/cuda/sm90/stream/small_operand.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

template <class Config>
inline constexpr bool kRoundsSmallCodes = are_small(Config::kCodes) && Config::kRounds;

template <class Config>
  requires kRoundsSmallCodes<Config>
class RoundedOperand<Config, false> {
 public:
  static constexpr float kUnit = 1.0F;

  __device__ __forceinline__ RoundedOperand(const Params& /*params*/,
                                            const SharedStorage<Config>& shared, int32_t warp,
                                            int32_t lane, bool gated)
      : shared_(shared),
        factors_(shared, warp, lane, gated),
        pair_(lane % 4),
        row_(16 * warp + lane / 4) {}

  // Decodes columns 64 atom to 64 atom + 63 of the stage in `slot`.
  __device__ __forceinline__ void decode(int32_t slot, int32_t atom, RoundedFragments& a) const {
    const SmallLaneWords<Config> words(shared_, slot, atom, row_, pair_);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const SmallCodes codes = words.of(row);
      const uint32_t steps = factors_.steps(slot, atom, row);
      // Codes are in units of CodesInOrder.
      const float2 unit = factors_.unit(slot, row);
      const StepNumbers scales(steps, unit.x * CodesInOrder::kUnit);
      const StepNumbers offsets(steps >> 4, -unit.y);
#pragma unroll
      for (int step = 0; step < SmallCodes::kSteps; ++step) {
        const ScaleAndShift group(scales.of(step), offsets.of(step));
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          a.step[step][2 * pair + row] = group.weights_of(codes.numbers(step, pair));
        }
      }
    }
  }

 private:
  // The numbers of four groups' scales or offsets.
  class StepNumbers {
   public:
    // The lower half of each byte is a step.
    __device__ __forceinline__ StepNumbers(uint32_t steps, float unit)
        : steps_(steps & 0x0f0f0f0fU), unit_(unit), raised_(-0x1p23F * unit) {}

    // A step behind 2^23 is a number of float32; one rounding leaves the product exact.
    __device__ __forceinline__ float of(int step) const {
      return fmaf(__uint_as_float(__byte_perm(steps_, 0x4b000000U, 0x7650 + step)), unit_, raised_);
    }

   private:
    uint32_t steps_;
    float unit_;
    float raised_;
  };

  const SharedStorage<Config>& shared_;
  SmallFactors<Config> factors_;
  int32_t pair_;  // the thread has columns 2 pair and 2 pair + 1 of each eight
  int32_t row_;   // the second one is eight below
};

}  // namespace conclave::inline v0::experts::stream
