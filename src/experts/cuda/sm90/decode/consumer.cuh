// Multiplies a warp's boxes of weights, as they arrive, by rows in shared memory.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "experts/cuda/sm90/decode/walk.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// float32 sums of products of 16 rows; [i]: row half i / 2, token 2q + i % 2. 16-bit weights have
// two chains, so that products overlap.
template <class Config, int kProducts>
struct Sums {
  static constexpr int kChains = Config::kIsE4M3 ? 1 : 2;
  float chain[kProducts][kChains][4] = {};

  __device__ __forceinline__ float get(int product, int i) const {
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
  bool present;  // the token of column g takes part
  uint32_t row;  // its row in shared memory, at this lane's 16 bytes of box `begin`
  // For e4m3: the steps of tokens 2q and 2q + 1 from box `begin` on. Bit 2 p + h of `second` says
  // that half h of product p has the second of its box's two weight scales.
  const float* steps[2];
  uint32_t second;
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

// Multiplies the warp's box of the stage in `slot`.
template <class Config, int kProducts>
__device__ __forceinline__ void multiply_stage(const Operand& operand, const Shared& shared,
                                               const Thread& me, int slot, int in_stage, int box,
                                               Sums<Config, kProducts>& sums) {
  uint4 x[2] = {};
  if (operand.present) {
    const uint32_t place =
        operand.row + static_cast<uint32_t>((box - operand.begin) * kDecodeBoxBytes);
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

// Multiplies this warp's boxes: box b belongs to warp b % 8.
template <class Config, int kProducts>
__device__ __forceinline__ Sums<Config, kProducts> run_boxes(const Operand& operand,
                                                             const DecodeParams& params,
                                                             const Shared& shared, const Thread& me,
                                                             Ring& ring) {
  Sums<Config, kProducts> sums;
  for (int first = operand.begin; first < operand.end; first += operand.stage_boxes) {
    const int in_stage = (me.warp - first) & (kDecodeWarps - 1);
    const int box = first + in_stage;
    ptx::mbarrier_wait(shared.full + ring.slot, ring.phase);
    if (in_stage < operand.stage_boxes && box < operand.end)
      multiply_stage<Config, kProducts>(operand, shared, me, ring.slot, in_stage, box, sums);
    __syncwarp();
    if (me.lane == 0) ptx::mbarrier_arrive(shared.empty + ring.slot);
    ring.advance(params.shared.stages);
  }
  return sums;
}

}  // namespace conclave::inline v0::experts::decode
