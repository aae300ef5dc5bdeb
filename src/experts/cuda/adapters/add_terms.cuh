// Adds what adapters contribute to a thread's sums.
#pragma once

#include "cuda/device/mma.cuh"
#include "experts/cuda/adapters/device_factors.h"

#include <cstdint>
#include <cuda_bf16.h>

namespace conclave::inline v0::experts::adapters {

// Eight neighbouring elements of a factor as float32.
__device__ __forceinline__ void load_eight(const void* factor, int64_t at, bool is_bf16,
                                           float (&values)[8]) {
  if (is_bf16) {
    const uint4 words =
        *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(factor) + at);
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(pairs[i] << 16);
      values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000U);
    }
    return;
  }
  const auto* const floats = static_cast<const float*>(factor) + at;
  const float4 low = *reinterpret_cast<const float4*>(floats);
  const float4 high = *reinterpret_cast<const float4*>(floats + 4);
  values[0] = low.x;
  values[1] = low.y;
  values[2] = low.z;
  values[3] = low.w;
  values[4] = high.x;
  values[5] = high.y;
  values[6] = high.z;
  values[7] = high.w;
}

// Row `row` of half `half`'s B times the row's terms.
__device__ __forceinline__ float delta_of(const RowFactors& factors, int half, int64_t row,
                                          const float* terms) {
  const int32_t rank = factors.rank[half];
  const float* const own = terms + factors.first[half];
  float sum = 0;
#pragma unroll 1
  for (int32_t r = 0; r < rank; r += 8) {
    float b[8];
    float t[8];
    load_eight(factors.b[half], row * rank + r, factors.is_bf16 != 0, b);
    load_eight(own, r, false, t);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(b[i], t[i], sum);
  }
  return sum;
}

// Two float32 numbers as sums of three pairs of bf16, whose bits together are theirs.
struct SplitPair {
  uint32_t parts[3];
};
__device__ __forceinline__ SplitPair split_pair(float2 values) {
  SplitPair split;
#pragma unroll
  for (uint32_t& part : split.parts) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values.x, values.y);
    values.x -= __low2float(pair);
    values.y -= __high2float(pair);
    part = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return split;
}

// Two neighbouring elements of a factor.
__device__ __forceinline__ SplitPair load_pair(const void* factor, int64_t at, bool is_bf16) {
  if (!is_bf16) {
    return split_pair(*reinterpret_cast<const float2*>(static_cast<const float*>(factor) + at));
  }
  const auto* const pair =
      reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(factor) + at);
  return {{*pair, 0, 0}};
}

// One half of the factors that a warp multiplies: a row of B for each lane, and its tokens' terms.
struct WarpHalf {
  const void* b = nullptr;
  int64_t row = 0;
  bool has_row = false;  // it is one of the matrix's
  int32_t rank = 0;
  bool is_bf16 = false;
  const float* terms = nullptr;  // lane / 4 is their token; null: it has other factors, or none
};

// A lane multiplies these at a time: two columns of B's row and as many terms, and those eight
// columns further.
constexpr int32_t kStepColumns = 16;
struct LaneStep {
  SplitPair b[2] = {};
  float2 terms[2] = {};
};
template <bool kIsBf16 = false>
__device__ __forceinline__ LaneStep load_step(const WarpHalf& half, int32_t k, int32_t lane) {
  LaneStep step;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int32_t at = k + 8 * part + lane % 4 * 2;
    if (at >= half.rank) continue;
    if (half.has_row)
      step.b[part] = load_pair(half.b, half.row * half.rank + at, kIsBf16 || half.is_bf16);
    if (half.terms != nullptr) step.terms[part] = *reinterpret_cast<const float2*>(half.terms + at);
  }
  return step;
}

// c += B's rows times terms, for rows lane / 4, or with kUpper lane / 4 + 8, and eight tokens.
// Products of float32 take six of bf16, and those of bf16 and float32 three.
template <bool kUpper>
__device__ __forceinline__ void multiply_step(float (&c)[4], const LaneStep& step, bool is_bf16) {
  const SplitPair t[2] = {split_pair(step.terms[0]), split_pair(step.terms[1])};
  const int most = is_bf16 ? 1 : 3;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (i >= most) break;
#pragma unroll
    for (int j = 0; i + j < 3; ++j) {
      const uint32_t low = step.b[0].parts[i];
      const uint32_t high = step.b[1].parts[i];
      if constexpr (kUpper) {
        cuda::device::mma_m16n8k16_bf16(c, 0, low, 0, high, t[0].parts[j], t[1].parts[j]);
      } else {
        cuda::device::mma_m16n8k16_bf16(c, low, 0, high, 0, t[0].parts[j], t[1].parts[j]);
      }
    }
  }
}
template <bool kUpper>
__device__ __forceinline__ void multiply_half(float (&c)[4], const WarpHalf& half, int32_t begin,
                                              int32_t lane) {
#pragma unroll 1
  for (int32_t k = begin; k < half.rank; k += kStepColumns) {
    multiply_step<kUpper>(c, load_step(half, k, lane), half.is_bf16);
  }
}

__device__ __forceinline__ const void* shuffle_pointer(const void* pointer, int lane) {
  return reinterpret_cast<const void*>(
      __shfl_sync(0xffffffffU, reinterpret_cast<unsigned long long>(pointer), lane));
}

// The rows of B that a warp's sums belong to: row lane / 4 is `first` of half 0, row lane / 4 + 8
// is `second` of half `half`. Those from `features` on do not exist.
struct WarpRows {
  int32_t first = 0;
  int32_t second = 0;
  int half = 0;
  int32_t features = 0;
};

// Both halves of the factors that tokens of a warp share: those of the first lane of `left`.
struct SharedHalves {
  WarpHalf lower;
  WarpHalf upper;
  uint32_t same = 0;  // lanes whose tokens have these factors
};
__device__ __forceinline__ SharedHalves halves_of(uint32_t left, const RowFactors& own,
                                                  const float* terms, const WarpRows& rows) {
  const int leader = __ffs(static_cast<int>(left)) - 1;
  const void* const first = shuffle_pointer(own.b[0], leader);
  const void* const second = shuffle_pointer(own.b[1], leader);
  const bool is_same =
      (own.rank[0] != 0 || own.rank[1] != 0) && own.b[0] == first && own.b[1] == second;
  const int32_t ranks = __shfl_sync(0xffffffffU, own.rank[0] << 16 | own.rank[1], leader);
  const int32_t begin =
      __shfl_sync(0xffffffffU, int32_t{rows.half == 0 ? own.first[0] : own.first[1]}, leader);
  const bool is_bf16 = __shfl_sync(0xffffffffU, own.is_bf16, leader) != 0;
  return {.lower = {.b = first,
                    .row = rows.first,
                    .has_row = rows.first < rows.features,
                    .rank = ranks >> 16,
                    .is_bf16 = is_bf16,
                    .terms = is_same ? terms : nullptr},
          .upper = {.b = rows.half == 0 ? first : second,
                    .row = rows.second,
                    .has_row = rows.second < rows.features,
                    .rank = rows.half == 0 ? ranks >> 16 : ranks & 0xffff,
                    .is_bf16 = is_bf16,
                    .terms = is_same ? terms + begin : nullptr},
          .same = __ballot_sync(0xffffffffU, is_same)};
}
__device__ __forceinline__ uint32_t lanes_with_factors(const RowFactors& own) {
  return __ballot_sync(0xffffffffU, own.rank[0] != 0 || own.rank[1] != 0);
}

// The first step of eight tokens' first factors in bf16, asked for before the sums are complete.
struct EarlyStep {
  RowFactors own;          // token lane / 4 has these
  LaneStep steps[2] = {};  // one for each half
};
__device__ __forceinline__ void load_early(EarlyStep& early, const float* terms,
                                           const WarpRows& rows, int32_t lane) {
  const uint32_t left = lanes_with_factors(early.own);
  if (left == 0) return;
  const SharedHalves halves = halves_of(left, early.own, terms, rows);
  if (!halves.lower.is_bf16) return;
  early.steps[0] = load_step<true>(halves.lower, 0, lane);
  early.steps[1] = load_step<true>(halves.upper, 0, lane);
}

// Adds to a warp's sums of eight tokens, which lie as mma leaves them. Tokens of one adapter are
// multiplied together, with zeros in the place of others, which keep every bit: a zero would not
// stop an infinity or NaN of the factors. `early` has the first step.
__device__ __forceinline__ void add_to_eight(float (&c)[4], const EarlyStep& early,
                                             const float* terms, const WarpRows& rows,
                                             int32_t lane) {
  uint32_t left = lanes_with_factors(early.own);
  bool is_first = true;
  while (left != 0) {
    const float before[4] = {c[0], c[1], c[2], c[3]};
    const SharedHalves halves = halves_of(left, early.own, terms, rows);
    int32_t begin = 0;
    if (is_first && halves.lower.is_bf16) {
      multiply_step<false>(c, early.steps[0], true);
      multiply_step<true>(c, early.steps[1], true);
      begin = kStepColumns;
    }
    is_first = false;
    multiply_half<false>(c, halves.lower, begin, lane);
    multiply_half<true>(c, halves.upper, begin, lane);
    left &= ~halves.same;
    // Four lanes share a token; c has those of two of them.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((halves.same >> (lane % 4 * 8 + i % 2 * 4) & 1) == 0) c[i] = before[i];
    }
  }
}

}  // namespace conclave::inline v0::experts::adapters
