// Stores of results: bf16 rows, float32 sums of tokens, codes, float32 rows.
#pragma once

#include "cuda/device/copy.cuh"
#include "cuda/device/vector16.cuh"
#include "experts/cuda/sm90/tile_bytes/config.cuh"

namespace conclave::inline v0::experts::tile_bytes {

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

template <class Config>
__device__ __forceinline__ void store_down(const Params& params, const Item& item,
                                           const int32_t (&slot)[2], float (&sums)[2][64]) {
  auto* output = static_cast<__nv_bfloat16*>(params.output);
  const bool aligned =
      params.output_stride % 8 == 0 && reinterpret_cast<uintptr_t>(output) % 16 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __nv_bfloat16* row = slot[half] < 0 ? nullptr : output + slot[half] * params.output_stride;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t pairs[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        pairs[j] =
            ptx::pack_pair<__nv_bfloat16>(sums[c][4 * j + 2 * half], sums[c][4 * j + 2 * half + 1]);
      }
      store_bf16_row(row, item.feature_tile * 256 + c * 128, params.features, aligned, pairs);
    }
  }
}

// Rounds and weights rows and adds them to their tokens' float32 rows, as combine would but in any
// order. Lanes of a pair trade columns, so that each adds four neighbours and a quad 64 bytes.
template <class Config>
__device__ __forceinline__ void add_down(const Params& params, const Item& item,
                                         const int32_t (&slot)[2], float (&sums)[2][64]) {
  const bool odd = threadIdx.x % 2 != 0;
  const int32_t first =
      item.feature_tile * 256 + (odd ? 8 : 0) + static_cast<int32_t>(threadIdx.x) % 4 / 2 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = slot[half] >= 0;
    const float weight =
        exists && params.finish_weights != nullptr ? params.finish_weights[slot[half]] : 1.0F;
    float* row = static_cast<float*>(params.output) +
                 int64_t{slot[half] / params.top_k} * params.output_stride;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const float* low = &sums[j / 16][4 * (j % 16) + 2 * half];
      const uint32_t pairs[2] = {ptx::pack_pair<__nv_bfloat16>(low[0], low[1]),
                                 ptx::pack_pair<__nv_bfloat16>(low[4], low[5])};
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? pairs[0] : pairs[1], 1);
      const uint32_t words[2] = {odd ? other : pairs[0], odd ? pairs[1] : other};
      float values[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        values[2 * i] = __fmul_rn(weight, __uint_as_float(words[i] << 16));
        values[2 * i + 1] = __fmul_rn(weight, __uint_as_float(words[i] & 0xffff0000u));
      }
      const int32_t column = first + 8 * j;
      if (exists && column < params.features) ptx::red_add_f32_4(row + column, values);
    }
  }
}

// Value `n` (0 or 1) of group g of 8 features in a block of 128, for row half `half`.
template <class Config>
__device__ __forceinline__ float& activated(float (&sums)[2][64], int block, int g, int half,
                                            int n) {
  if constexpr (Config::kProduct == Product::kUpGated) {
    return sums[g / 8][8 * (g % 8) + 2 * half + n];
  } else {
    return sums[block][4 * g + 2 * half + n];
  }
}

// The 32 codes of this thread among the 128 of one row and one group.
template <class Config, class Quotient>
__device__ __forceinline__ void encode_row(float (&sums)[2][64], int block, int half,
                                           const Quotient& quotient, uint32_t (&words)[8]) {
  const auto of = [&](int g, int n) {
    return quotient(activated<Config>(sums, block, g, half, n));
  };
#pragma unroll
  for (int m = 0; m < 8; ++m) {
    const uint32_t low = pack_e4m3(of(2 * m, 0), of(2 * m, 1));
    const uint32_t high = pack_e4m3(of(2 * m + 1, 0), of(2 * m + 1, 1));
    words[m] = low | high << 16;
  }
}

// Stores 128 codes of one row, 32 of them from this thread; each lane of the quad stores 16 bytes
// twice.
template <class Config>
__device__ __forceinline__ void store_codes(const Params& params, float (&sums)[2][64], int block,
                                            int half, const quant::InverseStep& step, uint8_t* row,
                                            int32_t column) {
  uint32_t words[8];
  // A group's own step is finite only if its values are, and an infinite one has the inverse 0,
  // with which infinity gives NaN: where the step needs no factor, the product follows the rule.
  if (Config::kBlockScales && step.factor == 1.0F) {
    encode_row<Config>(
        sums, block, half, [&](float value) { return value * step.inverse; }, words);
  } else {
    encode_row<Config>(
        sums, block, half, [&](float value) { return quant::code_quotient(value, step); }, words);
  }
  const int32_t quad = static_cast<int32_t>(threadIdx.x) % 4;
  if constexpr (Config::kHasLanes) {
    // A lane's columns are those of a word of weights, whose order rows have: see lane_byte.
#pragma unroll
    for (int h = 0; h < 8; h += 2) {
      const int32_t first = column + 16 * h;
      if (row == nullptr || first >= params.output_stride) continue;
      *reinterpret_cast<uint2*>(row + first + 8 * quad) = make_uint2(
          __byte_perm(words[h], words[h + 1], 0x4026), __byte_perm(words[h], words[h + 1], 0x5137));
    }
  } else {
#pragma unroll
    for (int h = 0; h < 8; h += 4) {
      transpose_quad(words[h], words[h + 1], words[h + 2], words[h + 3]);
      const int32_t first = column + 16 * h + 16 * quad;
      // The stride of a row is I rounded up to 16: whole stores stay inside it.
      if (row != nullptr && first < params.output_stride) {
        *reinterpret_cast<uint4*>(row + first) =
            make_uint4(__byte_perm(words[h], words[h + 1], 0x5410),
                       __byte_perm(words[h + 2], words[h + 3], 0x5410),
                       __byte_perm(words[h], words[h + 1], 0x7632),
                       __byte_perm(words[h + 2], words[h + 3], 0x7632));
      }
    }
  }
}

// Stores 128 values of one row in pairs, 32 bytes per quad. The row's stride is I rounded up to 16.
template <class Config>
__device__ __forceinline__ void store_f32_row(const Params& params, float (&sums)[2][64], int block,
                                              int half, float* row, int32_t column) {
  if (row == nullptr) return;
  const int32_t first = column + 2 * (static_cast<int32_t>(threadIdx.x) % 4);
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    if (first + 8 * g >= params.output_stride) break;
    *reinterpret_cast<float2*>(row + first + 8 * g) = make_float2(
        activated<Config>(sums, block, g, half, 0), activated<Config>(sums, block, g, half, 1));
  }
}

}  // namespace conclave::inline v0::experts::tile_bytes
