// Codes of 4 bits whose scales are steps of 16 columns become weights of bf16, with the factors of
// rounded_operand.cuh.
#pragma once

#include "experts/cuda/sm90/factor_steps.cuh"
#include "experts/cuda/sm90/stream/rounded_operand.cuh"

#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::experts::stream {

template <class Config>
inline constexpr bool kRoundsSteps =
    multiply_steps(Config::kCodes) && !are_small(Config::kCodes) && Config::kRounds;

template <class Config>
  requires kRoundsSteps<Config>
class RoundedOperand<Config, false> {
 public:
  static constexpr float kUnit = 1.0F;

  __device__ __forceinline__ RoundedOperand(const Params& params,
                                            const SharedStorage<Config>& shared, int32_t warp,
                                            int32_t lane, bool gated)
      : shared_(shared),
        numbers_(static_cast<const CodedParams&>(params).least),
        pair_(lane % 4),
        row_(16 * warp + lane / 4),
        first_factor_(gated ? 8 * warp + lane / 4 : row_),
        second_factor_(gated ? first_factor_ + Config::kWeightRows / 2 : row_ + 8) {}

  // Decodes columns 64 atom to 64 atom + 63 of the stage in `slot`.
  __device__ __forceinline__ void decode(int32_t slot, int32_t atom, RoundedFragments& a) const {
    const LaneWords<Config> words(shared_, slot, atom, row_, pair_);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const Units units = units_of(slot, row);
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        uint32_t weights[4];
        numbers_.of_word(words.of(row, word), weights);
        Factors groups[2];
        load(slot, 2 * atom + word, row, units, groups);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const FragmentPlace place = fragment_of(word, row, i);
          a.step[place.step][place.element] = groups[i / 2].weights_of(weights[i]);
        }
      }
    }
  }

 private:
  static constexpr bool kShifts = Config::kCodes.offsets;
  using Factors = std::conditional_t<kShifts, ScaleAndShift, ScaleInTerms>;
  using Units = std::conditional_t<kShifts, float2, float>;

  __device__ __forceinline__ int32_t factor_row(int row) const {
    return row == 0 ? first_factor_ : second_factor_;
  }
  __device__ __forceinline__ Units units_of(int32_t slot, int row) const {
    return reinterpret_cast<const Units*>(shared_.codes.factors[slot] +
                                          decltype(shared_.codes)::kUnitsAt)[factor_row(row)];
  }

  // Those of the two groups of 16 columns of a word, which is one of the stage.
  __device__ __forceinline__ void load(int32_t slot, int32_t word, int row, const Units& units,
                                       Factors (&groups)[2]) const {
    const auto* const pairs =
        reinterpret_cast<const uint16_t*>(shared_.codes.factors[slot]) + factor_row(row);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kShifts) {
        const float2 both = of_steps(pairs[(2 * word + i) * Config::kWeightRows], units);
        groups[i] = Factors(both.x * CodesInOrder::kUnit, -both.y);
      } else {
        const float scale = of_step(pairs[word * Config::kWeightRows], i, units);
        groups[i] = Factors(scale * CodesInOrder::kUnit, 0.0F);
      }
    }
  }

  const SharedStorage<Config>& shared_;
  CodesInOrder numbers_;
  int32_t pair_;  // the thread has columns 2 pair and 2 pair + 1 of each eight
  int32_t row_;   // the second one is eight below
  int32_t first_factor_;
  int32_t second_factor_;
};

}  // namespace conclave::inline v0::experts::stream
