// Turns sums into results for tile_fp8_sm90.cuh: scales, bias, activation, codes, stores.
#pragma once

#include "experts/cuda/common/silu_pair.cuh"
#include "experts/cuda/sm90/tile_fp8/config.cuh"

namespace conclave::inline v0::experts::tile_fp8 {

// Register i of lane q of a quad becomes register q of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                               uint32_t& r3) {
  const bool odd = threadIdx.x % 2 != 0;
  const bool high = threadIdx.x % 4 >= 2;
  uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? r0 : r1, 1);
  uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? r2 : r3, 1);
  (odd ? r0 : r1) = a;
  (odd ? r2 : r3) = b;
  a = __shfl_xor_sync(0xffffffffu, high ? r0 : r2, 2);
  b = __shfl_xor_sync(0xffffffffu, high ? r1 : r3, 2);
  (high ? r0 : r2) = a;
  (high ? r1 : r3) = b;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The expert's two scales or biases for this thread's columns of accumulator pair j of chunk c, or
// 0 beyond the features. Those of up lie `half` after those of gate.
template <class C>
__device__ __forceinline__ float2 of_columns(const TileView& tile, const float* rows, int64_t half,
                                             int32_t features, int c, int j) {
  constexpr bool kGated = C::kProduct == Product::kGated;
  const int32_t feature = tile.feature_tile * C::kFeatures +
                          (kGated ? c * 64 + (j / 2) * 8 : c * 128 + j * 8) +
                          2 * (static_cast<int32_t>(threadIdx.x) % 4);
  const float* row = rows + (kGated && j % 2 == 1 ? half : 0);
  return make_float2(feature < features ? row[feature] : 0,
                     feature + 1 < features ? row[feature + 1] : 0);
}

// Keeps the compiler from hoisting loads of all columns, or keeping all their predicates: the sums
// leave no registers for them.
__device__ __forceinline__ void forget(int32_t& value) { asm volatile("" : "+r"(value)::"memory"); }

// Applies what the main loop left out: row_factor (the input's weight and, with row scales, the
// token's scale), with row scales the weight row's scale, and the bias.
template <class C>
__device__ __forceinline__ void scale_and_bias(const Params& p, const TileView& tile,
                                               const float (&row_factor)[2], float (&sums)[2][64]) {
  if (C::kBlockScales && p.bias == nullptr && p.input_weights == nullptr) return;
  constexpr bool kGated = C::kProduct == Product::kGated;
  const float* scales = p.weight_scales + tile.expert * p.expert_scale_stride;
  const float* biases = p.bias + int64_t{tile.expert} * p.features * (kGated ? 2 : 1);
  int32_t features = p.features;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (j % 4 == 0) forget(features);
      float2 scale = make_float2(1, 1);
      float2 bias = make_float2(0, 0);
      if constexpr (!C::kBlockScales) {
        scale = of_columns<C>(tile, scales, p.half_scale_stride, features, c, j);
      }
      if (p.bias != nullptr) bias = of_columns<C>(tile, biases, p.features, features, c, j);
      sums[c][4 * j] = fmaf(sums[c][4 * j], row_factor[0] * scale.x, bias.x);
      sums[c][4 * j + 1] = fmaf(sums[c][4 * j + 1], row_factor[0] * scale.y, bias.y);
      sums[c][4 * j + 2] = fmaf(sums[c][4 * j + 2], row_factor[1] * scale.x, bias.x);
      sums[c][4 * j + 3] = fmaf(sums[c][4 * j + 3], row_factor[1] * scale.y, bias.y);
    }
  }
}

// Stores bf16 pairs of one row: pair j is at 8 j + 2 (lane % 4) of kPairs x 8 columns from `column`
// on.
template <int kPairs>
__device__ __forceinline__ void store_bf16_row(__nv_bfloat16* row, int32_t column, int32_t columns,
                                               bool aligned, uint32_t (&pairs)[kPairs]) {
  const int32_t quad = static_cast<int32_t>(threadIdx.x) % 4;
  if (aligned && column + kPairs * 8 <= columns) {
#pragma unroll
    for (int b = 0; b < kPairs; b += 4) {
      transpose_quad(pairs[b], pairs[b + 1], pairs[b + 2], pairs[b + 3]);
      if (row != nullptr) {
        *reinterpret_cast<uint4*>(row + column + 8 * (b + quad)) =
            make_uint4(pairs[b], pairs[b + 1], pairs[b + 2], pairs[b + 3]);
      }
    }
    return;
  }
  if (row == nullptr) return;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(&pairs[j]);
    const int32_t first = column + 8 * j + 2 * quad;
    if (first < columns) row[first] = pair.x;
    if (first + 1 < columns) row[first + 1] = pair.y;
  }
}

// Finishes rows that are the only ones of their tokens.
__device__ __forceinline__ void finish_rows(const Params& p, const int32_t (&slot)[2],
                                            float (&sums)[2][64]) {
  float weight[2] = {1, 1};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (p.finish_weights != nullptr && slot[half] >= 0) weight[half] = p.finish_weights[slot[half]];
  }
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    float& sum = sums[i / 64][i % 64];
    sum = finish_sum(sum, weight[i / 2 % 2], p.finish_scale);
  }
}

template <class C>
__device__ __forceinline__ void store_down(const Params& p, const TileView& tile,
                                           const int32_t (&slot)[2], float (&sums)[2][64]) {
  auto* output = static_cast<__nv_bfloat16*>(p.output);
  const bool aligned = p.output_stride % 8 == 0 && reinterpret_cast<uintptr_t>(output) % 16 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __nv_bfloat16* row = slot[half] < 0 ? nullptr : output + slot[half] * p.output_stride;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t pairs[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        pairs[j] = pack_bf16(sums[c][4 * j + 2 * half], sums[c][4 * j + 2 * half + 1]);
      }
      store_bf16_row(row, tile.feature_tile * 256 + c * 128, p.features, aligned, pairs);
    }
  }
}

// Rounds and weights rows and adds them to their tokens' float32 rows, as combine would but in any
// order. Lanes of a pair trade columns, so that each adds four neighbours and a quad 64 bytes.
template <class C>
__device__ __forceinline__ void add_down(const Params& p, const TileView& tile,
                                         const int32_t (&slot)[2], float (&sums)[2][64]) {
  const bool odd = threadIdx.x % 2 != 0;
  const int32_t first =
      tile.feature_tile * 256 + (odd ? 8 : 0) + static_cast<int32_t>(threadIdx.x) % 4 / 2 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = slot[half] >= 0;
    const float weight =
        exists && p.finish_weights != nullptr ? p.finish_weights[slot[half]] : 1.0F;
    float* row = static_cast<float*>(p.output) + int64_t{slot[half] / p.top_k} * p.output_stride;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const float* low = &sums[j / 16][4 * (j % 16) + 2 * half];
      const uint32_t pairs[2] = {pack_bf16(low[0], low[1]), pack_bf16(low[4], low[5])};
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? pairs[0] : pairs[1], 1);
      const uint32_t words[2] = {odd ? other : pairs[0], odd ? pairs[1] : other};
      float values[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        values[2 * i] = __fmul_rn(weight, __uint_as_float(words[i] << 16));
        values[2 * i + 1] = __fmul_rn(weight, __uint_as_float(words[i] & 0xffff0000u));
      }
      const int32_t column = first + 8 * j;
      if (exists && column < p.features) dev::red_add_f32_4(row + column, values);
    }
  }
}

// Applies any formula to 16 sums at a time in shared memory, so that one copy of the formula's code
// serves all registers.
template <class C>
__device__ __forceinline__ void activate_any(const Params& p, float (&scratch)[16][256],
                                             float (&sums)[2][64]) {
  constexpr bool kGated = C::kProduct == Product::kGated;
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
        value = activation::device::apply(p.activation, value, up);
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

// In a gated tile, activated values replace the gate's.
template <class C>
__device__ __forceinline__ void activate(const Params& p, float (&scratch)[16][256],
                                         float (&sums)[2][64]) {
  if (C::kProduct == Product::kPlain || !activation::device::is_swish(p.activation)) {
    activate_any<C>(p, scratch, sums);
    return;
  }
  if (p.activation.id == activation::ActivationId::kSilu) {
    activate_silu(sums);
    return;
  }
  const float limit = p.activation.parameters.limit;
  const float alpha = p.activation.parameters.alpha;
  const float beta = activation::device::swish_beta(p.activation);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i / 4 % 2 == 1) continue;
      sums[c][i] = activation::device::swish(sums[c][i], sums[c][i + 4], limit, alpha, beta);
    }
  }
}

// Value `n` (0 or 1) of group g of 8 features in a block of 128, for row half `half`.
template <class C>
__device__ __forceinline__ float& activated(float (&sums)[2][64], int block, int g, int half,
                                            int n) {
  if constexpr (C::kProduct == Product::kGated) {
    return sums[g / 8][8 * (g % 8) + 2 * half + n];
  } else {
    return sums[block][4 * g + 2 * half + n];
  }
}

// Stores 128 codes of one row, 32 of them from this thread; each lane of the quad stores 16 bytes
// twice.
template <class C>
__device__ __forceinline__ void store_codes(const Params& p, float (&sums)[2][64], int block,
                                            int half, const quant::InverseStep& step, uint8_t* row,
                                            int32_t column) {
  const auto quotient = [&](int g, int n) {
    return quant::code_quotient(activated<C>(sums, block, g, half, n), step);
  };
  uint32_t words[8];
#pragma unroll
  for (int m = 0; m < 8; ++m) {
    const uint32_t low = pack_e4m3(quotient(2 * m, 0), quotient(2 * m, 1));
    const uint32_t high = pack_e4m3(quotient(2 * m + 1, 0), quotient(2 * m + 1, 1));
    words[m] = low | high << 16;
  }
  const int32_t quad = static_cast<int32_t>(threadIdx.x) % 4;
#pragma unroll
  for (int h = 0; h < 8; h += 4) {
    transpose_quad(words[h], words[h + 1], words[h + 2], words[h + 3]);
    const int32_t first = column + 16 * h + 16 * quad;
    // The stride of a row is I rounded up to 16: whole stores stay inside it.
    if (row != nullptr && first < p.output_stride) {
      *reinterpret_cast<uint4*>(row + first) =
          make_uint4(__byte_perm(words[h], words[h + 1], 0x5410),
                     __byte_perm(words[h + 2], words[h + 3], 0x5410),
                     __byte_perm(words[h], words[h + 1], 0x7632),
                     __byte_perm(words[h + 2], words[h + 3], 0x7632));
    }
  }
}

// Stores 128 values of one row in pairs, 32 bytes per quad. The row's stride is I rounded up to 16.
template <class C>
__device__ __forceinline__ void store_f32_row(const Params& p, float (&sums)[2][64], int block,
                                              int half, float* row, int32_t column) {
  if (row == nullptr) return;
  const int32_t first = column + 2 * (static_cast<int32_t>(threadIdx.x) % 4);
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    if (first + 8 * g >= p.output_stride) break;
    *reinterpret_cast<float2*>(row + first + 8 * g) =
        make_float2(activated<C>(sums, block, g, half, 0), activated<C>(sums, block, g, half, 1));
  }
}

// Sets values beyond I to 0, so that they neither raise a scale nor leave rubbish in a row's
// padding.
template <class C>
__device__ __forceinline__ void clear_beyond(const Params& p, const TileView& tile,
                                             float (&sums)[2][64]) {
  if ((tile.feature_tile + 1) * C::kFeatures <= p.features) return;
  const int32_t quad_column = 2 * (static_cast<int32_t>(threadIdx.x) % 4);
#pragma unroll
  for (int block = 0; block < C::kFeatures / 128; ++block) {
#pragma unroll
    for (int g = 0; g < 16; ++g) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int32_t feature =
            tile.feature_tile * C::kFeatures + block * 128 + 8 * g + quad_column + n % 2;
        if (feature >= p.features) activated<C>(sums, block, g, n / 2, n % 2) = 0;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ float quad_amax(float (&sums)[2][64], int block, int half) {
  float amax = 0;
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    amax = fmaxf(amax, fabsf(activated<C>(sums, block, g, half, 0)));
    amax = fmaxf(amax, fabsf(activated<C>(sums, block, g, half, 1)));
  }
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  return fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
}

// Stores the codes of one row and 128 features, and their scale if it is dynamic.
template <class C>
__device__ __forceinline__ void quantize_row(const Params& p, int32_t sorted_row, int32_t column,
                                             int block, int half, float constant_scale,
                                             float (&sums)[2][64]) {
  const bool stored = sorted_row >= 0;
  float scale = constant_scale;
  if constexpr (C::kBlockScales) {
    scale = group_scale(quad_amax<C>(sums, block, half), p.power_of_two);
    if (stored && threadIdx.x % 4 == 0 && column < p.features) {
      p.output_scales[(column / 128) * p.output_scale_stride + sorted_row] = scale;
    }
  }
  uint8_t* row = stored ? static_cast<uint8_t*>(p.output) + sorted_row * p.output_stride : nullptr;
  store_codes<C>(p, sums, block, half, quant::invert_step(scale), row, column);
}

template <class C>
__device__ __forceinline__ void store_up(const Params& p, const TileView& tile,
                                         const int32_t (&sorted_row)[2], float (&scratch)[16][256],
                                         float (&sums)[2][64]) {
  activate<C>(p, scratch, sums);
  clear_beyond<C>(p, tile, sums);
  const int32_t column = tile.feature_tile * C::kFeatures;
  if (!C::kBlockScales && p.output_constant_scale == nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = sorted_row[half] < 0
                       ? nullptr
                       : static_cast<float*>(p.output) + sorted_row[half] * p.output_stride;
#pragma unroll
      for (int block = 0; block < C::kFeatures / 128; ++block) {
        store_f32_row<C>(p, sums, block, half, row, column + block * 128);
      }
    }
    return;
  }
  const float constant_scale = C::kBlockScales ? 1.0F : *p.output_constant_scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < C::kFeatures / 128; ++block) {
      quantize_row<C>(p, sorted_row[half], column + block * 128, block, half, constant_scale, sums);
    }
  }
}

// The first of the two rows of a math thread; the other is 8 below. It is computed anew at each
// use, because the main loop has no register for it.
__device__ __forceinline__ int32_t row_of_thread() {
  auto thread = static_cast<int32_t>(threadIdx.x);
  forget(thread);
  return thread / 32 * 16 + thread % 32 / 4;
}

// Slots of a math thread's two rows, `row` and `row` + 8 in the tile; negative if there is none.
// Down products fetch them before the main loop, which hides the latency.
struct SlotsOfThread {
  int32_t slot[2] = {-1, -1};
};

template <class C>
__device__ __forceinline__ SlotsOfThread slots_of_thread(const Params& p, const TileView& tile,
                                                         int32_t row) {
  SlotsOfThread slots;
  if constexpr (C::kIsDown) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < tile.count) slots.slot[half] = p.row_slot[tile.begin + row + 8 * half];
    }
  }
  return slots;
}

template <class C>
__device__ __forceinline__ void finish_tile(const Params& p, const TileView& tile,
                                            const SlotsOfThread& slots, float (&scratch)[16][256],
                                            float (&sums)[2][64]) {
  const int32_t row = row_of_thread();
  float row_factor[2] = {1, 1};
  int32_t sorted_row[2] = {-1, -1};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= tile.count) continue;
    sorted_row[half] = tile.begin + row + 8 * half;
    if constexpr (!C::kBlockScales) {
      row_factor[half] =
          p.constant_scale != nullptr ? *p.constant_scale : p.row_scales[sorted_row[half]];
    }
    if (!C::kIsDown && p.input_weights != nullptr) {
      row_factor[half] *= p.input_weights[p.row_slot[sorted_row[half]]];
    }
  }
  scale_and_bias<C>(p, tile, row_factor, sums);
  if constexpr (C::kAddsRows) {
    add_down<C>(p, tile, slots.slot, sums);
  } else if constexpr (C::kIsDown) {
    if (p.finishes_rows) finish_rows(p, slots.slot, sums);
    store_down<C>(p, tile, slots.slot, sums);
  } else {
    store_up<C>(p, tile, sorted_row, scratch, sums);
  }
}

}  // namespace conclave::inline v0::experts::tile_fp8
