// Walk that every block repeats before its products: tables of experts, conversion of the rows.
#pragma once

#include "cuda/device/shared_slot.cuh"
#include "experts/cuda/sm90/decode/config.cuh"
#include "experts/cuda/sm90/decode/lanes.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// A pair's id and weight, as the caller gave them or those of a shared expert.
__device__ __forceinline__ ptx::SharedSlot given_slot(const DecodeParams& params, int pair) {
  const OneLaunchCall& call = params.call;
  if (call.shared.count == 0) return {call.topk_ids[pair], call.topk_weights[pair]};
  const int token = pair / params.plan.top_k;
  const int slot = pair - token * params.plan.top_k;
  const int given = params.plan.top_k - call.shared.count;
  if (slot >= given) return ptx::shared_slot(call.shared, token, slot - given);
  const int at = token * given + slot;
  return {call.topk_ids[at], call.topk_weights[at]};
}

// The local expert of `id`, or -1 if the id contributes nothing.
__device__ __forceinline__ int local_expert(const DecodeParams& params, int32_t id) {
  const OneLaunchCall& call = params.call;
  if (id < 0 || id >= call.num_experts) {
    if (id != -1 && blockIdx.x == 0 && call.skipped_ids != nullptr)
      atomicAdd(reinterpret_cast<unsigned long long*>(call.skipped_ids), 1ULL);
    return -1;
  }
  const int32_t local = call.local_expert != nullptr ? call.local_expert[id] : id;
  return local < params.plan.num_local_experts ? max(local, -1) : -1;
}

// Table entries that a pair makes if it is the first of its unit, or its token's first with this
// expert.
struct Entry {
  int expert = -1;
  int unit = 0;
  int row = 0;          // number of tokens in earlier units
  uint32_t tokens = 0;  // bits of the unit's tokens
  bool is_first = false;
  bool is_tokens_first = false;
  float weight = 0;  // summed over the token's slots with the expert
};
__device__ __forceinline__ void enter(DecodeTables& tables, int pair, int top_k,
                                      const Entry& entry) {
  const int token = pair / top_k;
  if (entry.is_first) {
    tables.unit_expert[entry.unit] = entry.expert;
    tables.unit_tokens[entry.unit] = entry.tokens;
    tables.unit_row[entry.unit] = entry.row;
  }
  if (entry.is_tokens_first) {
    tables.unit_slot[entry.unit][token] = static_cast<uint8_t>(pair - token * top_k);
    tables.unit_weight[entry.unit][token] = entry.weight;
  }
}

// Makes the tables of at most 32 pairs, one lane per pair.
__device__ __forceinline__ void make_tables_in_warp(const DecodeParams& params,
                                                    DecodeTables& tables, int lane, int tokens) {
  constexpr uint32_t kAll = 0xffffffffU;
  const int top_k = params.plan.top_k;
  const bool inside = lane < tokens * top_k;
  ptx::SharedSlot given{-1, 0.0F};
  if (inside) given = given_slot(params, lane);
  const float weight = given.weight;
  Entry entry;
  if (inside) entry.expert = local_expert(params, given.id);
  tables.pair_expert[lane] = entry.expert;
  tables.pair_weight[lane] = weight;
  const uint32_t same = __match_any_sync(kAll, entry.expert);
  const int token = lane / top_k;
  const bool valid = entry.expert >= 0;
  entry.is_first = valid && (same & ((1U << lane) - 1U)) == 0;
  // Bits of the token's own slots.
  const uint32_t slots = (top_k == 32 ? kAll : ((1U << top_k) - 1U) << (token * top_k % 32));
  entry.is_tokens_first = valid && (same & slots & ((1U << lane) - 1U)) == 0;
  uint32_t its_tokens = 0;
  for (int other = 0; other < tokens; ++other) {
    const uint32_t others = top_k == 32 ? kAll : ((1U << top_k) - 1U) << (other * top_k);
    its_tokens |= (same & others) != 0 ? 1U << other : 0U;
  }
  entry.tokens = its_tokens;
  const uint32_t firsts = __ballot_sync(kAll, entry.is_first);
  for (uint32_t rest = firsts; rest != 0; rest &= rest - 1) {
    const int source = __ffs(static_cast<int>(rest)) - 1;
    const int expert = __shfl_sync(kAll, entry.expert, source);
    const uint32_t others = __shfl_sync(kAll, its_tokens, source);
    if (expert < entry.expert) {
      ++entry.unit;
      entry.row += __popc(others);
    }
  }
  __syncwarp();
  if (entry.is_tokens_first) {
    for (uint32_t rest = same & slots; rest != 0; rest &= rest - 1)
      entry.weight += tables.pair_weight[__ffs(static_cast<int>(rest)) - 1];
  }
  if (lane == 0) tables.units = __popc(firsts);
  enter(tables, lane, top_k, entry);
  __syncwarp();
}

// Makes the tables with one thread per pair. Ends in a barrier.
__device__ __forceinline__ void make_tables_in_block(const DecodeParams& params,
                                                     DecodeTables& tables, int tokens) {
  const int pair = static_cast<int>(threadIdx.x);
  const int top_k = params.plan.top_k;
  const int pairs = tokens * top_k;
  const int token = pair / top_k;
  Entry entry;
  if (pair < kDecodeMaxPairs) {
    ptx::SharedSlot given{-1, 0.0F};
    if (pair < pairs) {
      given = given_slot(params, pair);
      entry.expert = local_expert(params, given.id);
    }
    tables.pair_expert[pair] = entry.expert;
    tables.pair_weight[pair] = given.weight;
    tables.pair_tokens[pair] = 0;
  }
  if (pair == 0) tables.units = 0;
  __syncthreads();
  // From here on, each unit's first pair stands for it.
  int first = pair;
  if (entry.expert >= 0) {
    entry.is_tokens_first = true;
    for (int other = pairs - 1; other >= 0; --other) {
      if (tables.pair_expert[other] != entry.expert) continue;
      if (other < first) first = other;
      if (other >= token * top_k && other < pair) entry.is_tokens_first = false;
    }
    entry.is_first = first == pair;
    if (entry.is_first) atomicAdd(&tables.units, 1);
    if (entry.is_tokens_first) atomicOr(&tables.pair_tokens[first], 1U << token);
  }
  __syncthreads();
  if (entry.expert >= 0) {
    entry.tokens = tables.pair_tokens[first];
    // Only first pairs have tokens.
#pragma unroll 4
    for (int other = 0; other < pairs; ++other) {
      const uint32_t others = tables.pair_tokens[other];
      const bool before = others != 0 && tables.pair_expert[other] < entry.expert;
      entry.unit += before ? 1 : 0;
      entry.row += before ? __popc(others) : 0;
    }
    for (int other = token * top_k; other < (token + 1) * top_k; ++other) {
      if (tables.pair_expert[other] == entry.expert) entry.weight += tables.pair_weight[other];
    }
    enter(tables, pair, top_k, entry);
  }
  __syncthreads();
}

__device__ __forceinline__ const char* hidden_row(const DecodeParams& params, int token) {
  const int64_t bytes = params.call.hidden_dtype == DType::kF32 ? 4 : 2;
  return static_cast<const char*>(params.call.hidden) + token * params.call.hidden_stride * bytes;
}

// The input rows in chunks of eight columns; chunk c belongs to token c / per_row.
struct RowChunks {
  const DecodeParams& params;
  int per_row;
  int total;
  bool fast;  // 16-bit elements in aligned chunks

  __device__ RowChunks(const DecodeParams& p, int tokens)
      : params(p), per_row(p.plan.up_boxes * p.plan.box_columns / 8) {
    total = tokens * per_row;
    const OneLaunchCall& call = params.call;
    fast = call.hidden_dtype != DType::kF32 && params.plan.hidden_size % 8 == 0 &&
           call.hidden_stride % 8 == 0 && reinterpret_cast<uintptr_t>(call.hidden) % 16 == 0;
  }
  __device__ __forceinline__ uint4 load(int chunk) const {
    const int token = chunk / per_row;
    const int column = (chunk - token * per_row) * 8;
    if (!fast || chunk >= total || column >= params.plan.hidden_size) return {};
    return *reinterpret_cast<const uint4*>(hidden_row(params, token) + int64_t{column} * 2);
  }
  __device__ __forceinline__ void widen_chunk(int chunk, const uint4& raw,
                                              float (&values)[8]) const {
    if (fast) {
      widen(raw, params.call.hidden_dtype == DType::kF16, values);
      return;
    }
    const int token = chunk / per_row;
    const int column = (chunk - token * per_row) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = 0;
      if (chunk < total && column + i < params.plan.hidden_size)
        values[i] = read_element(hidden_row(params, token), params.call.hidden_dtype, column + i);
    }
  }
};

// The consumers call visit(chunk, values) for all chunks; loads run four chunks ahead.
template <class Config, class Visit>
__device__ __forceinline__ void for_each_chunk(const RowChunks& chunks, const Visit& visit) {
  constexpr int kAhead = 4;
  for (int first = static_cast<int>(threadIdx.x);
       first - static_cast<int>(threadIdx.x) < chunks.total; first += kAhead * Config::kConsumers) {
    uint4 raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) raw[i] = chunks.load(first + i * Config::kConsumers);
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = first + i * Config::kConsumers;
      if (chunk - static_cast<int>(threadIdx.x) >= chunks.total) break;
      float values[8];
      chunks.widen_chunk(chunk, raw[0], values);
      visit(chunk, values);
#pragma unroll
      for (int k = 0; k + 1 < kAhead; ++k) raw[k] = raw[k + 1];
    }
  }
}

// Stores input rows in shared memory as 16-bit rows, in the order of lanes if weights have it.
template <class Config>
__device__ __forceinline__ void convert_rows(const DecodeParams& params, const Shared& shared,
                                             int tokens) {
  const RowChunks chunks(params, tokens);
  for_each_chunk<Config>(chunks, [&](int chunk, const float(&values)[8]) {
    if (chunk >= chunks.total) return;
    const int token = chunk / chunks.per_row;
    const uint4 packed = {Config::pack(values[0], values[1]), Config::pack(values[2], values[3]),
                          Config::pack(values[4], values[5]), Config::pack(values[6], values[7])};
    unsigned char* const row = shared.rows + token * params.shared.up_pitch;
    const int of_row = chunk - token * chunks.per_row;
    if constexpr (Config::kHasLanes) {
      const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<uint32_t*>(row + lane_place_of(of_row, i)) = pairs[i];
      }
    } else {
      *reinterpret_cast<uint4*>(row + of_row * 16) = packed;
    }
  });
}

template <class Rule>
__device__ __forceinline__ float group_amax(const float (&values)[8]) {
  float amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = Rule::larger(amax, values[i]);
  return amax;
}

__device__ __forceinline__ void weigh(const DecodeParams& params, int token, float (&values)[8]) {
  if (!params.call.weight_on_input) return;
  const float weight = params.call.topk_weights[token];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] *= weight;
}

// Stores input rows as rows of codes, with 16 lanes per group of 128 columns.
template <class Config>
__device__ __forceinline__ void quantize_rows(const DecodeParams& params, const Shared& shared,
                                              int tokens) {
  using Rule = typename Config::RowRule;
  const RowChunks chunks(params, tokens);
  DecodeTables& tables = *shared.tables;
  if (Config::kRowScales && params.row_scale == RowScale::kToken) {
    if (threadIdx.x < kDecodeMaxTokens) tables.token_amax[threadIdx.x] = 0;
    consumer_sync<Config>();
    for_each_chunk<Config>(chunks, [&](int chunk, float(&values)[8]) {
      const int token = min(chunk, chunks.total - 1) / chunks.per_row;
      weigh(params, token, values);
      // 16 lanes have columns of one token.
      const float amax = warp_max<Rule, 16>(chunk < chunks.total ? group_amax<Rule>(values) : 0.0F);
      if (chunk < chunks.total && threadIdx.x % 16 == 0)
        atomicMax(&tables.token_amax[token], __float_as_uint(amax));
    });
    consumer_sync<Config>();
  }
  for_each_chunk<Config>(chunks, [&](int chunk, float(&values)[8]) {
    const int token = min(chunk, chunks.total - 1) / chunks.per_row;
    weigh(params, token, values);
    float scale = 1;
    if constexpr (!Config::kRowScales) {
      scale = Rule::scale(warp_max<Rule, 16>(group_amax<Rule>(values)), params.power_of_two_scales);
    } else if (params.row_scale == RowScale::kToken) {
      scale = Rule::scale(__uint_as_float(tables.token_amax[token]), params.power_of_two_scales);
    } else {
      scale = params.weights.input_scale[0];
    }
    const Step step = make_step(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = divide<Config::kRowScales>(values[i], step);
    if (chunk >= chunks.total) return;
    const uint2 codes = {Rule::pack(values[0], values[1], values[2], values[3]),
                         Rule::pack(values[4], values[5], values[6], values[7])};
    *reinterpret_cast<uint2*>(shared.rows + token * params.shared.up_pitch +
                              (chunk - token * chunks.per_row) * 8) = codes;
    if (chunk % 16 == 0) shared.row_scales[chunk / 16] = scale;
  });
}

}  // namespace conclave::inline v0::experts::decode
