// Boxes of codes of 4 bits whose scales are steps of 16 columns: weights are whole numbers, and
// units multiply sums of a box.
#pragma once

#include "experts/cuda/sm90/decode/lanes.cuh"
#include "experts/cuda/sm90/whole_steps.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// Steps of the box's first pair of groups, or first group where it has offsets, of the lane's first
// row, and the box's units.
struct StepFactors {
  const uint16_t* step_pairs;
  const float* step_units;  // with offsets two numbers for each row
  int rows;                 // from a pair's steps to the next's
  int parts;                // that a step has (StepPart)
};

// Steps of 32 columns, of which `word` counts those of the box, of the lane's row `row`.
template <class Config>
__device__ __forceinline__ uint32_t steps_of_word(const StepFactors& factors, int word, int row,
                                                  bool offsets) {
  if constexpr (Config::kCodes.offsets) {
    const uint16_t* const first = factors.step_pairs + 2 * word * factors.rows + row * 8;
    return steps_of_pairs(first[0], first[factors.rows], offsets);
  } else {
    return steps_of_pair(factors.step_pairs[word * factors.rows + row * 8]);
  }
}

template <class Config, int kProducts>
__device__ __forceinline__ void multiply_steps(const LaneBox& box, const StepFactors& factors,
                                               const CodesInOrder& numbers, const Thread& me,
                                               Sums<Config, kProducts>& sums) {
  constexpr bool kOffsets = Config::kCodes.offsets;
  constexpr int kTurns = kHalves * kTurnsOfHalf;
  float products[kProducts][4] = {};
  float shifts[kOffsets ? kProducts : 1][4] = {};
#pragma unroll 1
  for (int part = 0; part < factors.parts; ++part) {
    const StepPart own(part, factors.parts);
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const LaneRows b(box, turn);
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        if (is_past<kProducts>(box, p)) break;
        const LaneWords words(box, me, turn, p);
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          LaneWeights a;
          LaneWeights of_offsets;
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const int from = 2 * p + row;
            const uint32_t steps =
                numbers_of_steps(steps_of_word<Config>(factors, 2 * turn + word, from, false), own);
            const uint32_t first = lower_in_both(steps);
            const uint32_t second = upper_in_both(steps);
            uint32_t weights[4];
            numbers.of_word(words.get(row, word), weights);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              weights[i] = multiply_pairs(weights[i], i < 2 ? first : second);
            }
            a.set(row, weights);
            if constexpr (kOffsets) {
              const uint32_t offsets = numbers_of_steps(
                  steps_of_word<Config>(factors, 2 * turn + word, from, true), StepPart(0, 1));
              const uint32_t lower = lower_in_both(offsets);
              const uint32_t upper = upper_in_both(offsets);
              of_offsets.set(row, {lower, lower, upper, upper});
            }
          }
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            multiply_step<Config>(products[p], a.of[step], b.of[2 * word + step]);
            // Steps of offsets have one part.
            if (kOffsets && part == 0) {
              multiply_step<Config>(shifts[kOffsets ? p : 0], of_offsets.of[step],
                                    b.of[2 * word + step]);
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int p = 0; p < kProducts; ++p) {
    if (is_past<kProducts>(box, p)) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const units = factors.step_units + (2 * p + i / 2) * 8 * (kOffsets ? 2 : 1);
      float& sum = sums.chain[p][0][i];
      // Sums are in units of codes; those of offsets were made of steps alone.
      sum = fmaf(products[p][i], units[0] * CodesInOrder::kUnit, sum);
      if constexpr (kOffsets) sum = fmaf(shifts[p][i], -units[1], sum);
    }
  }
}

}  // namespace conclave::inline v0::experts::decode
