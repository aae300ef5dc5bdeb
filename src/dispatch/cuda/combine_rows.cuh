// Forms the weighted sum of one part of a token's row and adds the other terms. Each product and
// each sum is rounded by itself, as on the host, so a row has the same bits in every launch shape.
#pragma once

#include "cuda/device/vector16.cuh"

#include "conclave/dtype.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::dispatch::device {

inline constexpr int kLaneColumns = 8;                  // 16 bytes of a 16-bit row
inline constexpr int kPartColumns = 32 * kLaneColumns;  // columns per warp

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
  int32_t routed_slots = 0;  // the first slots of top_k; the rest are shared experts
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;
  int64_t hidden_size = 0;
  int64_t units_per_row = 0;
  DeviceTensor routed;  // float32 rows that the sums begin with, or null
  float scale = 1;
  const float* identity_weights = nullptr;
  DeviceTensor hidden;
  const float* output_bias = nullptr;
  const float* mix = nullptr;
  float constant_mix = 1;
  DeviceTensor shared;
  int32_t num_shared = 0;
  const float* shared_factor = nullptr;
  float shared_constant = 1;
  DeviceTensor residual;
  const bool* padding_mask = nullptr;
  DeviceTensor out;
  DeviceTensor shared_out;
};

// The terms that a kernel knows: those of most layers, or all. Rare terms cost registers in every
// layer that uses the same kernel.
enum class Terms : uint8_t {
  kCommon,  // routed slots, identity, output bias, rows of shared experts
  kAll,     // also initial float32 rows, slots of shared experts, factors per token, residual
};

// Eight columns of a token in the registers of a lane.
struct LaneTile {
  int64_t token;
  int64_t column;
  int columns;  // fewer than 8 at the end of a row, 0 or less beyond it
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

// A slot's weight and whether it has a row; one slot per lane. A shared expert of weight 0 has no
// row, so that values that are not finite stay out.
struct LaneSlot {
  bool present;
  float weight;
};
// The choice of a slot as it lies in memory, requested and not yet looked at.
struct SlotChoice {
  int32_t id;
  float weight;
};
__device__ __forceinline__ SlotChoice read_choice(const CombineParams& params, int64_t token,
                                                  int32_t slot) {
  if (slot >= params.top_k) return {-1, 0};
  const int64_t at = token * params.top_k + slot;
  const float weight = params.topk_weights == nullptr ? 1.0F : params.topk_weights[at];
  return {params.topk_ids[at], weight};
}
__device__ __forceinline__ LaneSlot slot_of(const CombineParams& params, const SlotChoice& choice,
                                            int32_t slot) {
  const auto [id, weight] = choice;
  if (id < 0 || id >= params.num_experts) return {false, 0};
  if (slot >= params.routed_slots && weight == 0.0F) return {false, 0};
  const bool local = params.local_expert == nullptr || params.local_expert[id] >= 0;
  return {local, weight};
}
__device__ __forceinline__ LaneSlot read_slot(const CombineParams& params, int64_t token,
                                              int32_t slot) {
  return slot_of(params, read_choice(params, token, slot), slot);
}

// kRows rows of a token, kParts parts of each, requested together.
template <class Row, int kRows, int kParts>
struct RowBatch {
  cuda::device::Raw8<Row> values[kRows][kParts];

  // Loads the rows marked in `present`: row i begins at rows + i * stride.
  __device__ __forceinline__ void load(const Row* rows, int64_t stride, uint32_t present,
                                       const LaneTile (&tiles)[kParts]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const bool used = ((present >> i) & 1U) != 0 && tiles[p].columns > 0;
        if (used) values[i][p].load_once(rows + i * stride + p * kPartColumns);
      }
    }
  }
  // Adds the rows in their order; lane `first` + i holds the weight of row i.
  __device__ __forceinline__ void add_to(int part, uint32_t present, float weight, int first,
                                         Sums& sum) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float factor = __shfl_sync(0xffffffffU, weight, first + i);
      if (((present >> i) & 1U) == 0) continue;
      Sums row;
      values[i][part].widen_to(row);
      add_product(factor, row, sum);
    }
  }
};

__device__ __forceinline__ void add_shared(const CombineParams& params, const LaneTile& tile,
                                           Sums& sum) {
  for (int32_t i = 0; i < params.num_shared; ++i) {
    const int64_t at = tile.token * params.num_shared + i;
    const float factor =
        params.shared_factor == nullptr ? params.shared_constant : params.shared_factor[at];
    if (factor == 0.0F) continue;
    Sums row;
    load_row(params.shared, at, tile, row);
    add_product(factor, row, sum);
  }
}

// Turns the sum over routed slots into the routed part.
template <Terms kTerms>
__device__ __forceinline__ void finish_routed(const CombineParams& params, const LaneTile& tile,
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
  if constexpr (kTerms == Terms::kAll) {
    if (params.mix == nullptr && params.constant_mix == 1.0F) return;
    const float mix = params.mix == nullptr ? params.constant_mix : params.mix[tile.token];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) sum[c] = __fmul_rn(sum[c], mix);
  }
}

// Finishes and stores a part of a token after its routed slots, if no slot is a shared expert.
__device__ __forceinline__ void finish_common(const CombineParams& params, const LaneTile& tile,
                                              bool active, Sums& sum) {
  if (tile.columns <= 0) return;
  const bool apart = params.shared_out.data != nullptr;
  const bool shared = active && params.shared.data != nullptr;
  if (active) finish_routed<Terms::kCommon>(params, tile, sum);
  if (shared && !apart) add_shared(params, tile, sum);
  store_row(params.out, tile, sum);
  if (!apart) return;
  Sums rest = {};
  if (shared) add_shared(params, tile, rest);
  store_row(params.shared_out, tile, rest);
}

// Rows go to the call's own.
struct StoreOut {
  const CombineParams& params;
  __device__ __forceinline__ void operator()(const LaneTile& tile, const Sums& sum) const {
    store_row(params.out, tile, sum);
  }
};

// Does the same with every term. `add_slots` adds the rows of a token's shared slots to a sum; all
// lanes call it. `store` takes the row, from lanes that have columns.
template <class AddSlots, class Store>
__device__ __forceinline__ void finish_all(const CombineParams& params, const LaneTile& tile,
                                           bool active, Sums& sum, const AddSlots& add_slots,
                                           const Store& store) {
  const bool used = active && tile.columns > 0;
  const bool apart = params.shared_out.data != nullptr;
  if (used) finish_routed<Terms::kAll>(params, tile, sum);
  Sums routed;
  if (apart) {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      routed[c] = sum[c];
      sum[c] = 0;
    }
  }
  if (params.routed_slots < params.top_k) add_slots(sum);
  if (used && params.shared.data != nullptr) add_shared(params, tile, sum);
  if (tile.columns <= 0) return;
  if (apart) {
    store_row(params.shared_out, tile, sum);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) sum[c] = routed[c];
  }
  if (used && params.residual.data != nullptr) {
    Sums row;
    load_row(params.residual, tile.token, tile, row);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) sum[c] = __fadd_rn(sum[c], row[c]);
  }
  store(tile, sum);
}

// Bits of slots [first, first + 32) that lie below `end`.
__device__ __forceinline__ uint32_t slots_below(int32_t first, int32_t end) {
  const int32_t count = end - first;
  return count <= 0 ? 0U : count >= 32 ? 0xffffffffU : (1U << count) - 1U;
}

// The first slots of a unit's token, requested before the unit's turn.
__device__ __forceinline__ LaneSlot read_slots_ahead(const CombineParams& params, int64_t unit) {
  return read_slot(params, unit / params.units_per_row, static_cast<int32_t>(threadIdx.x % 32));
}

// Loads the initial value of a part's sum.
__device__ __forceinline__ void begin_sum(const CombineParams& params, const LaneTile& tile,
                                          bool active, Sums& sum) {
  if (params.routed.data == nullptr || !active || tile.columns <= 0) return;
  load_row(params.routed, tile.token, tile, sum);
}

// Fills in the parts of unit `unit % units_per_row` of row `unit / units_per_row`.
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

// Combines a unit of several parts in one warp, with common terms: at most kRows slots, all loads
// before the first sum.
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
    finish_common(params, tiles[p], active, sum);
  }
}

// The slots of a unit of one part, any number of them, in order, kRows at a time. Lane l holds slot
// l in `first_slots`.
template <class Row, int kRows>
struct SlotRows {
  const CombineParams& params;
  const LaneTile (&tile)[1];
  const LaneSlot& first_slots;

  // Adds slots [begin, end).
  __device__ __forceinline__ void add(int32_t begin, int32_t end, Sums& sum) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 1
    for (int32_t first = begin / 32 * 32; first < end; first += 32) {
      const LaneSlot slots =
          first == 0 ? first_slots : read_slot(params, tile[0].token, first + lane);
      const uint32_t wanted = slots_below(first, end) & ~slots_below(first, begin);
      const uint32_t present = __ballot_sync(0xffffffffU, slots.present) & wanted;
      const Row* rows = static_cast<const Row*>(params.expert_rows) +
                        (tile[0].token * params.top_k + first) * params.expert_row_stride +
                        tile[0].column;
      const int32_t skipped = begin > first ? begin - first : 0;
#pragma unroll 1
      for (int32_t batch = skipped; batch < 32 && (present >> batch) != 0; batch += kRows) {
        RowBatch<Row, kRows, 1> values;
        values.load(rows + batch * params.expert_row_stride, params.expert_row_stride,
                    present >> batch, tile);
        values.add_to(0, present >> batch, slots.weight, batch, sum);
      }
    }
  }
};

// Combines a part of a token's row. `store` is for rows with every term.
template <class Row, int kRows, Terms kTerms, class Store>
__device__ __forceinline__ void combine_tile(const CombineParams& params, const LaneTile (&tile)[1],
                                             const LaneSlot& first_slots, const Store& store) {
  const bool active = is_active(params, tile[0].token);
  const SlotRows<Row, kRows> slots{params, tile, first_slots};
  Sums sum = {};
  if constexpr (kTerms == Terms::kCommon) {
    if (active) slots.add(0, params.top_k, sum);
    finish_common(params, tile[0], active, sum);
  } else {
    begin_sum(params, tile[0], active, sum);
    if (active) slots.add(0, params.routed_slots, sum);
    const auto add_shared_slots = [&](Sums& shared) {
      if (active) slots.add(params.routed_slots, params.top_k, shared);
    };
    finish_all(params, tile[0], active, sum, add_shared_slots, store);
  }
}

// Combines a unit of one part.
template <class Row, int kRows, Terms kTerms>
__device__ __forceinline__ void combine_part(const CombineParams& params, int64_t unit,
                                             const LaneSlot& first_slots) {
  LaneTile tile[1];
  lay_tiles(params, unit, tile);
  combine_tile<Row, kRows, kTerms>(params, tile, first_slots, StoreOut{params});
}

}  // namespace conclave::inline v0::dispatch::device
