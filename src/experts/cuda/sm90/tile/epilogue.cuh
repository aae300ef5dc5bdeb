// The epilogue and stores: bias, activation, rounding, whole rows.
#pragma once

#include "activation/device/formulas.cuh"
#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/vector16.cuh"
#include "experts/cuda/common/silu_pair.cuh"
#include "experts/cuda/sm90/tile/walk.cuh"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace conclave::inline v0::experts::tile {

template <class Config>
__device__ __forceinline__ uint32_t staging_offset(int32_t row, int32_t chunk) {
  return static_cast<uint32_t>(row * Config::kStagingRowBytes + chunk * 16);
}

// Rounds two neighbouring blocks of 8 columns of a warp's 16 rows. With lane = 4 g + q, v[0] and
// v[1] are columns 2 q and 2 q + 1 of row g in the first block, v[2] and v[3] are those of row g +
// 8, and v[4..7] belong to the second block.
template <class Element>
__device__ __forceinline__ void round_columns(const float (&v)[8], uint32_t* results) {
#pragma unroll
  for (int i = 0; i < 4; ++i) results[i] = ptx::pack_pair<Element>(v[2 * i], v[2 * i + 1]);
}

// The place that a warp stores its 16 rows to.
struct RowTarget {
  int32_t rows = 0;    // number of rows that exist, 0 to 16
  int32_t row = 0;     // lane l < 16: output row of row l
  int32_t column = 0;  // first column of the pass
  int32_t end = 0;     // end of the item's columns
  int32_t weigh = 0;   // lane l < 16: slot of row l, or bits of its weight if rows are added
  int32_t expert = 0;
};

// Stores a pass of staged rows element by element: for unaligned rows, and the last columns of a
// width that is not a multiple of 16 bytes.
template <class Config>
__device__ __forceinline__ void store_ragged_rows(const Params& params, const uint8_t* staging,
                                                  const RowTarget& target) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  auto* output = static_cast<uint16_t*>(params.output);
  const int32_t columns =
      min(Config::kPassColumns, min(params.columns, target.end) - target.column);
  for (int32_t row = 0; row < target.rows; ++row) {
    const int32_t to = __shfl_sync(0xffffffff, target.row, row);
    const auto* from = reinterpret_cast<const uint16_t*>(staging + staging_offset<Config>(row, 0));
    uint16_t* destination =
        output + static_cast<int64_t>(to) * params.output_stride + target.column;
    for (int32_t column = lane; column < columns; column += 32) destination[column] = from[column];
  }
}

// Widens four 16-bit columns to float32 and multiplies them by a weight, as combine does.
__device__ __forceinline__ void weigh_four(__nv_bfloat16 /*type*/, uint2 bits, float weight,
                                           float (&values)[4]) {
  const uint32_t words[2] = {bits.x, bits.y};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    values[2 * i] = __fmul_rn(weight, __uint_as_float(words[i] << 16));
    values[2 * i + 1] = __fmul_rn(weight, __uint_as_float(words[i] & 0xffff0000U));
  }
}
__device__ __forceinline__ void weigh_four(__half /*type*/, uint2 bits, float weight,
                                           float (&values)[4]) {
  const uint32_t words[2] = {bits.x, bits.y};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    values[2 * i] = __fmul_rn(weight, pair.x);
    values[2 * i + 1] = __fmul_rn(weight, pair.y);
  }
}

// Adds a pass of staged rows to the rows of their tokens, 16 bytes per lane, so that a warp
// requests whole sectors. Rows of sums have room for whole requests.
template <class Config>
__device__ __forceinline__ void add_rows(const Params& params, const uint8_t* staging,
                                         const RowTarget& target, int32_t left) {
  constexpr int32_t kParts = Config::kPassColumns / 4;  // per row
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  auto* sums = static_cast<float*>(params.output) + target.column;
#pragma unroll 4
  for (int32_t i = 0; i < kParts / 2; ++i) {
    const int32_t row = (32 * i + lane) / kParts;
    const int32_t part = (32 * i + lane) % kParts;
    const int32_t to = __shfl_sync(0xffffffff, target.row, row);
    const float weight = __int_as_float(__shfl_sync(0xffffffff, target.weigh, row));
    if (row < target.rows && part * 4 < left) {
      float values[4];
      weigh_four(typename Config::Element{},
                 ptx::load_shared_8(ptx::shared_address(staging) + staging_offset<Config>(row, 0) +
                                    part * 8),
                 weight, values);
      ptx::red_add_f32_4(sums + static_cast<int64_t>(to) * params.output_stride + part * 4, values);
    }
  }
}

// Stores kPassColumns columns of staged rows to global memory, 16 bytes per lane. One bulk copy per
// row would take longer, because the lanes' copies are issued one by one.
template <class Config>
__device__ __forceinline__ void store_rows(const Params& params, const uint8_t* staging,
                                           const RowTarget& target) {
  const int32_t left = min(params.columns, target.end) - target.column;
  if (left <= 0) return;
  if constexpr (Config::kAddsRows) {
    add_rows<Config>(params, staging, target, left);
    return;
  }
  // The intermediate's rows have room for whole chunks.
  if (!params.whole_chunks || (!Config::kUpProduct && left % 8 != 0)) {
    store_ragged_rows<Config>(params, staging, target);
    return;
  }
  constexpr int32_t kChunks = Config::kPassColumns / 8;  // per row
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  auto* output = static_cast<typename Config::Element*>(params.output) + target.column;
#pragma unroll
  for (int32_t i = 0; i < kChunks / 2; ++i) {
    const int32_t row = (32 * i + lane) / kChunks;
    const int32_t chunk = (32 * i + lane) % kChunks;
    const int32_t to = __shfl_sync(0xffffffff, target.row, row);
    if (row < target.rows && chunk * 8 < left) {
      auto* destination = output + static_cast<int64_t>(to) * params.output_stride + chunk * 8;
      *reinterpret_cast<uint4*>(destination) =
          ptx::load_shared(ptx::shared_address(staging) + staging_offset<Config>(row, chunk));
    }
  }
}

// A column that does not exist may have any bias, because its result is not stored.
__device__ __forceinline__ float bias_at(const float* bias, int32_t column, int32_t columns) {
  return __ldg(bias + min(column, columns - 1));
}

// The activation of 64 accumulator columns: 32 features of a gated product, 64 of an ungated one.
template <class Config>
struct ActivateColumns {
  static constexpr bool kGated = Config::kProduct == Product::kUpGated;
  const Params& params;
  float (&v)[32];
  uint32_t* results;

  template <class Formula>
  __device__ __forceinline__ void visit() const {
    const activation::FormulaParameters& p = params.activation.parameters;
    constexpr int kStep = kGated ? 16 : 8;
#pragma unroll
    for (int first = 0; first < 32; first += kStep) {
      float result[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (kGated && std::is_same_v<Formula, activation::device::Silu>) {
          if (i % 2 == 1) continue;
          const int at = first + (i / 4) * 8 + i % 4;
          result[i] = v[at];
          result[i + 1] = v[at + 1];
          silu_pair(result[i], result[i + 1], v[at + 4], v[at + 5]);
        } else if constexpr (kGated) {
          const int at = first + (i / 4) * 8 + i % 4;
          result[i] = Formula::apply(v[at], v[at + 4], p);
        } else {
          result[i] = Formula::apply(0.0F, v[first + i], p);
        }
      }
      round_columns<typename Config::Element>(result, results + 4 * (first / kStep));
    }
  }
};

// Applies the input's router weight and the bias to 64 accumulator columns, of which the first is
// weight row 8 * `block`.
template <class Config>
__device__ __forceinline__ void weigh_and_bias(const Params& params, const float (&weights)[2],
                                               int32_t expert, int32_t block, float (&v)[32]) {
  constexpr bool kGated = Config::kProduct == Product::kUpGated;
  const int32_t pair = 2 * static_cast<int32_t>(threadIdx.x % 4);
  const int64_t width = kGated ? 2 * static_cast<int64_t>(params.columns) : params.columns;
  const float* bias = params.bias == nullptr ? nullptr : params.bias + expert * width;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float add[2] = {0.0F, 0.0F};
    if (bias != nullptr) {
      const float* part = kGated && j % 2 == 1 ? bias + params.columns : bias;
      const int32_t column = (kGated ? (block + j) / 2 : block + j) * 8 + pair;
      add[0] = bias_at(part, column, params.columns);
      add[1] = bias_at(part, column + 1, params.columns);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[4 * j + i] = fmaf(v[4 * j + i], weights[i / 2], add[i % 2]);
  }
}

template <class Config>
__device__ __forceinline__ void activate_columns(const ActivateColumns<Config>& columns) {
  const activation::DeviceActivation& activation = columns.params.activation;
  if constexpr (Config::kFormulas == Formulas::kAll) {
    activation::device::with_formula(activation, columns);
  } else if (activation.fused == activation::FusedForm::kSwigluOai) {
    columns.template visit<activation::device::SwigluOai>();
  } else {
    columns.template visit<activation::device::Silu>();
  }
}

// A warp's 16 rows of an item, rounded and not yet stored.
template <class Config>
struct Results {
  RowTarget target;
  uint32_t values[Config::kResults];
};

// Turns sums into activated results, 64 accumulator columns at a time.
template <class Config, int kSums>
__device__ __forceinline__ void finish_up(const Params& params, int32_t first_feature,
                                          const float (&sums)[kSums], Results<Config>& results) {
  constexpr int kParts = kSums / 32;
  const RowTarget& target = results.target;
  const int32_t row = static_cast<int32_t>(threadIdx.x % 32) / 4;
  float weights[2] = {1.0F, 1.0F};
  if (params.input_weights != nullptr) {
    const int32_t low = __shfl_sync(0xffffffff, target.weigh, row);
    const int32_t high = __shfl_sync(0xffffffff, target.weigh, row + 8);
    weights[0] = __ldg(params.input_weights + low);
    weights[1] = __ldg(params.input_weights + high);
  }
  const bool plain = params.bias == nullptr && params.input_weights == nullptr;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    float v[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) v[i] = sums[part * 32 + i];
    if (!plain) {
      const int32_t block = first_feature / 8 + 8 * part;
      weigh_and_bias<Config>(params, weights, target.expert, block, v);
    }
    activate_columns<Config>(
        {params, v, results.values + part * (Config::kResults * 32 / Config::kAccumulators)});
  }
}

template <class Config, int kSums>
__device__ __forceinline__ void finish_down(const Params& params, int32_t first_feature,
                                            const float (&sums)[kSums], Results<Config>& results) {
  const int32_t pair = 2 * static_cast<int32_t>(threadIdx.x % 4);
  const float* bias = params.bias;
  if (bias != nullptr) bias += static_cast<int64_t>(results.target.expert) * params.columns;
#pragma unroll
  for (int block = 0; block < kSums / 4; block += 2) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = sums[block * 4 + i];
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int32_t column = first_feature + (block + i / 4) * 8 + pair + i % 2;
        v[i] += bias_at(bias, column, params.columns);
      }
    }
    round_columns<typename Config::Element>(v, results.values + 2 * block);
  }
}

// Turns the sums of an item into results, which stay in registers until store_results.
template <class Config, int kSums>
__device__ __forceinline__ void finish_sums(const Params& params, const RowTarget& target,
                                            int32_t first_feature, const float (&sums)[kSums],
                                            Results<Config>& results) {
  constexpr int kFeaturesOfColumn = Config::kFeatures / Config::kColumns;
  results.target = target;
  results.target.column = first_feature / kFeaturesOfColumn;
  results.target.end = results.target.column + 2 * kSums / kFeaturesOfColumn;
  if (target.rows == 0) return;
  if constexpr (Config::kUpProduct) {
    finish_up<Config>(params, first_feature, sums, results);
  } else {
    finish_down<Config>(params, first_feature, sums, results);
  }
}

// Stores one pass of an item's results.
template <class Config, int kPass>
__device__ __forceinline__ void store_pass(const Params& params, const uint8_t* staging,
                                           const Results<Config>& results) {
  RowTarget target = results.target;
  target.column += kPass * Config::kPassColumns;
  __syncwarp();  // the previous pass has been read
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const uint32_t address =
      ptx::shared_address(staging) + staging_offset<Config>(lane % 16, lane / 16);
#pragma unroll
  for (int chunk = 0; chunk < Config::kPassColumns / 8; chunk += 2) {
    const uint32_t* v = results.values + (kPass * Config::kPassColumns / 8 + chunk) * 2;
    ptx::stmatrix_x4(address + chunk * 16, v[0], v[1], v[2], v[3]);
  }
  __syncwarp();
  store_rows<Config>(params, staging, target);
}

// Stores passes kBegin to kEnd - 1 of an item's results, if there are any.
template <class Config, int kBegin, int kEnd>
__device__ __forceinline__ void store_results(const Params& params, const uint8_t* staging,
                                              const Results<Config>& results) {
  if constexpr (kBegin < kEnd) {
    if (results.target.rows == 0) return;
    store_pass<Config, kBegin>(params, staging, results);
    store_results<Config, kBegin + 1, kEnd>(params, staging, results);
  }
}

// Finds where a warp's 16 rows of an item go. It runs during the products, which hide its loads.
template <class Config>
__device__ __forceinline__ RowTarget find_target(const Params& params, const Item& item,
                                                 int32_t first_row) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  RowTarget target;
  target.rows = max(0, min(16, item.tile.count - first_row));
  target.expert = item.tile.expert;
  const int32_t row = first_row + lane;
  const bool exists = lane < target.rows;
  if (Config::kUpProduct) {
    target.row = item.tile.begin + row;
    if (params.input_weights != nullptr && exists) {
      target.weigh = __ldg(params.row_slot + item.tile.begin + row);
    }
  } else if (exists) {
    target.row = __ldg(params.row_slot + item.tile.begin + row);
    if constexpr (Config::kAddsRows) {
      const float* weights = params.sum_weights;
      target.weigh = __float_as_int(weights == nullptr ? 1.0F : __ldg(weights + target.row));
      target.row /= params.top_k;
    }
  }
  return target;
}

}  // namespace conclave::inline v0::experts::tile
