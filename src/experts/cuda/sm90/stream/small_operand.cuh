// Weights that are codes of 2 bits in order times steps of 16 columns, in the registers from which
// wgmma reads its A operand, as in step_operand.cuh.
#pragma once

#include "experts/cuda/sm90/small_codes.cuh"
#include "experts/cuda/sm90/stream/rounded_operand.cuh"

#include <cstdint>
#include <cuda_fp16.h>

namespace conclave::inline v0::experts::stream {

// Steps and units of a thread's two rows.
template <class Config>
class SmallFactors {
 public:
  __device__ __forceinline__ SmallFactors(const SharedStorage<Config>& shared, int32_t warp,
                                          int32_t lane, bool gated)
      : shared_(shared),
        first_(gated ? 8 * warp + lane / 4 : 16 * warp + lane / 4),
        second_(gated ? first_ + Config::kWeightRows / 2 : first_ + 8) {}

  // Those of the four groups of the stage's atom in `slot`.
  __device__ __forceinline__ uint32_t steps(int32_t slot, int32_t atom, int row) const {
    return reinterpret_cast<const uint32_t*>(
        shared_.codes.factors[slot])[atom * Config::kWeightRows + row_of(row)];
  }
  // Offsets of two groups, of which the first is even, as numbers.
  __device__ __forceinline__ uint32_t offsets(int32_t slot, int32_t group, int row) const {
    const uint8_t* const word =
        shared_.codes.factors[slot] + (group / 4 * Config::kWeightRows + row_of(row)) * 4;
    return SmallSteps::offsets(*reinterpret_cast<const uint16_t*>(word + group % 4));
  }

  // Units of the scales and of the offsets of the thread's two rows.
  struct Units {
    float2 scales;
    float2 offsets;
  };
  __device__ __forceinline__ Units units(int32_t slot) const {
    const float2 first = unit(slot, 0);
    const float2 second = unit(slot, 1);
    return {.scales = {first.x, second.x}, .offsets = {first.y, second.y}};
  }
  // A scale's and an offset's.
  __device__ __forceinline__ float2 unit(int32_t slot, int row) const {
    return __half22float2(reinterpret_cast<const __half2*>(
        shared_.codes.factors[slot] + decltype(shared_.codes)::kUnitsAt)[row_of(row)]);
  }

 private:
  __device__ __forceinline__ int32_t row_of(int row) const { return row == 0 ? first_ : second_; }

  const SharedStorage<Config>& shared_;
  int32_t first_;
  int32_t second_;
};

// A thread's codes of 64 columns of two weight rows, the second eight below the first. Rows have 64
// bytes of a stage, whose chunks of 16 are swizzled by every second row.
template <class Config>
class SmallLaneWords {
 public:
  __device__ __forceinline__ SmallLaneWords(const SharedStorage<Config>& shared, int32_t slot,
                                            int32_t atom, int32_t row, int32_t pair)
      : codes_(shared.weights[slot][0] + row * Config::kLineBytes + (atom ^ row / 2 % 4) * 16 +
               pair * 4) {
    static_assert(Config::kLineBytes == 64 && Config::kAtoms == 4);
  }
  __device__ __forceinline__ SmallCodes of(int row) const {
    return SmallCodes(*reinterpret_cast<const uint32_t*>(codes_ + row * 8 * Config::kLineBytes));
  }

 private:
  const uint8_t* codes_;
};

template <class Config>
class SmallOperand {
 public:
  using Factors = SmallFactors<Config>;
  static constexpr float kUnit = SmallSteps::kUnit;  // sums of products have it
  static_assert(Config::kCodes.offsets);

  __device__ __forceinline__ SmallOperand(const Params& /*params*/,
                                          const SharedStorage<Config>& shared, int32_t warp,
                                          int32_t lane, bool gated)
      : shared_(shared),
        factors_(shared, warp, lane, gated),
        pair_(lane % 4),
        row_(16 * warp + lane / 4) {}

  __device__ __forceinline__ const Factors& factors() const { return factors_; }
  static __device__ __forceinline__ int32_t parts(const Params& /*params*/) { return 1; }

  // Makes weights of columns 64 atom to 64 atom + 63 of the stage in `slot`.
  __device__ __forceinline__ void decode(int32_t slot, int32_t atom, const StepPart& /*part*/,
                                         RoundedFragments& a) const {
    const SmallLaneWords<Config> words(shared_, slot, atom, row_, pair_);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const SmallCodes codes = words.of(row);
      const SmallSteps steps(factors_.steps(slot, atom, row));
#pragma unroll
      for (int step = 0; step < SmallCodes::kSteps; step += 2) {
        const uint32_t scales = steps.scale_pair(step / 2);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          a.step[step][2 * pair + row] = multiply_by_half<0>(codes.bits(step, pair), scales);
          a.step[step + 1][2 * pair + row] =
              multiply_by_half<1>(codes.bits(step + 1, pair), scales);
        }
      }
    }
  }

 private:
  const SharedStorage<Config>& shared_;
  Factors factors_;
  int32_t pair_;  // the thread has columns 2 pair and 2 pair + 1 of each eight
  int32_t row_;   // the second one is eight below
};

}  // namespace conclave::inline v0::experts::stream
