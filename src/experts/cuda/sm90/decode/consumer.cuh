// Multiplies a warp's boxes of weights, as they arrive, by rows in shared memory.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "experts/cuda/scale_bytes.h"
#include "experts/cuda/sm90/decode/codes.cuh"
#include "experts/cuda/sm90/decode/lanes.cuh"
#include "experts/cuda/sm90/decode/small.cuh"
#include "experts/cuda/sm90/decode/steps.cuh"
#include "experts/cuda/sm90/decode/sums.cuh"
#include "experts/cuda/sm90/decode/walk.cuh"

#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::experts::decode {

// One lane's view of what a row of boxes is multiplied by.
struct Operand {
  int begin;  // boxes
  int end;
  int stage_boxes;
  uint32_t box_bytes;
  int products;
  int shift;     // box b belongs to warp (b + shift) % 8
  bool present;  // the token of column g takes part
  uint32_t row;  // byte of `rows` at which its row begins, at box `begin`
  // For e4m3: the steps of tokens 2q and 2q + 1 from box `begin` on. Bit 2 p + h of `second` says
  // that half h of product p has the second of its box's two weight scales.
  const float* steps[2];
  uint32_t second;
  // For codes.
  DecodeFactors factors;
  int box_rows;
  int scale_rows;   // a box of scales that are bytes has
  int scale_first;  // row of that box
  bool has_zeros;
  bool has_near_scales;  // ByteForm::kNear
  int step_parts;        // where codes are multiplied by steps
  // Sums of the first and the second eight rows of 16 are multiplied by these, if the kernel
  // kHasSumFactors.
  float sum_factors[2] = {1.0F, 1.0F};

  __device__ __forceinline__ void multiply_sums(float factor) {
    sum_factors[0] = factor;
    sum_factors[1] = factor;
  }
};

template <class Config>
__device__ __forceinline__ bool has_near_scales(const FactorPlanes& factors) {
  if constexpr (!Config::kCodes.exact) return false;
  return *factors.byte_form == static_cast<int32_t>(ByteForm::kNear);
}

template <class Config>
__device__ __forceinline__ int step_parts(const FactorPlanes& factors) {
  if constexpr (!Config::kCodes.times_steps || Config::kHasSmallCodes) return 1;
  return *factors.short_scales != 0 ? 1 : 2;
}

template <class Config>
__device__ __forceinline__ void multiply_box(
    uint32_t address, const uint4 (&x)[2], const float (&scale)[4],
    typename Config::Sum (&sums)[Config::kIsByte ? 1 : 2][4]) {
  float partial[4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t place = address ^ static_cast<uint32_t>(half * 64);
    const uint4 low = ptx::load_shared(place);
    const uint4 high = ptx::load_shared(place + 1024);
    if constexpr (Config::kIsInteger) {
      Config::multiply(sums[0], low.x, high.x, low.y, high.y, x[half].x, x[half].y);
      Config::multiply(sums[0], low.z, high.z, low.w, high.w, x[half].z, x[half].w);
    } else if constexpr (Config::kIsE4M3) {
      Config::multiply(partial, low.x, high.x, low.y, high.y, x[half].x, x[half].y);
      Config::multiply(partial, low.z, high.z, low.w, high.w, x[half].z, x[half].w);
    } else {
      Config::multiply(sums[half], low.x, high.x, low.y, high.y, x[half].x, x[half].y);
      Config::multiply(sums[half], low.z, high.z, low.w, high.w, x[half].z, x[half].w);
    }
  }
  if constexpr (Config::kIsE4M3) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][i] = fmaf(partial[i], scale[i], sums[0][i]);
  }
}

// Multiplies the warp's box of codes of the stage in `slot`.
template <class Config, int kProducts>
__device__ __forceinline__ void multiply_codes(const Operand& operand, const DecodePlan& plan,
                                               const Shared& shared, const Thread& me, int slot,
                                               int in_stage, int box,
                                               Sums<Config, kProducts>& sums) {
  const unsigned char* const codes = shared.ring + slot * kDecodeStageBytes +
                                     in_stage * static_cast<int>(operand.box_bytes) +
                                     me.row * kDecodeBoxBytes;
  const unsigned char* const x =
      operand.present ? shared.rows + operand.row + (box - operand.begin) * plan.row_box_bytes
                      : nullptr;
  const unsigned char* const factors = shared.factors + slot * plan.factor_bytes;
  const unsigned char* const seconds = factors + plan.second_factor;
  const int group = group_of_box(plan, operand.factors, box) -
                    group_of_box(plan, operand.factors, box - in_stage);
  constexpr bool kBoth = CodeBox<Config>::kBothInSteps;
  const CodeBox<Config> of_warp(shared, me);
#pragma unroll
  for (int p = 0; p < kProducts; ++p) {
    if (p > 0 && p >= operand.products) break;
    const int first = group * operand.box_rows + p * 16 + me.row;
    const int in_box = p * 16 + me.row;
    of_warp.multiply(
        {.codes = codes + p * static_cast<int>(kProductBytes),
         .x = x,
         .step_pairs = reinterpret_cast<const uint16_t*>(factors) +
                       (kBoth ? group : group / 2) * operand.box_rows + in_box,
         .step_units = reinterpret_cast<const float*>(seconds) +
                       (kBoth ? 2 : 1) * (in_stage * operand.box_rows + in_box),
         .scales = reinterpret_cast<const float*>(factors) + first,
         .offsets = reinterpret_cast<const float*>(seconds) + first,
         .zeros = operand.has_zeros ? reinterpret_cast<const uint16_t*>(seconds) + first : nullptr,
         .rows = operand.box_rows,
         .steps = operand.factors.steps},
        sums.chain[p][0]);
  }
}

// A warp's boxes of codes of lanes have this in common: it is worked out once, since a stage has
// few instructions for each of them.
template <class Config, int kProducts>
class LaneOperand {
 public:
  __device__ __forceinline__ LaneOperand(const Operand& operand, const DecodeParams& params,
                                         const Shared& shared, const Thread& me)
      : operand_(operand),
        plan_(params.plan),
        me_(me),
        numbers_(make_numbers(params, shared, me)),
        codes_(shared.ring + me.row * kDecodeBoxBytes),
        // Results of tokens that do not take part are not used: any row will do for them.
        x_(shared.rows + operand.row + me.quad * 16),
        factors_(shared.factors),
        groups_of_box_(operand.factors.columns == 0 ? 0 : operand.factors.groups),
        groups_per_box_(static_cast<float>(params.plan.box_columns) /
                        static_cast<float>(max(operand.factors.columns, 1))) {}

  // Calls run(mode), where the mode is a type of lanes.cuh. Choices are uniform over the grid.
  template <class Run>
  __device__ __forceinline__ void choose(const Run& run) const {
    if constexpr (Config::kCodes.exact) {
      if (operand_.has_near_scales) {
        run(ScaleMode<true>());
      } else {
        run(ScaleMode<false>());
      }
    } else if constexpr (Config::kCodes.offsets || Config::kCodes.steps ||
                         Config::kCodes.in_pairs) {
      run(NumberMode<false, false>());
    } else {
      const bool is_long = operand_.factors.steps >= kStepsOfHalf;
      if (operand_.has_zeros) {
        if (is_long) {
          run(NumberMode<true, true>());
        } else {
          run(NumberMode<true, false>());
        }
      } else if (is_long) {
        run(NumberMode<false, true>());
      } else {
        run(NumberMode<false, false>());
      }
    }
  }

  // Multiplies the warp's box of the stage in `slot`.
  template <class Mode>
  __device__ __forceinline__ void multiply(int slot, int in_stage, int box,
                                           Sums<Config, kProducts>& sums) const {
    const LaneBox of_warp{
        .codes = codes_ + slot * kDecodeStageBytes +
                 in_stage / Config::kUnitsOfBox * static_cast<int>(operand_.box_bytes),
        .x = x_ + (box - operand_.begin) * kRowBytes,
        .products = operand_.products};
    const unsigned char* const factors = factors_ + slot * plan_.factor_bytes;
    if constexpr (Config::kHasSmallCodes) {
      const int unit = in_stage * operand_.box_rows + me_.row;
      multiply_small<Config, kProducts>(
          of_warp,
          {.steps = reinterpret_cast<const uint32_t*>(factors) +
                    in_stage * kTurnsOfUnit * operand_.box_rows + me_.row,
           .units = reinterpret_cast<const __half2*>(factors + plan_.second_factor) + unit,
           .rows = operand_.box_rows},
          in_stage % Config::kUnitsOfBox, me_, sums);
      return;
    }
    const int group = group_of(in_stage, box);
    if constexpr (Config::kCodes.exact) {
      const unsigned char* const scales =
          factors + group * operand_.scale_rows + operand_.scale_first + me_.row;
      multiply_exact<Config, kProducts, Mode>(of_warp, scales, operand_.scale_rows, me_, sums);
    } else if constexpr (Config::kCodes.times_steps) {
      constexpr bool kBoth = Config::kCodes.offsets;
      const auto* const units = reinterpret_cast<const float*>(factors + plan_.second_factor);
      multiply_steps<Config, kProducts>(
          of_warp,
          {.step_pairs = reinterpret_cast<const uint16_t*>(factors) +
                         (kBoth ? group : group / 2) * operand_.box_rows + me_.row,
           .step_units = units + (in_stage * operand_.box_rows + me_.row) * (kBoth ? 2 : 1),
           .rows = operand_.box_rows,
           .parts = operand_.step_parts},
          numbers_, me_, sums);
    } else {
      const int first = group * operand_.box_rows + me_.row;
      const unsigned char* const seconds = factors + plan_.second_factor;
      const int unit = in_stage * operand_.box_rows + me_.row;
      multiply_numbers<Config, kProducts, Mode>(
          of_warp,
          {.step_pairs = reinterpret_cast<const uint16_t*>(factors) + first,
           .step_units = reinterpret_cast<const float2*>(seconds) + unit,
           .scales = reinterpret_cast<const float*>(factors) + first,
           .offsets = reinterpret_cast<const float*>(seconds) + first,
           .zeros = reinterpret_cast<const uint16_t*>(seconds) + first,
           .rows = operand_.box_rows,
           .steps = operand_.factors.steps},
          numbers_, me_, sums);
    }
  }

 private:
  static constexpr int kRowBytes = 512;  // beside a box, or a part of it, of 256 columns
  using Numbers = std::conditional_t<Config::kCodes.in_pairs, PairValues, CodesInOrder>;

  static __device__ __forceinline__ Numbers make_numbers(const DecodeParams& params,
                                                         const Shared& shared, const Thread& me) {
    if constexpr (Config::kCodes.in_pairs) {
      return PairValues(shared, me);
    } else {
      return CodesInOrder(params.least);
    }
  }

  // The first group of a box among those of its stage.
  __device__ __forceinline__ int group_of(int in_stage, int box) const {
    if (operand_.factors.columns <= plan_.box_columns) return in_stage * groups_of_box_;
    return group_of_many(box) - group_of_many(box - in_stage);
  }
  // The group of a box whose columns are some of it. A division would be code to jump over. Halves
  // are further from a whole number than the rounding of so few boxes.
  __device__ __forceinline__ int group_of_many(int box) const {
    return static_cast<int>((static_cast<float>(box) + 0.5F) * groups_per_box_);
  }

  const Operand& operand_;
  const DecodePlan& plan_;
  const Thread& me_;
  Numbers numbers_;
  const unsigned char* codes_;
  const unsigned char* x_;
  const unsigned char* factors_;
  int groups_of_box_;
  float groups_per_box_;
};

// Multiplies the warp's box of the stage in `slot`.
template <class Config, int kProducts>
__device__ __forceinline__ void multiply_values(const Operand& operand, const Shared& shared,
                                                const Thread& me, int slot, int in_stage, int box,
                                                Sums<Config, kProducts>& sums) {
  uint4 x[2] = {};
  if (operand.present) {
    const uint32_t place =
        ptx::shared_address(shared.rows) + operand.row +
        static_cast<uint32_t>((box - operand.begin) * kDecodeBoxBytes + me.quad * 16);
    x[0] = ptx::load_shared(place);
    x[1] = ptx::load_shared(place + 64);
  }
  float2 weight_scales = {1, 1};
  float steps[2] = {1, 1};
  if constexpr (Config::kBlockScales) {
    weight_scales = *reinterpret_cast<const float2*>(shared.stage_scales +
                                                     (slot * kUpStageBoxes + in_stage) * 2);
    steps[0] = operand.steps[0][box - operand.begin];
    steps[1] = operand.steps[1][box - operand.begin];
  }
  const uint32_t address = ptx::shared_address(shared.ring + slot * kDecodeStageBytes) +
                           static_cast<uint32_t>(in_stage) * operand.box_bytes + me.fragment;
#pragma unroll
  for (int p = 0; p < kProducts; ++p) {
    if (p > 0 && p >= operand.products) break;
    float scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool second = (operand.second >> (2 * p + i / 2) & 1U) != 0;
      scale[i] = (second ? weight_scales.y : weight_scales.x) * steps[i % 2];
    }
    multiply_box<Config>(address + static_cast<uint32_t>(p) * kProductBytes, x, scale,
                         sums.chain[p]);
  }
}

// Whether some of the boxes [begin, end) are this warp's.
__device__ __forceinline__ bool has_boxes(const Thread& me, int shift, int begin, int end) {
  return ((me.warp - shift - begin) & (kDecodeWarps - 1)) < end - begin;
}

// Lets the boxes [begin, end) pass.
__device__ __forceinline__ void skip_boxes(const DecodeParams& params, const Shared& shared,
                                           const Thread& me, int begin, int end, int stage_boxes,
                                           Ring& ring) {
  for (int first = begin; first < end; first += stage_boxes) {
    ptx::mbarrier_wait(shared.full + ring.slot, ring.phase);
    __syncwarp();
    if (me.lane == 0) ptx::mbarrier_arrive(shared.empty + ring.slot);
    ring.advance(params.shared.stages);
  }
}

// Visits this warp's boxes: visit(slot, in_stage, box). Those of small codes are the parts that a
// unit has, of which a stage may have two for each warp.
template <class Config, class Visit>
__device__ __forceinline__ void for_each_box(const Operand& operand, const DecodeParams& params,
                                             const Shared& shared, const Thread& me, Ring& ring,
                                             const Visit& visit) {
  for (int first = operand.begin; first < operand.end; first += operand.stage_boxes) {
    const int in_stage = (me.warp - operand.shift - first) & (kDecodeWarps - 1);
    const int box = first + in_stage;
    ptx::mbarrier_wait(shared.full + ring.slot, ring.phase);
    if constexpr (Config::kHasSmallCodes) {
      for (int i = in_stage; i < operand.stage_boxes; i += kDecodeWarps) {
        if (first + i < operand.end) visit(ring.slot, i, first + i);
      }
    } else if (in_stage < operand.stage_boxes && box < operand.end) {
      visit(ring.slot, in_stage, box);
    }
    __syncwarp();
    if (me.lane == 0) ptx::mbarrier_arrive(shared.empty + ring.slot);
    ring.advance(params.shared.stages);
  }
}

// Multiplies this warp's boxes.
template <class Config, int kProducts>
__device__ __forceinline__ Sums<Config, kProducts> run_boxes(const Operand& operand,
                                                             const DecodeParams& params,
                                                             const Shared& shared, const Thread& me,
                                                             Ring& ring) {
  Sums<Config, kProducts> sums;
  if constexpr (Config::kHasLanes) {
    const LaneOperand<Config, kProducts> of_warp(operand, params, shared, me);
    of_warp.choose([&]<class Mode>(Mode) {
      for_each_box<Config>(operand, params, shared, me, ring, [&](int slot, int in_stage, int box) {
        of_warp.template multiply<Mode>(slot, in_stage, box, sums);
      });
    });
  } else {
    for_each_box<Config>(operand, params, shared, me, ring, [&](int slot, int in_stage, int box) {
      if constexpr (Config::kIsCoded) {
        multiply_codes<Config, kProducts>(operand, params.plan, shared, me, slot, in_stage, box,
                                          sums);
      } else {
        multiply_values<Config, kProducts>(operand, shared, me, slot, in_stage, box, sums);
      }
    });
  }
  return sums;
}

}  // namespace conclave::inline v0::experts::decode
