// The down product of the decode kernel: a block's columns of an expert, over a slice of I.
#pragma once

#include "experts/cuda/decode_product.cuh"
#include "experts/cuda/decode_ring.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// Raw intermediate values of one box as they lie in memory.
template <class C>
struct RawBox {
  static constexpr int kLoads = C::kIsE4M3 ? 8 : 2;
  uint4 load[kLoads];
};

// `source` is null where the token does not go to the expert.
template <class C>
__device__ __forceinline__ void load_raw(RawBox<C>& raw, const char* source, int quad, int box,
                                         int end, int width) {
  constexpr int kPerHalf = RawBox<C>::kLoads / 2;
  constexpr int kElements = C::kIsE4M3 ? 4 : 8;  // of a load
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kPerHalf; ++i) {
      const int column = box * C::kBoxElements + half * (C::kBoxElements / 2) +
                         quad * (C::kBoxElements / 8) + i * kElements;
      uint4 value = {};
      if (source != nullptr && box < end && column < width)
        value =
            __ldcg(reinterpret_cast<const uint4*>(source + int64_t{column} * (C::kIsE4M3 ? 4 : 2)));
      raw.load[half * kPerHalf + i] = value;
    }
  }
}

// The rows' fragment of a box; quantises float32 values. `step` of the token in column `group`.
template <class C>
__device__ __forceinline__ Fragment make_fragment(const DecodeParams& params, const RawBox<C>& raw,
                                                  Step& step) {
  Fragment fragment;
  if constexpr (!C::kIsE4M3) {
    fragment.half[0] = raw.load[0];
    fragment.half[1] = raw.load[1];
  } else {
    float values[32];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[4 * i] = __uint_as_float(raw.load[i].x);
      values[4 * i + 1] = __uint_as_float(raw.load[i].y);
      values[4 * i + 2] = __uint_as_float(raw.load[i].z);
      values[4 * i + 3] = __uint_as_float(raw.load[i].w);
    }
    if constexpr (C::kBlockScales) {
      float amax = 0;
#pragma unroll
      for (int i = 0; i < 32; ++i) amax = fmaxf(amax, fabsf(values[i]));
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, 1));
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, 2));
      step = make_step(dynamic_scale(amax, params.power_of_two_scales));
    }
    uint32_t codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      codes[i] =
          pack_e4m3(code_value(values[4 * i], step), code_value(values[4 * i + 1], step),
                    code_value(values[4 * i + 2], step), code_value(values[4 * i + 3], step));
    }
    fragment.half[0] = {codes[0], codes[1], codes[2], codes[3]};
    fragment.half[1] = {codes[4], codes[5], codes[6], codes[7]};
  }
  return fragment;
}

// With a scale a row of the intermediate: all blocks find it for themselves. Ends in a barrier.
__device__ void find_pair_scales(const DecodeParams& params, const Shared& shared, const Thread& me,
                                 int tokens) {
  const DecodePlan& plan = params.plan;
  const int pairs = tokens * plan.top_k;
  const int width = plan.intermediate_size;
  for (int pair = me.warp; pair < pairs; pair += kDecodeWarps) {
    if (shared.tables->pair_expert[pair] < 0 || shared.tables->pair_source[pair] != pair) continue;
    float scale = 0;
    if (params.row_scale == RowScale::kStatic) {
      scale = params.weights.intermediate_scale[0];
    } else {
      const float* row =
          reinterpret_cast<const float*>(static_cast<const char*>(params.call.workspace) + 256) +
          pair * plan.intermediate_stride;
      float amax = 0;
#pragma unroll 8
      for (int i = me.lane; i < width; i += 32) amax = fmaxf(amax, fabsf(__ldcg(row + i)));
#pragma unroll
      for (int step = 16; step > 0; step /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, step));
      scale = dynamic_scale(amax, params.power_of_two_scales);
    }
    if (me.lane == 0) shared.tables->pair_scale[pair] = scale;
  }
  __syncthreads();
}

// A lane's four rows of a pass.
struct DownRows {
  float bias[kTiles][2] = {};
  float scale[kTiles][2];  // with a scale a row
  bool second_block[kTiles][2];
};

template <class C>
__device__ DownRows read_down_rows(const DecodeParams& params, const Thread& me, int expert,
                                   int first_row, bool with_bias) {
  const DecodePlan& plan = params.plan;
  DownRows rows;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + tile * 16 + half * 8 + me.row;
      const bool inside = row < plan.hidden_size;
      const int64_t at = int64_t{expert} * plan.hidden_size + row;
      rows.second_block[tile][half] = row / 128 != first_row / 128;
      rows.scale[tile][half] = 1;
      if constexpr (C::kRowScales) {
        if (inside) rows.scale[tile][half] = params.weights.down_scale[at];
      }
      if (with_bias && inside && params.weights.down_bias != nullptr)
        rows.bias[tile][half] = params.weights.down_bias[at];
    }
  }
  return rows;
}

template <class C, int kProducts>
__device__ __forceinline__ void run_down_unit(const DecodeParams& params, const Shared& shared,
                                              const Thread& me, const Work& work,
                                              const DownUnit& unit, Ring<C>& ring,
                                              Producer<C>& producer) {
  const DecodePlan& plan = params.plan;
  const int expert = shared.tables->unit_expert[unit.unit];
  const int slot = shared.tables->unit_slot[unit.unit][me.group];
  const int first_row = work.first_row + unit.pass * plan.pass_rows;
  const DownRows rows = read_down_rows<C>(params, me, expert, first_row, unit.slice == 0);
  const int pair = me.group * plan.top_k + slot;
  const char* source = slot < 0 ? nullptr
                                : static_cast<const char*>(params.call.workspace) + 256 +
                                      pair * plan.intermediate_stride * plan.intermediate_bytes;
  const int width = (plan.intermediate_size + 7) / 8 * 8;
  const int end = slice_begin(plan, unit.slice + 1);
  int box = slice_begin(plan, unit.slice);
  Step step = make_step(1.0F);
  if constexpr (C::kRowScales) {
    if (slot >= 0) step = make_step(shared.tables->pair_scale[pair]);
  }

  Sums<C, kProducts> sums;
  RawBox<C> raw[C::kAhead];
#pragma unroll
  for (int i = 0; i < C::kAhead; ++i) load_raw<C>(raw[i], source, me.quad, box + i, end, width);
  int in_stage = 0;
  while (box < end) {
    RawBox<C> following[C::kAhead];
#pragma unroll
    for (int i = 0; i < C::kAhead; ++i)
      load_raw<C>(following[i], source, me.quad, box + C::kAhead + i, end, width);
#pragma unroll
    for (int i = 0; i < C::kAhead; ++i) {
      if (box + i >= end) break;
      if (in_stage == 0) ring.wait();
      const Fragment x = make_fragment<C>(params, raw[i], step);
      BoxScales<kProducts> scales = {};
      if constexpr (C::kBlockScales) {
        const float first = ring.stage_scales()[2 * in_stage];
        const float second = ring.stage_scales()[2 * in_stage + 1];
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
          scales.rows[p][0] = rows.second_block[p][0] ? second : first;
          scales.rows[p][1] = rows.second_block[p][1] ? second : first;
        }
        scales.tokens[0] = __shfl_sync(0xffffffffU, step.value, me.quad * 8);
        scales.tokens[1] = __shfl_sync(0xffffffffU, step.value, me.quad * 8 + 4);
      }
      multiply_box<C, kProducts>(
          ring.address() + static_cast<uint32_t>(in_stage * plan.down_box_bytes) + me.fragment, x,
          scales, sums);
      if (++in_stage == plan.down_stage_boxes || box + i + 1 == end) {
        in_stage = 0;
        __syncwarp();
        producer.issue(ring, ring.slot);
        ring.advance();
      }
    }
    box += C::kAhead;
#pragma unroll
    for (int i = 0; i < C::kAhead; ++i) raw[i] = following[i];
  }

  float token_scale[2] = {1, 1};
  if constexpr (C::kRowScales) {
    token_scale[0] = __shfl_sync(0xffffffffU, step.value, me.quad * 8);
    token_scale[1] = __shfl_sync(0xffffffffU, step.value, me.quad * 8 + 4);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = me.quad * 2 + i;
    const int its_slot = shared.tables->unit_slot[unit.unit][token];
    if (its_slot < 0) continue;
    float* target =
        shared.sums +
        ((token * plan.top_k + its_slot) * plan.k_slices + unit.slice) * plan.block_rows() +
        unit.pass * plan.pass_rows;
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = p * 16 + half * 8 + me.row;
        float value = sums.get(p, i + 2 * half);
        if constexpr (C::kRowScales) value *= rows.scale[p][half] * token_scale[i];
        if (row < plan.pass_rows) target[row] = value + rows.bias[p][half];
      }
    }
  }
}

template <class C>
__device__ void run_down(const DecodeParams& params, const Shared& shared, const Thread& me,
                         const Work& work, Ring<C>& ring, Producer<C>& producer) {
  for (int i = 0; i < work.num_down; ++i) {
    const DownUnit unit = work.down(params.plan, i);
    if (params.plan.pass_rows <= 16) {
      run_down_unit<C, 1>(params, shared, me, work, unit, ring, producer);
    } else {
      run_down_unit<C, 2>(params, shared, me, work, unit, ring, producer);
    }
  }
}

}  // namespace conclave::inline v0::experts::decode
