// What every block repeats before its products: tables of experts, conversion of the rows.
#pragma once

#include "experts/cuda/decode_config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

__device__ __forceinline__ int local_expert(const DecodeParams& params, int64_t pair) {
  const DeviceDecodeCall& call = params.call;
  const int32_t id = call.topk_ids[pair];
  if (id < 0 || id >= call.num_experts) return -1;
  const int32_t local = call.local_expert != nullptr ? call.local_expert[id] : id;
  return local < params.plan.num_local_experts ? local : -1;
}

// Fills the tables; returns the number of distinct experts. Ends in a block barrier.
__device__ int make_tables(const DecodeParams& params, DecodeTables& tables, const Thread& me,
                           int tokens) {
  const int top_k = params.plan.top_k;
  const int pairs = tokens * top_k;
  const int pair = static_cast<int>(threadIdx.x);
  const int token = pair / top_k;
  int expert = -1;
  if (pair < pairs) {
    expert = max(local_expert(params, pair), -1);
    tables.pair_expert[pair] = expert;
    tables.pair_weight[pair] = params.call.topk_weights[pair];
  }
  for (int i = 0; i < kDecodeMaxTokens; ++i) tables.unit_slot[threadIdx.x][i] = -1;
  if (threadIdx.x < kDecodeMaxTokens) tables.token_amax[threadIdx.x] = 0;
  __syncthreads();
  int first = pair;
  int source = pair;
  if (expert >= 0) {
    for (int other = pair - 1; other >= 0; --other) {
      if (tables.pair_expert[other] != expert) continue;
      first = other;
      if (other >= token * top_k) source = other;
    }
    tables.pair_source[pair] = static_cast<int16_t>(source);
  }
  const bool is_first = expert >= 0 && first == pair;
  const uint32_t ballot = __ballot_sync(0xffffffffU, is_first);
  if (me.lane == 0) tables.warp_units[me.warp] = __popc(ballot);
  __syncthreads();
  int before = 0;
  int units = 0;
  for (int warp = 0; warp < kDecodeWarps; ++warp) {
    if (warp < me.warp) before += tables.warp_units[warp];
    units += tables.warp_units[warp];
  }
  // The number of a pair's unit, for the pairs that follow, in the place of its scale.
  if (is_first) {
    const int unit = before + __popc(ballot & ((1U << me.lane) - 1U));
    tables.unit_expert[unit] = expert;
    tables.pair_scale[pair] = __int_as_float(unit);
  }
  __syncthreads();
  if (expert >= 0 && source == pair) {
    const int unit = __float_as_int(tables.pair_scale[first]);
    tables.unit_slot[unit][token] = static_cast<int8_t>(pair - token * top_k);
  }
  __syncthreads();
  return units;
}

__device__ __forceinline__ const void* hidden_row(const DecodeParams& params, int token) {
  const int64_t bytes = params.call.hidden_dtype == DType::kF32 ? 4 : 2;
  return static_cast<const char*>(params.call.hidden) + token * params.call.hidden_stride * bytes;
}

// 16-bit rows.
template <class C>
__device__ void convert_rows(const DecodeParams& params, const Shared& shared, int tokens) {
  const DecodePlan& plan = params.plan;
  const int chunks = plan.up_boxes * 8;  // of 16 bytes
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < tokens * chunks; i += kDecodeThreads) {
    const int token = i / chunks;
    const int chunk = i - token * chunks;
    float values[8];
    read_eight(hidden_row(params, token), params.call.hidden_dtype, chunk * 8, plan.hidden_size,
               values);
    const uint4 packed = {C::pack(values[0], values[1]), C::pack(values[2], values[3]),
                          C::pack(values[4], values[5]), C::pack(values[6], values[7])};
    *reinterpret_cast<uint4*>(shared.rows + token * params.shared.row_pitch + chunk * 16) = packed;
  }
}

__device__ __forceinline__ float group_amax(const float (&values)[8]) {
  float amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(values[i]));
  return amax;
}

// e4m3 rows: 16 lanes a group of 128 columns, two groups a warp.
__device__ void quantize_rows(const DecodeParams& params, const Shared& shared, const Thread& me,
                              int tokens) {
  const DecodePlan& plan = params.plan;
  const int groups = tokens * plan.up_boxes;
  const int part = me.lane % 16;
  const auto read = [&](int index, float(&values)[8]) {
    const int token = index / plan.up_boxes;
    const int column = (index - token * plan.up_boxes) * 128 + part * 8;
    read_eight(hidden_row(params, token), params.call.hidden_dtype, column, plan.hidden_size,
               values);
    if (params.call.weight_on_input) {
      const float weight = shared.tables->pair_weight[token];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] *= weight;
    }
    return token;
  };
  if (params.row_scale == RowScale::kToken) {
    for (int i = me.warp * 2 + me.lane / 16; i < groups; i += 2 * kDecodeWarps) {
      float values[8];
      const int token = read(i, values);
      atomicMax(&shared.tables->token_amax[token], __float_as_uint(group_amax(values)));
    }
    __syncthreads();
  }
#pragma unroll 2
  for (int i = me.warp * 2; i < groups; i += 2 * kDecodeWarps) {
    const int index = min(i + me.lane / 16, groups - 1);
    float values[8];
    const int token = read(index, values);
    const int box = index - token * plan.up_boxes;
    float scale = 1;
    if (params.row_scale == RowScale::kGroup) {
      float amax = group_amax(values);
#pragma unroll
      for (int step = 8; step > 0; step /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, step));
      scale = dynamic_scale(amax, params.power_of_two_scales);
    } else if (params.row_scale == RowScale::kToken) {
      scale = dynamic_scale(__uint_as_float(shared.tables->token_amax[token]),
                            params.power_of_two_scales);
    } else {
      scale = params.weights.input_scale[0];
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) values[k] = isinf(values[k]) ? NAN : __fdiv_rn(values[k], scale);
    const uint2 codes = {pack_e4m3(values[0], values[1], values[2], values[3]),
                         pack_e4m3(values[4], values[5], values[6], values[7])};
    *reinterpret_cast<uint2*>(shared.rows + token * params.shared.row_pitch + box * 128 +
                              part * 8) = codes;
    if (part == 0) shared.row_scales[box * kDecodeMaxTokens + token] = scale;
  }
}

}  // namespace conclave::inline v0::experts::decode
