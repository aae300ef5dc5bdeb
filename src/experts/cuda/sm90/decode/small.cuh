// Boxes of codes of 2 bits: weights are whole numbers, as in steps.cuh, and units multiply sums of
// 256 columns.
#pragma once

#include "experts/cuda/sm90/decode/lanes.cuh"
#include "experts/cuda/sm90/small_codes.cuh"

#include <cstdint>
#include <cuda_fp16.h>

namespace conclave::inline v0::experts::decode {

// Steps of a unit's first four groups, of the lane's first row, and its unit.
struct SmallFactors {
  const uint32_t* steps;
  const __half2* units;  // a scale's and an offset's
  int rows;              // from a word's steps to the next
};

inline constexpr int kTurnsOfUnit = 256 / (16 * kStepsOfTurn);

// The codes of a turn of the lane's row `row` of a product. A turn is 16 bytes of a line, in whose
// swizzle all bits of it lie.
__device__ __forceinline__ SmallCodes small_codes(const LaneBox& box, const Thread& me, int turn,
                                                  int product, int row) {
  return SmallCodes(
      *reinterpret_cast<const uint32_t*>(box.codes + product * static_cast<int>(kProductBytes) +
                                         row * 1024 + (turn ^ me.row) * 16 + me.quad * 4));
}

// Multiplies the columns of a box that have `unit`; rows beside them begin with the first.
template <class Config, int kProducts>
__device__ __forceinline__ void multiply_small(const LaneBox& box, const SmallFactors& factors,
                                               int unit, const Thread& me,
                                               Sums<Config, kProducts>& sums) {
  float products[kProducts][4] = {};
  float shifts[kProducts][4] = {};
#pragma unroll 1
  for (int turn = 0; turn < kTurnsOfUnit; ++turn) {
    const LaneRows b(box, turn);
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
      if (is_past<kProducts>(box, p)) break;
      uint32_t a[kStepsOfTurn][4];
      uint32_t of_offsets[kStepsOfTurn][2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const SmallCodes codes = small_codes(box, me, unit * kTurnsOfUnit + turn, p, row);
        const uint32_t word = factors.steps[turn * factors.rows + (2 * p + row) * 8];
        const SmallSteps steps(word);
#pragma unroll
        for (int step = 0; step < kStepsOfTurn; step += 2) {
          const uint32_t scales = steps.scale_pair(step / 2);
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            a[step][2 * pair + row] = multiply_by_half<0>(codes.bits(step, pair), scales);
            a[step + 1][2 * pair + row] = multiply_by_half<1>(codes.bits(step + 1, pair), scales);
          }
          const uint32_t offsets = SmallSteps::offsets(word >> 8 * step);
          of_offsets[step][row] = lower_in_both(offsets);
          of_offsets[step + 1][row] = upper_in_both(offsets);
        }
      }
#pragma unroll
      for (int step = 0; step < kStepsOfTurn; ++step) {
        const uint32_t(&own)[2] = of_offsets[step];
        multiply_step<Config>(products[p], a[step], b.of[step]);
        multiply_step<Config>(shifts[p], {own[0], own[1], own[0], own[1]}, b.of[step]);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < kProducts; ++p) {
    if (is_past<kProducts>(box, p)) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 units = __half22float2(factors.units[(2 * p + i / 2) * 8]);
      float& sum = sums.chain[p][0][i];
      // Sums are in units of CodesInOrder.
      sum = fmaf(products[p][i], units.x * (SmallSteps::kUnit / CodesInOrder::kUnit), sum);
      sum = fmaf(shifts[p][i], -units.y, sum);
    }
  }
}

}  // namespace conclave::inline v0::experts::decode
