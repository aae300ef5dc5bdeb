// The weighted sum of one part of one token's row, and what is added to it. Each product and each
// sum is rounded by itself, as on the host, so a row has the same bits in every launch shape.
#pragma once

#include "cuda/device/vector16.cuh"

#include "conclave/dtype.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::dispatch::device {

inline constexpr int kLaneColumns = 8;                  // 16 bytes of a 16-bit row
inline constexpr int kPartColumns = 32 * kLaneColumns;  // of a warp

struct DeviceTensor {
  void* data = nullptr;
  int64_t stride = 0;  // elements
  DType dtype = DType::kBF16;
  bool aligned = false;  // rows begin at multiples of 16 bytes
};

struct CombineParams {
  const void* expert_rows = nullptr;
  int64_t expert_row_stride = 0;
  const int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
  const int32_t* local_expert = nullptr;
  int32_t num_experts = 0;
  int32_t top_k = 0;
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;
  int64_t hidden_size = 0;
  int64_t units_per_row = 0;
  float scale = 1;
  const float* identity_weights = nullptr;
  DeviceTensor hidden;
  const float* output_bias = nullptr;
  DeviceTensor shared;
  int32_t num_shared = 0;
  const float* shared_factor = nullptr;
  float shared_constant = 1;
  const bool* padding_mask = nullptr;
  DeviceTensor out;
  DeviceTensor shared_out;
};

// Eight columns of a token in the registers of a lane.
struct LaneTile {
  int64_t token;
  int64_t column;
  int columns;  // below 8 at the end of a row, 0 or less beyond it
};
using Sums = float[kLaneColumns];

__device__ __forceinline__ int64_t live_rows(const CombineParams& params) {
  if (params.live_tokens == nullptr) return params.num_tokens;
  const int64_t live = *params.live_tokens;
  return live < 0 ? 0 : (live < params.num_tokens ? live : params.num_tokens);
}

template <class T>
__device__ __forceinline__ void load_as(const DeviceTensor& tensor, int64_t row,
                                        const LaneTile& tile, Sums& values) {
  const T* from = static_cast<const T*>(tensor.data) + row * tensor.stride + tile.column;
  if (tensor.aligned && tile.columns == kLaneColumns) {
    cuda::device::load_8(from, values);
    return;
  }
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    values[c] = c < tile.columns ? cuda::device::widen(from[c]) : 0.0F;
  }
}

__device__ __forceinline__ void load_row(const DeviceTensor& tensor, int64_t row,
                                         const LaneTile& tile, Sums& values) {
  switch (tensor.dtype) {
    case DType::kF32:
      return load_as<float>(tensor, row, tile, values);
    case DType::kF16:
      return load_as<__half>(tensor, row, tile, values);
    default:
      return load_as<__nv_bfloat16>(tensor, row, tile, values);
  }
}

template <class T>
__device__ __forceinline__ void store_as(const DeviceTensor& tensor, const LaneTile& tile,
                                         const Sums& values) {
  T* to = static_cast<T*>(tensor.data) + tile.token * tensor.stride + tile.column;
  if (tensor.aligned && tile.columns == kLaneColumns) {
    cuda::device::store_8(values, to);
    return;
  }
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    if (c < tile.columns) to[c] = cuda::device::narrow<T>(values[c]);
  }
}

__device__ __forceinline__ void store_row(const DeviceTensor& tensor, const LaneTile& tile,
                                          const Sums& values) {
  switch (tensor.dtype) {
    case DType::kF32:
      return store_as<float>(tensor, tile, values);
    case DType::kF16:
      return store_as<__half>(tensor, tile, values);
    default:
      return store_as<__nv_bfloat16>(tensor, tile, values);
  }
}

// sum += weight * values
__device__ __forceinline__ void add_product(float weight, const Sums& values, Sums& sum) {
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) sum[c] = __fadd_rn(sum[c], __fmul_rn(weight, values[c]));
}

// Whether slot `slot` has a row, and its weight. One slot a lane.
struct LaneSlot {
  bool present;
  float weight;
};
__device__ __forceinline__ LaneSlot read_slot(const CombineParams& params, int64_t token,
                                              int32_t slot) {
  if (slot >= params.top_k) return {false, 0};
  const int64_t at = token * params.top_k + slot;
  const int32_t id = params.topk_ids[at];
  const float weight = params.topk_weights == nullptr ? 1.0F : params.topk_weights[at];
  if (id < 0 || id >= params.num_experts) return {false, 0};
  const bool local = params.local_expert == nullptr || params.local_expert[id] >= 0;
  return {local, weight};
}

// kRows rows of a token, kParts parts of each, requested together.
template <class Row, int kRows, int kParts>
struct RowBatch {
  uint4 values[kRows][kParts];

  // Rows `rows`, + stride and so on of which `present` has a bit.
  __device__ __forceinline__ void load(const Row* rows, int64_t stride, uint32_t present,
                                       const LaneTile (&tiles)[kParts]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const bool used = ((present >> i) & 1U) != 0 && tiles[p].columns > 0;
        if (used) values[i][p] = cuda::device::load_once_16(rows + i * stride + p * kPartColumns);
      }
    }
  }
  // In the order of the rows; lane `first` + i has the weight of row i.
  __device__ __forceinline__ void add_to(int part, uint32_t present, float weight, int first,
                                         Sums& sum) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float factor = __shfl_sync(0xffffffffU, weight, first + i);
      if (((present >> i) & 1U) == 0) continue;
      Sums row;
      cuda::device::widen_8<Row>(values[i][part], row);
      add_product(factor, row, sum);
    }
  }
};

// Slots first to first + 31, in order, kRows at a time.
template <class Row, int kRows>
__device__ __forceinline__ void add_slots(const CombineParams& params, const LaneTile (&tile)[1],
                                          int32_t first, const LaneSlot& own, Sums& sum) {
  const uint32_t present = __ballot_sync(0xffffffffU, own.present);
  const Row* rows = static_cast<const Row*>(params.expert_rows) +
                    (tile[0].token * params.top_k + first) * params.expert_row_stride +
                    tile[0].column;
#pragma unroll 1
  for (int batch = 0; batch < 32 && (present >> batch) != 0; batch += kRows) {
    RowBatch<Row, kRows, 1> values;
    values.load(rows + batch * params.expert_row_stride, params.expert_row_stride, present >> batch,
                tile);
    values.add_to(0, present >> batch, own.weight, batch, sum);
  }
}

__device__ __forceinline__ void add_shared(const CombineParams& params, const LaneTile& tile,
                                           Sums& sum) {
  for (int32_t i = 0; i < params.num_shared; ++i) {
    const float factor = params.shared_factor == nullptr
                             ? params.shared_constant
                             : params.shared_factor[tile.token * params.num_shared + i];
    Sums row;
    load_row(params.shared, i * params.num_tokens + tile.token, tile, row);
    add_product(factor, row, sum);
  }
}

__device__ __forceinline__ void finish_sum(const CombineParams& params, const LaneTile& tile,
                                           Sums& sum) {
  if (params.scale != 1.0F) {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) sum[c] = __fmul_rn(sum[c], params.scale);
  }
  if (params.identity_weights != nullptr && params.identity_weights[tile.token] != 0.0F) {
    Sums row;
    load_row(params.hidden, tile.token, tile, row);
    add_product(params.identity_weights[tile.token], row, sum);
  }
  if (params.output_bias != nullptr) {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      if (c < tile.columns) sum[c] = __fadd_rn(sum[c], params.output_bias[tile.column + c]);
    }
  }
  if (params.shared.data != nullptr && params.shared_out.data == nullptr) {
    add_shared(params, tile, sum);
  }
}

__device__ __forceinline__ void store_sums(const CombineParams& params, const LaneTile& tile,
                                           bool active, Sums& sum) {
  if (tile.columns <= 0) return;
  if (active) finish_sum(params, tile, sum);
  store_row(params.out, tile, sum);
  if (params.shared_out.data == nullptr) return;
  Sums apart = {};
  if (active && params.shared.data != nullptr) add_shared(params, tile, apart);
  store_row(params.shared_out, tile, apart);
}

// The first slots of a unit's token, requested before the unit's turn.
__device__ __forceinline__ LaneSlot read_slots_ahead(const CombineParams& params, int64_t unit) {
  return read_slot(params, unit / params.units_per_row, static_cast<int32_t>(threadIdx.x % 32));
}

// Parts of unit `unit % units_per_row` of row `unit / units_per_row`.
template <int kParts>
__device__ __forceinline__ void lay_tiles(const CombineParams& params, int64_t unit,
                                          LaneTile (&tiles)[kParts]) {
  const int64_t token = unit / params.units_per_row;
  const int64_t first_column = (unit - token * params.units_per_row) * (kParts * kPartColumns) +
                               threadIdx.x % 32 * kLaneColumns;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const int64_t column = first_column + p * kPartColumns;
    const int64_t left = params.hidden_size - column;
    tiles[p] = {token, column, static_cast<int>(left < kLaneColumns ? left : kLaneColumns)};
  }
}

__device__ __forceinline__ bool is_active(const CombineParams& params, int64_t token) {
  return params.padding_mask == nullptr || params.padding_mask[token];
}

// A unit of several parts by one warp: at most kRows slots, all loads before the first sum.
template <class Row, int kRows, int kParts>
__device__ __forceinline__ void combine_unit(const CombineParams& params, int64_t unit,
                                             const LaneSlot& slots) {
  LaneTile tiles[kParts];
  lay_tiles(params, unit, tiles);
  const int64_t token = tiles[0].token;
  const bool active = is_active(params, token);
  const uint32_t present = active ? __ballot_sync(0xffffffffU, slots.present) : 0;
  const Row* rows = static_cast<const Row*>(params.expert_rows) +
                    token * params.top_k * params.expert_row_stride + tiles[0].column;
  RowBatch<Row, kRows, kParts> values;
  values.load(rows, params.expert_row_stride, present, tiles);
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    Sums sum = {};
    values.add_to(p, present, slots.weight, 0, sum);
    store_sums(params, tiles[p], active, sum);
  }
}

// A unit of one part, any number of slots.
template <class Row, int kRows>
__device__ __forceinline__ void combine_part(const CombineParams& params, int64_t unit,
                                             const LaneSlot& first_slots) {
  LaneTile tile[1];
  lay_tiles(params, unit, tile);
  const bool active = is_active(params, tile[0].token);
  Sums sum = {};
  if (active) {
    LaneSlot slots = first_slots;
#pragma unroll 1
    for (int32_t first = 0; first < params.top_k; first += 32) {
      const auto slot = first + static_cast<int32_t>(threadIdx.x % 32);
      if (first != 0) slots = read_slot(params, tile[0].token, slot);
      add_slots<Row, kRows>(params, tile, first, slots, sum);
    }
  }
  store_sums(params, tile[0], active, sum);
}

}  // namespace conclave::inline v0::dispatch::device
