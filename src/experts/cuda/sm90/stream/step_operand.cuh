// Weights that are codes of 4 bits in order times steps of 16 columns, both whole numbers, in the
// registers from which wgmma reads its A operand. Units multiply sums of a stage.
#pragma once

#include "experts/cuda/sm90/stream/lane_words.cuh"
#include "experts/cuda/sm90/stream/rounded_operand.cuh"
#include "experts/cuda/sm90/whole_steps.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// Steps and units of a thread's two rows.
template <class Config>
class StepFactors {
 public:
  static constexpr bool kOffsets = Config::kCodes.offsets;

  __device__ __forceinline__ StepFactors(const SharedStorage<Config>& shared, int32_t warp,
                                         int32_t lane, bool gated)
      : shared_(shared),
        pair_(lane % 4),
        first_(gated ? 8 * warp + lane / 4 : 16 * warp + lane / 4),
        second_(gated ? first_ + Config::kWeightRows / 2 : first_ + 8) {}

  // Scales of 32 columns of the stage in `slot`, of the thread's first or second row.
  __device__ __forceinline__ uint32_t scales(int32_t slot, int32_t word, int row) const {
    if constexpr (kOffsets) {
      return steps_of_pairs(pair(slot, 2 * word, row), pair(slot, 2 * word + 1, row), false);
    } else {
      return steps_of_pair(pair(slot, word, row));
    }
  }
  // The same for the lanes of a quad, which need those of two rows and the two words of an atom:
  // each loads those of one.
  __device__ __forceinline__ uint32_t own_scales(int32_t slot, int32_t atom) const {
    return scales(slot, 2 * atom + pair_ / 2, pair_ % 2);
  }
  static __device__ __forceinline__ uint32_t of_quad(uint32_t own, int word, int row) {
    constexpr unsigned kWarp = 0xffffffffU;
    return __shfl_sync(kWarp, own, 2 * word + row, 4);
  }

  // Offsets of two groups, as numbers.
  __device__ __forceinline__ uint32_t offsets(int32_t slot, int32_t group, int row) const {
    const uint32_t steps = steps_of_pairs(pair(slot, group, row), pair(slot, group + 1, row), true);
    return numbers_of_steps(steps, StepPart(0, 1));
  }

  // Units of the scales and of the offsets of the thread's two rows.
  struct Units {
    float2 scales;
    float2 offsets;
  };
  __device__ __forceinline__ Units units(int32_t slot) const {
    const uint8_t* const all = shared_.codes.factors[slot] + decltype(shared_.codes)::kUnitsAt;
    if constexpr (kOffsets) {
      const auto* const both = reinterpret_cast<const float2*>(all);
      const float2 first = both[first_];
      const float2 second = both[second_];
      return {.scales = {first.x, second.x}, .offsets = {first.y, second.y}};
    } else {
      const auto* const own = reinterpret_cast<const float*>(all);
      return {.scales = {own[first_], own[second_]}, .offsets = {}};
    }
  }

 private:
  __device__ __forceinline__ uint32_t pair(int32_t slot, int32_t index, int row) const {
    return reinterpret_cast<const uint16_t*>(
        shared_.codes.factors[slot])[index * Config::kWeightRows + (row == 0 ? first_ : second_)];
  }

  const SharedStorage<Config>& shared_;
  int32_t pair_;
  int32_t first_;
  int32_t second_;
};

template <class Config>
class StepOperand {
 public:
  __device__ __forceinline__ StepOperand(const Params& params, const SharedStorage<Config>& shared,
                                         int32_t warp, int32_t lane, bool gated)
      : shared_(shared),
        factors_(shared, warp, lane, gated),
        numbers_(static_cast<const CodedParams&>(params).least),
        pair_(lane % 4),
        row_(16 * warp + lane / 4) {}

  using Factors = StepFactors<Config>;
  // Sums of products have this: codes and steps have one each.
  static constexpr float kUnit = CodesInOrder::kUnit * CodesInOrder::kUnit;

  __device__ __forceinline__ const Factors& factors() const { return factors_; }
  // The parts in which steps are multiplied (StepPart).
  static __device__ __forceinline__ int32_t parts(const Params& params) {
    return *static_cast<const CodedParams&>(params).short_scales != 0 ? 1 : 2;
  }

  // Makes weights of columns 64 atom to 64 atom + 63 of the stage in `slot`.
  __device__ __forceinline__ void decode(int32_t slot, int32_t atom, const StepPart& part,
                                         RoundedFragments& a) const {
    const LaneWords<Config> words(shared_, slot, atom, row_, pair_);
    const uint32_t own = numbers_of_steps(factors_.own_scales(slot, atom), part);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t steps = StepFactors<Config>::of_quad(own, word, row);
        uint32_t numbers[4];
        numbers_.of_word(words.of(row, word), numbers);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const FragmentPlace place = fragment_of(word, row, i);
          a.step[place.step][place.element] = i < 2 ? multiply_by_half<0>(numbers[i], steps)
                                                    : multiply_by_half<1>(numbers[i], steps);
        }
      }
    }
  }

 private:
  const SharedStorage<Config>& shared_;
  StepFactors<Config> factors_;
  CodesInOrder numbers_;
  int32_t pair_;  // the thread has columns 2 pair and 2 pair + 1 of each eight
  int32_t row_;   // the second one is eight below
};

}  // namespace conclave::inline v0::experts::stream
