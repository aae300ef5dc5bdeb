// Multiplies a warp's boxes of weights, as they arrive, by rows in shared memory.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "experts/cuda/sm90/decode/codes.cuh"
#include "experts/cuda/sm90/decode/walk.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// float32 sums of products of 16 rows; [i]: row half i / 2, token 2q + i % 2. 16-bit weights have
// two chains, so that products overlap.
template <class Config, int kProducts>
struct Sums {
  static constexpr int kChains = Config::kIsE4M3 || Config::kIsCoded ? 1 : 2;
  float chain[kProducts][kChains][4] = {};

  __device__ __forceinline__ float get(int product, int i) const {
    if constexpr (Config::kCodes.in_order) return chain[product][0][i] * CodesInOrder::kUnit;
    return kChains == 1 ? chain[product][0][i]
                        : chain[product][0][i] + chain[product][kChains - 1][i];
  }
};

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
  bool has_zeros;
};

template <class Config>
__device__ __forceinline__ void multiply_box(uint32_t address, const uint4 (&x)[2],
                                             const float (&scale)[4],
                                             float (&sums)[Config::kIsE4M3 ? 1 : 2][4]) {
  float partial[4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t place = address ^ static_cast<uint32_t>(half * 64);
    const uint4 low = ptx::load_shared(place);
    const uint4 high = ptx::load_shared(place + 1024);
    if constexpr (Config::kIsE4M3) {
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
                                               int least, const Shared& shared, const Thread& me,
                                               int slot, int in_stage, int box,
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
  const CodeBox<Config> of_warp(shared, me, least);
#pragma unroll
  for (int p = 0; p < kProducts; ++p) {
    if (p > 0 && p >= operand.products) break;
    const int first = group * operand.box_rows + p * 16 + me.row;
    of_warp.multiply(
        {.codes = codes + p * static_cast<int>(kProductBytes),
         .x = x,
         .scales = reinterpret_cast<const float*>(factors) + first,
         .offsets = reinterpret_cast<const float*>(seconds) + first,
         .zeros = operand.has_zeros ? reinterpret_cast<const uint16_t*>(seconds) + first : nullptr,
         .rows = operand.box_rows,
         .steps = operand.factors.steps},
        sums.chain[p][0]);
  }
}

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

// Multiplies this warp's boxes.
template <class Config, int kProducts>
__device__ __forceinline__ Sums<Config, kProducts> run_boxes(const Operand& operand,
                                                             const DecodeParams& params,
                                                             const Shared& shared, const Thread& me,
                                                             Ring& ring) {
  Sums<Config, kProducts> sums;
  for (int first = operand.begin; first < operand.end; first += operand.stage_boxes) {
    const int in_stage = (me.warp - operand.shift - first) & (kDecodeWarps - 1);
    const int box = first + in_stage;
    ptx::mbarrier_wait(shared.full + ring.slot, ring.phase);
    if (in_stage < operand.stage_boxes && box < operand.end) {
      if constexpr (Config::kIsCoded) {
        multiply_codes<Config, kProducts>(operand, params.plan, params.least, shared, me, ring.slot,
                                          in_stage, box, sums);
      } else {
        multiply_values<Config, kProducts>(operand, shared, me, ring.slot, in_stage, box, sums);
      }
    }
    __syncwarp();
    if (me.lane == 0) ptx::mbarrier_arrive(shared.empty + ring.slot);
    ring.advance(params.shared.stages);
  }
  return sums;
}

}  // namespace conclave::inline v0::experts::decode
