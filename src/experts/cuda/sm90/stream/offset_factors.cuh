// Scales and offsets of a stage's groups of 32 columns, as consumers of codes in order read them.
#pragma once

#include "experts/cuda/sm90/factor_steps.cuh"
#include "experts/cuda/sm90/stream/config.cuh"
#include "experts/cuda/sm90/stream/row_sums.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// The offsets of a thread's two rows for a stage's columns, less than 0, as numbers of bf16 that
// add up to them.
struct OffsetTerms {
  uint32_t of[kRowSumTerms][2];  // [term][row]: two neighbours

  __device__ __forceinline__ void set(int row, float first, float second) {
#pragma unroll
    for (int term = 0; term < kRowSumTerms; ++term) {
      const uint32_t a = __float_as_uint(first);
      const uint32_t b = __float_as_uint(second);
      of[term][row] = __byte_perm(a, b, 0x7632);
      first -= __uint_as_float(a & 0xffff0000U);
      second -= __uint_as_float(b & 0xffff0000U);
    }
  }
};

// The scales and offsets of a thread's two rows.
template <class Config>
class OffsetFactors {
 public:
  __device__ __forceinline__ OffsetFactors(const Params& params,
                                           const SharedStorage<Config>& shared, int32_t warp,
                                           int32_t lane, bool gated)
      : params_(static_cast<const CodedParams&>(params)),
        shared_(shared),
        first_(gated ? 8 * warp + lane / 4 : 16 * warp + lane / 4),
        second_(gated ? first_ + Config::kWeightRows / 2 : first_ + 8),
        own_row_(lane % 2 == 0 ? first_ : second_),
        own_group_(lane / 2 % 2) {}

  // The scale of one row and group of the stage's atom in `slot`, for scales(): the lanes of a quad
  // need the same four, and each makes one from its step.
  __device__ __forceinline__ float own_scale(int32_t slot, int32_t atom) const {
    if constexpr (Config::kCodes.steps) {
      const uint16_t* const steps = steps_of(slot, kGroupsOfAtom * atom + own_group_);
      return of_step(steps[own_row_], 0, units_of(slot)[own_row_].x);
    } else {
      return 0.0F;
    }
  }
  // Those of the thread's rows for a group of the atom, of 32 columns.
  __device__ __forceinline__ float2 scales(int32_t slot, int32_t atom, int32_t group,
                                           float own) const {
    if constexpr (Config::kCodes.steps) {
      constexpr unsigned kWarp = 0xffffffffU;
      return {__shfl_sync(kWarp, own, 2 * group, 4), __shfl_sync(kWarp, own, 2 * group + 1, 4)};
    } else {
      return numbers(slot, group_of(kGroupsOfAtom * atom + group));
    }
  }

  // Steps are multiplied by these in all groups of a stage.
  struct Units {
    float2 first;
    float2 second;
  };
  __device__ __forceinline__ Units units(int32_t slot) const {
    if constexpr (Config::kCodes.steps) {
      return {units_of(slot)[first_], units_of(slot)[second_]};
    } else {
      return {};
    }
  }

  // A group is 32 columns of the stage in `slot`.
  __device__ __forceinline__ float2 offsets(int32_t slot, int32_t group, const Units& units) const {
    if constexpr (Config::kCodes.steps) {
      const uint16_t* const steps = steps_of(slot, group);
      return {of_steps(steps[first_], units.first).y, of_steps(steps[second_], units.second).y};
    } else {
      return numbers(slot, params_.groups_of_stage + group_of(group));
    }
  }

 private:
  static constexpr int kGroupsOfAtom = Config::kAtomDepth / kColumnsOfRowSum<Config>;

  __device__ __forceinline__ int32_t group_of(int32_t group) const {
    return Config::kCodes.steps_of_sum * group >> params_.steps_shift;
  }
  __device__ __forceinline__ float2 numbers(int32_t slot, int32_t group) const {
    const auto* const rows =
        reinterpret_cast<const float*>(shared_.codes.factors[slot]) + group * Config::kWeightRows;
    return {rows[first_], rows[second_]};
  }
  __device__ __forceinline__ const uint16_t* steps_of(int32_t slot, int32_t group) const {
    return reinterpret_cast<const uint16_t*>(shared_.codes.factors[slot]) +
           group * Config::kWeightRows;
  }
  __device__ __forceinline__ const float2* units_of(int32_t slot) const {
    return reinterpret_cast<const float2*>(shared_.codes.factors[slot] +
                                           decltype(shared_.codes)::kUnitsAt);
  }

  const CodedParams& params_;
  const SharedStorage<Config>& shared_;
  int32_t first_;
  int32_t second_;
  int32_t own_row_;
  int32_t own_group_;
};

}  // namespace conclave::inline v0::experts::stream
