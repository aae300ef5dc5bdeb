// Codes of int8 become weights of bf16 without a table, with the factors of rounded_operand.cuh.
#pragma once

#include "experts/cuda/sm90/codes_in_order.cuh"
#include "experts/cuda/sm90/factor_steps.cuh"
#include "experts/cuda/sm90/stream/rounded_operand.cuh"

#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::experts::stream {

// Config::kCodes.in_order beside 8 bits and `rounded`: scales, and zero points or offsets, of
// groups or, but for offsets, of whole rows.
template <class Config>
inline constexpr bool kRoundsSignedBytes =
    Config::kCodeBits == 8 && Config::kCodes.in_order && Config::kRounds;

template <class Config>
  requires kRoundsSignedBytes<Config>
class RoundedOperand<Config, false> {
 public:
  // Numbers of bytes have a unit, which scales of whole rows do not have yet.
  static constexpr float kUnit = Config::kCodes.whole_rows ? CodesInOrder::kUnit : 1.0F;

  __device__ __forceinline__ RoundedOperand(const Params& params,
                                            const SharedStorage<Config>& shared, int32_t warp,
                                            int32_t lane, bool gated)
      : params_(static_cast<const CodedParams&>(params)),
        shared_(shared),
        pair_(lane % 4),
        row_(16 * warp + lane / 4),
        first_factor_(gated ? 8 * warp + lane / 4 : row_),
        second_factor_(gated ? first_factor_ + Config::kWeightRows / 2 : row_ + 8),
        steps_mask_((1 << params_.steps_shift) - 1) {}

  // Decodes columns 64 atom to 64 atom + 63 of the stage in `slot`.
  __device__ __forceinline__ void decode(int32_t slot, int32_t atom, RoundedFragments& a) {
    // Uniform over the grid.
    if (!kShifts && params_.shift_bytes != 0) {
      decode_part<!kShifts>(slot, atom, a);
    } else {
      decode_part<false>(slot, atom, a);
    }
  }

  // The scales of the thread's two whole rows, once an atom of these is decoded.
  __device__ __forceinline__ float2 row_scales() const { return row_scales_; }

 private:
  static constexpr bool kShifts = Config::kCodes.offsets;
  static constexpr bool kWholeRows = Config::kCodes.whole_rows;
  using Factors = std::conditional_t<kShifts, ScaleAndShift, ScaleInTerms>;

  template <bool kZeros>
  __device__ __forceinline__ void decode_part(int32_t slot, int32_t atom, RoundedFragments& a) {
    using Codes = CodesOfRows<Config>;
    const Codes codes(shared_.weights[slot][0] + row_ * Config::kAtomBytes, atom * Codes::kChunks,
                      row_ % 8, pair_);
#pragma unroll
    for (int step = 0; step < RoundedFragments::kSteps; ++step) {
      const int32_t steps = RoundedFragments::kSteps * atom + step;
      if ((steps & steps_mask_) == 0) load_factors<kZeros>(slot, steps >> params_.steps_shift);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t numbers = numbers_of_bytes(codes.of(step, i));
        if constexpr (kZeros) numbers = pairs::subtract(numbers, zeros_[i % 2]);
        if constexpr (!kWholeRows) numbers = factors_[i % 2].weights_of(numbers);
        a.step[step][i] = numbers;
      }
    }
  }

  template <bool kZeros>
  __device__ __forceinline__ void load_factors(int32_t slot, int32_t group) {
    const uint8_t* const all = shared_.codes.factors[slot];
    if constexpr (Config::kCodes.steps) {
      load_steps(all, group);
      return;
    }
    const auto* const scales = reinterpret_cast<const float*>(all) + group * Config::kWeightRows;
    const float2 own = {scales[first_factor_], scales[second_factor_]};
    float2 shifts = {0.0F, 0.0F};
    if constexpr (kShifts) {
      const auto* const offsets = shifts_of<float>(all, group);
      shifts = {-offsets[first_factor_], -offsets[second_factor_]};
    }
    if constexpr (kZeros) {
      const auto* const zeros = shifts_of<uint16_t>(all, group);
      zeros_[0] = CodesInOrder::zero_of(zeros[first_factor_]);
      zeros_[1] = CodesInOrder::zero_of(zeros[second_factor_]);
    }
    if constexpr (kWholeRows) {
      row_scales_ = own;
    } else {
      factors_[0] = Factors(own.x * CodesInOrder::kUnit, shifts.x);
      factors_[1] = Factors(own.y * CodesInOrder::kUnit, shifts.y);
    }
  }

  // Offsets, or zero points, of a group lie behind the scales of a stage.
  template <class Number>
  __device__ __forceinline__ const Number* shifts_of(const uint8_t* all, int32_t group) const {
    const uint8_t* const shifts =
        all + params_.groups_of_stage * Config::kWeightRows * sizeof(float);
    return reinterpret_cast<const Number*>(shifts) + group * Config::kWeightRows;
  }

  // Scales and offsets of 32 columns.
  __device__ __forceinline__ void load_steps(const uint8_t* all, int32_t group) {
    const auto* const steps = reinterpret_cast<const uint16_t*>(all) + group * Config::kWeightRows;
    const auto* const units =
        reinterpret_cast<const float2*>(all + decltype(shared_.codes)::kUnitsAt);
    const float2 first = of_steps(steps[first_factor_], units[first_factor_]);
    const float2 second = of_steps(steps[second_factor_], units[second_factor_]);
    factors_[0] = Factors(first.x * CodesInOrder::kUnit, -first.y);
    factors_[1] = Factors(second.x * CodesInOrder::kUnit, -second.y);
  }

  const CodedParams& params_;
  const SharedStorage<Config>& shared_;
  int32_t pair_;
  int32_t row_;  // the second one is eight below
  int32_t first_factor_;
  int32_t second_factor_;
  int32_t steps_mask_;
  Factors factors_[2];
  uint32_t zeros_[2];
  float2 row_scales_;
};

}  // namespace conclave::inline v0::experts::stream
