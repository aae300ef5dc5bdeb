// Codes of int8, less their zero points, become bf16 without a table; scales multiply sums of 32
// columns.
#pragma once

#include "experts/cuda/sm90/codes_in_order.cuh"
#include "experts/cuda/sm90/stream/code_operand.cuh"
#include "experts/cuda/sm90/stream/rounded_operand.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// Config::kCodes.in_order beside 8 bits, without offsets.
template <class Config>
inline constexpr bool kIsSignedBytes =
    Config::kCodeBits == 8 && Config::kCodes.in_order && !Config::kCodes.offsets;

template <class Config, bool kZeros>
  requires kIsSignedBytes<Config>
class CodeOperand<Config, kZeros> {
 public:
  static constexpr int kTerms = 1;
  static constexpr bool kByTerm = false;
  using Fragments = CodeFragments<1>;

  __device__ __forceinline__ CodeOperand(const Params& params, const SharedStorage<Config>& shared,
                                         int32_t warp, int32_t lane, bool gated)
      : params_(static_cast<const CodedParams&>(params)),
        shared_(shared),
        pair_(lane % 4),
        row_(16 * warp + lane / 4),
        first_factor_(gated ? 8 * warp + lane / 4 : row_),
        second_factor_(gated ? first_factor_ + Config::kWeightRows / 2 : row_ + 8) {}

  // Decodes columns 64 atom to 64 atom + 63 of the stage in `slot`.
  __device__ __forceinline__ void decode(int32_t slot, int atom, Fragments& a) const {
    const uint8_t* const codes = shared_.weights[slot][0] + row_ * Config::kAtomBytes + 2 * pair_;
    uint32_t zeros[2] = {};
#pragma unroll
    for (int step = 0; step < Fragments::kSteps; ++step) {
      // A group has 32 columns or more.
      if (kZeros && step % 2 == 0) load_zeros(slot, 4 * atom + step, zeros);
      const uint8_t* const chunk = codes + ((4 * atom + step) ^ (row_ % 8)) * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t& numbers = a.step[step][0][i];
        numbers = numbers_of_bytes(
            *reinterpret_cast<const uint16_t*>(chunk + i % 2 * 8 * Config::kAtomBytes + i / 2 * 8));
        if constexpr (kZeros) numbers = pairs::subtract(numbers, zeros[i % 2]);
      }
    }
  }

  // The scales of the thread's two rows for 32 columns of the stage in `slot`, from its `steps`th
  // 16 on.
  __device__ __forceinline__ float2 scales(int32_t slot, int32_t steps) const {
    const auto* const rows = reinterpret_cast<const float*>(shared_.codes.factors[slot]) +
                             (steps >> params_.steps_shift) * Config::kWeightRows;
    return {rows[first_factor_], rows[second_factor_]};
  }

 private:
  // The zero points of the thread's two rows, each in both halves.
  __device__ __forceinline__ void load_zeros(int32_t slot, int32_t steps,
                                             uint32_t (&zeros)[2]) const {
    const auto* const all = reinterpret_cast<const uint16_t*>(
        shared_.codes.factors[slot] +
        params_.groups_of_stage * Config::kWeightRows * sizeof(float));
    const uint16_t* const group = all + (steps >> params_.steps_shift) * Config::kWeightRows;
    zeros[0] = CodesInOrder::zero_of(group[first_factor_]);
    zeros[1] = CodesInOrder::zero_of(group[second_factor_]);
  }

  const CodedParams& params_;
  const SharedStorage<Config>& shared_;
  int32_t pair_;  // the thread has columns 2 pair and 2 pair + 1 of each eight
  int32_t row_;   // the thread's first row; the second is eight rows below
  int32_t first_factor_;
  int32_t second_factor_;
};

}  // namespace conclave::inline v0::experts::stream
