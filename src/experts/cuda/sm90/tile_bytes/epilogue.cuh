// The epilogue: scales, bias, activation, scales of the intermediate.
#pragma once

#include "experts/cuda/common/silu_pair.cuh"
#include "experts/cuda/sm90/tile_bytes/decoder.cuh"
#include "experts/cuda/sm90/tile_bytes/factors.cuh"
#include "experts/cuda/sm90/tile_bytes/store.cuh"

namespace conclave::inline v0::experts::tile_bytes {

// Keeps the compiler from computing a value early and keeping it: the sums leave no registers.
__device__ __forceinline__ void forget(int32_t& value) { asm volatile("" : "+r"(value)::"memory"); }

// Applies what the main loop left out: row_factor (the input's weight and, with row scales, the
// token's scale), with row scales the weight row's scale, with weights of lanes the factor of their
// matrix, and the bias.
template <class Config, bool kHasBias>
__device__ __forceinline__ void scale_columns(const Params& params, const Item& item,
                                              const ItemFactors<Config>& factors,
                                              const float (&row_factor)[2], float (&sums)[2][64]) {
  constexpr bool kGated = Config::kProduct == Product::kUpGated;
  float matrix[2] = {1, 1};
  if constexpr (Config::kHasLanes) {
    matrix[0] = params.sum_factors[item.expert * (kGated ? 2 : 1)] * DecodedLanes::kUnit;
    if (kGated) matrix[1] = params.sum_factors[item.expert * 2 + 1] * DecodedLanes::kUnit;
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float of_matrix = matrix[kGated ? j % 2 : 0];
      float2 scale = make_float2(of_matrix, of_matrix);
      if constexpr (!Config::kBlockScales && !Config::kHasLanes) scale = factors.scales(c, j);
      float2 bias = make_float2(0, 0);
      if constexpr (kHasBias) bias = factors.biases(c, j);
      sums[c][4 * j] = fmaf(sums[c][4 * j], row_factor[0] * scale.x, bias.x);
      sums[c][4 * j + 1] = fmaf(sums[c][4 * j + 1], row_factor[0] * scale.y, bias.y);
      sums[c][4 * j + 2] = fmaf(sums[c][4 * j + 2], row_factor[1] * scale.x, bias.x);
      sums[c][4 * j + 3] = fmaf(sums[c][4 * j + 3], row_factor[1] * scale.y, bias.y);
    }
  }
}

template <class Config>
__device__ __forceinline__ void scale_and_bias(const Params& params, const Item& item,
                                               const ItemFactors<Config>& factors,
                                               const float (&row_factor)[2], float (&sums)[2][64]) {
  if (params.bias != nullptr) {
    scale_columns<Config, true>(params, item, factors, row_factor, sums);
    return;
  }
  constexpr bool kIsScaled = Config::kBlockScales && !Config::kHasLanes;
  if (kIsScaled && params.input_weights == nullptr) return;
  scale_columns<Config, false>(params, item, factors, row_factor, sums);
}

// Finishes rows that are the only ones of their tokens, so that nothing is left for combine.
__device__ __forceinline__ void finish_rows(const Params& params, const int32_t (&slot)[2],
                                            float (&sums)[2][64]) {
  float weight[2] = {1, 1};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (params.finish_weights != nullptr && slot[half] >= 0)
      weight[half] = params.finish_weights[slot[half]];
  }
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    float& sum = sums[i / 64][i % 64];
    sum = finish_sum(sum, weight[i / 2 % 2], params.finish_scale);
  }
}

// Applies any formula to 16 sums at a time in shared memory, so that one copy of the formula's code
// serves all registers.
template <class Config>
__device__ __forceinline__ void activate_any(const Params& params, float (&scratch)[16][256],
                                             float (&sums)[2][64]) {
  constexpr bool kGated = Config::kProduct == Product::kUpGated;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int i = 0; i < 64; i += 16) {
#pragma unroll
      for (int n = 0; n < 16; ++n) scratch[n][threadIdx.x] = sums[c][i + n];
#pragma unroll 1
      for (int n = 0; n < 16; n += 1) {
        if (kGated && n / 4 % 2 == 1) continue;
        float& value = scratch[n][threadIdx.x];
        const float up = kGated ? scratch[n + 4][threadIdx.x] : value;
        value = activation::device::apply(params.activation, value, up);
      }
#pragma unroll
      for (int n = 0; n < 16; ++n) sums[c][i + n] = scratch[n][threadIdx.x];
    }
  }
}

__device__ __forceinline__ void activate_silu(float (&sums)[2][64]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      if (i / 4 % 2 == 1) continue;
      silu_pair(sums[c][i], sums[c][i + 1], sums[c][i + 4], sums[c][i + 5]);
    }
  }
}

// In a gated item, activated values replace the gate's.
template <class Config>
__device__ __forceinline__ void activate(const Params& params, float (&scratch)[16][256],
                                         float (&sums)[2][64]) {
  const activation::FusedForm fused = params.activation.fused;
  if (Config::kProduct == Product::kUpPlain || fused == activation::FusedForm::kNone) {
    activate_any<Config>(params, scratch, sums);
    return;
  }
  if (fused == activation::FusedForm::kSilu) {
    activate_silu(sums);
    return;
  }
  const activation::FormulaParameters& p = params.activation.parameters;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i / 4 % 2 == 1) continue;
      sums[c][i] = activation::device::SwigluOai::apply(sums[c][i], sums[c][i + 4], p);
    }
  }
}

// Sets values beyond I to 0, so that they neither raise a scale nor leave rubbish in a row's
// padding.
template <class Config>
__device__ __forceinline__ void clear_beyond(const Params& params, const Item& item,
                                             float (&sums)[2][64]) {
  if ((item.feature_tile + 1) * Config::kFeatures <= params.features) return;
  const int32_t quad_column = 2 * (static_cast<int32_t>(threadIdx.x) % 4);
#pragma unroll
  for (int block = 0; block < Config::kFeatures / kScaleGroup; ++block) {
#pragma unroll
    for (int g = 0; g < 16; ++g) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int32_t feature = item.feature_tile * Config::kFeatures + block * kScaleGroup +
                                8 * g + quad_column + n % 2;
        if (feature >= params.features) activated<Config>(sums, block, g, n / 2, n % 2) = 0;
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ float quad_amax(float (&sums)[2][64], int block, int half) {
  float amax = 0;
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    amax = fmaxf(amax, fabsf(activated<Config>(sums, block, g, half, 0)));
    amax = fmaxf(amax, fabsf(activated<Config>(sums, block, g, half, 1)));
  }
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  return fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
}

// Stores the codes of one row and 128 features, and their scale if it is dynamic.
template <class Config>
__device__ __forceinline__ void quantize_row(const Params& params, int32_t sorted_row,
                                             int32_t column, int block, int half,
                                             float constant_scale, float (&sums)[2][64]) {
  const bool stored = sorted_row >= 0;
  float scale = constant_scale;
  if constexpr (Config::kBlockScales) {
    scale = group_scale(quad_amax<Config>(sums, block, half), params.power_of_two);
    if (stored && threadIdx.x % 4 == 0 && column < params.features) {
      params.output_scales[(column / kScaleGroup) * params.output_scale_stride + sorted_row] =
          scale;
    }
  }
  uint8_t* row =
      stored ? static_cast<uint8_t*>(params.output) + sorted_row * params.output_stride : nullptr;
  store_codes<Config>(params, sums, block, half, quant::invert_step(scale), row, column);
}

template <class Config>
__device__ __forceinline__ void store_up(const Params& params, const Item& item,
                                         const int32_t (&sorted_row)[2], float (&scratch)[16][256],
                                         float (&sums)[2][64]) {
  activate<Config>(params, scratch, sums);
  clear_beyond<Config>(params, item, sums);
  const int32_t column = item.feature_tile * Config::kFeatures;
  if (!Config::kBlockScales && params.output_constant_scale == nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = sorted_row[half] < 0 ? nullptr
                                        : static_cast<float*>(params.output) +
                                              sorted_row[half] * params.output_stride;
#pragma unroll
      for (int block = 0; block < Config::kFeatures / kScaleGroup; ++block) {
        store_f32_row<Config>(params, sums, block, half, row, column + block * kScaleGroup);
      }
    }
    return;
  }
  const float constant_scale = Config::kBlockScales ? 1.0F : *params.output_constant_scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < Config::kFeatures / kScaleGroup; ++block) {
      quantize_row<Config>(params, sorted_row[half], column + block * kScaleGroup, block, half,
                           constant_scale, sums);
    }
  }
}

// The first of the two rows of a consumer thread; the other is 8 below. It is computed anew at each
// use, because the main loop has no register for it.
__device__ __forceinline__ int32_t row_of_thread() {
  auto thread = static_cast<int32_t>(threadIdx.x);
  forget(thread);
  return thread / 32 * 16 + thread % 32 / 4;
}

// The slots of a consumer thread's rows, `row` and `row` + 8 of the item; negative where there is
// no row. Down products fetch them before the main loop, which hides the latency.
struct SlotsOfThread {
  int32_t slot[2] = {-1, -1};
};

template <class Config>
__device__ __forceinline__ SlotsOfThread slots_of_thread(const Params& params, const Item& item,
                                                         int32_t row) {
  SlotsOfThread slots;
  if constexpr (Config::kIsDown) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < item.count)
        slots.slot[half] = params.row_slot[item.begin + row + 8 * half];
    }
  }
  return slots;
}

template <class Config>
__device__ __forceinline__ void finish_item(const Params& params, const Item& item,
                                            const ItemFactors<Config>& factors,
                                            const SlotsOfThread& slots, float (&scratch)[16][256],
                                            float (&sums)[2][64]) {
  factors.await();
  const int32_t row = row_of_thread();
  float row_factor[2] = {1, 1};
  int32_t sorted_row[2] = {-1, -1};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= item.count) continue;
    sorted_row[half] = item.begin + row + 8 * half;
    row_factor[half] = factors.row_scale(row + 8 * half);
    if (!Config::kIsDown && params.input_weights != nullptr) {
      row_factor[half] *= params.input_weights[params.row_slot[sorted_row[half]]];
    }
  }
  scale_and_bias<Config>(params, item, factors, row_factor, sums);
  if constexpr (Config::kAddsRows) {
    add_down<Config>(params, item, slots.slot, sums);
  } else if constexpr (Config::kIsDown) {
    if (params.finishes_rows) finish_rows(params, slots.slot, sums);
    store_down<Config>(params, item, slots.slot, sums);
  } else {
    store_up<Config>(params, item, sorted_row, scratch, sums);
  }
}

}  // namespace conclave::inline v0::experts::tile_bytes
