// The up product of the decode kernel: warps multiply a tile of features, another adds up their
// partial sums, applies the activation and stores.
#pragma once

#include "activation/device/formulas.cuh"
#include "cuda/device/barrier.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/sm90/decode/consumer.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// Finds what sums of a tile's rows are multiplied by: eight rows of gate and eight of up, or 16.
__device__ __forceinline__ void set_sum_factors(const DecodeParams& params, int unit,
                                                const Shared& shared, Operand& operand) {
  const int expert = shared.tables->unit_expert[unit];
  const float* const factors = params.weights.gate_up.factors.sum_factors;
  const bool gated = params.plan.tile_features == 8;
  operand.sum_factors[0] = factors[gated ? 2 * expert : expert];
  operand.sum_factors[1] = gated ? factors[2 * expert + 1] : operand.sum_factors[0];
}

template <class Config>
__device__ __forceinline__ void multiply_tiles(const DecodeParams& params, const Shared& shared,
                                               const Thread& me, Ring& ring) {
  const DecodePlan& plan = params.plan;
  Operand operand = {.begin = 0,
                     .end = plan.up_boxes * Config::kUnitsOfBox,
                     .stage_boxes = kUpStageBoxes * Config::kUnitsOfBox,
                     .box_bytes = kUpBoxBytes,
                     .products = 1,
                     .shift = 0,
                     .present = false,
                     .row = static_cast<uint32_t>(me.group) * params.shared.up_pitch,
                     .steps = {},
                     .second = 2,
                     .factors = plan.up_factors,
                     .box_rows = 16,
                     .scale_rows = 16,
                     .scale_first = 0,
                     .has_zeros = params.weights.gate_up.factors.zeros != nullptr,
                     .has_near_scales = has_near_scales<Config>(params.weights.gate_up.factors),
                     .step_parts = step_parts<Config>(params.weights.gate_up.factors)};
  if constexpr (Config::kTakesTable) operand.multiply_sums(params.values.unit);
  RingPosition<kDecodeTileBuffers> buffer;
  for (int index = 0;; ++index) {
    const int item = await_item(*shared.tables, index);
    if (item == kNoItem) return;
    const int unit = up_item(item).unit;
    const uint32_t tokens = shared.tables->unit_tokens[unit];
    operand.present = (tokens >> me.group & 1U) != 0;
    if constexpr (Config::kHasLanes) {
      operand.row = operand.present ? static_cast<uint32_t>(me.group) * params.shared.up_pitch : 0;
    }
    // Tokens that do not take part may use any step. They use token 0's, since the call may have no
    // token of their own number.
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int token = me.quad * 2 + k;
      operand.steps[k] =
          shared.row_scales + ((tokens >> token & 1U) != 0 ? token : 0) * plan.up_boxes;
    }
    if constexpr (Config::kCodes.exact) set_sum_factors(params, unit, shared, operand);
    const Sums<Config, 1> sums = run_boxes<Config, 1>(operand, params, shared, me, ring);
    ptx::mbarrier_wait(shared.tile_empty + buffer.slot, buffer.phase ^ 1U);
    float* target =
        shared.tiles + ((buffer.slot * Config::kConsumerWarps + me.warp) * 4) * 32 + me.lane;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float factor = Config::kHasSumFactors ? operand.sum_factors[k / 2] : 1.0F;
      target[k * 32] = sums.get(0, k) * factor;
    }
    ptx::mbarrier_arrive(shared.tile_full + buffer.slot);
    __syncwarp();
    buffer.advance();
  }
}

template <class Config>
__device__ __forceinline__ void store_intermediate(const DecodeParams& params, int pair,
                                                   int feature, float value) {
  void* target = params.call.workspace;
  const int place = Config::kHasLanes ? lane_index_of(feature) : feature;
  const int64_t at = pair * params.plan.intermediate_stride + place;
  if constexpr (Config::kIsByte) {
    static_cast<float*>(target)[at] = value;
  } else {
    static_cast<uint16_t*>(target)[at] = static_cast<uint16_t>(Config::pack(value, 0.0F));
  }
}

// Zeros behind the last tile of features.
template <class Config>
__device__ __forceinline__ void clear_rest(const DecodeParams& params, int pair, int row) {
  const DecodePlan& plan = params.plan;
  const int first = plan.feature_tiles * plan.tile_features;
  for (int feature = first + row; feature < plan.intermediate_columns; feature += 8) {
    store_intermediate<Config>(params, pair, feature, 0.0F);
  }
}

// A feature's bias and scale, which its product needs before the activation.
struct UpRow {
  int feature = 0;
  float bias = 0;
  float scale = 1;  // with one scale per row
};

template <class Config>
__device__ __forceinline__ UpRow read_up_row(const DecodeParams& params, int expert, int tile,
                                             int row, bool is_second) {
  const DecodePlan& plan = params.plan;
  const bool gated = plan.tile_features == 8;
  UpRow result;
  result.feature = tile * plan.tile_features + row + (!gated && is_second ? 8 : 0);
  if (result.feature >= plan.intermediate_size) return result;
  const int64_t rows = int64_t{plan.intermediate_size} * (gated ? 2 : 1);
  const int64_t at =
      expert * rows + (gated && is_second ? plan.intermediate_size : 0) + result.feature;
  if (params.weights.gate_up.bias != nullptr) result.bias = params.weights.gate_up.bias[at];
  if constexpr (Config::kRowScales) result.scale = params.weights.gate_up.scale[at];
  return result;
}

// Not inlined: a launch of few microseconds fetches its instructions anew, so the formulas' code
// exists only once.
inline __device__ __noinline__ float activate(const activation::DeviceActivation& activation,
                                              float gate, float up) {
  return activation::device::apply(activation, gate, up);
}

// Features beyond I are stored as zeros: the down product reads groups of eight.
template <class Config>
__device__ __forceinline__ void store_features(const DecodeParams& params, int pair,
                                               const UpRow (&rows)[2], float first, float second) {
  const DecodePlan& plan = params.plan;
  const bool gated = plan.tile_features == 8;
#pragma unroll 1
  for (int i = 0; i < (gated ? 1 : 2); ++i) {
    const float up = gated || i == 1 ? second : first;
    const float value = activate(params.activation, first, up);
    const int feature = i == 0 ? rows[0].feature : rows[1].feature;
    if (feature < plan.intermediate_stride)
      store_intermediate<Config>(params, pair, feature,
                                 feature < plan.intermediate_size ? value : 0.0F);
  }
}

template <class Config>
__device__ __forceinline__ void finish_tiles(const DecodeParams& params, const Shared& shared,
                                             const Thread& me) {
  const DecodePlan& plan = params.plan;
  const DecodeTables& tables = *shared.tables;
  RingPosition<kDecodeTileBuffers> buffer;
  for (int index = 0;; ++index) {
    const int item = await_item(tables, index);
    if (item == kNoItem) return;
    const UpItem tile = up_item(item);
    const int expert = tables.unit_expert[tile.unit];
    const UpRow rows[2] = {read_up_row<Config>(params, expert, tile.tile, me.row, false),
                           read_up_row<Config>(params, expert, tile.tile, me.row, true)};
    const uint32_t tokens = tables.unit_tokens[tile.unit];
    ptx::mbarrier_wait(shared.tile_full + buffer.slot, buffer.phase);
    float sums[4] = {};
    const float* source = shared.tiles + buffer.slot * Config::kConsumerWarps * 4 * 32 + me.lane;
#pragma unroll
    for (int warp = 0; warp < Config::kConsumerWarps; ++warp) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[k] += source[(warp * 4 + k) * 32];
    }
    ptx::mbarrier_arrive(shared.tile_empty + buffer.slot);
    __syncwarp();
    if (me.lane == 0) shared.tables->tiles[index % kDecodeTileSlots] = kItemUnknown;
    buffer.advance();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int token = me.quad * 2 + k;
      if ((tokens >> token & 1U) == 0) continue;
      const int pair = token * plan.top_k + tables.unit_slot[tile.unit][token];
      float factor = 1;
      if constexpr (Config::kRowScales) factor = shared.row_scales[token * plan.up_boxes];
      if constexpr (!Config::kIsByte) {
        if (params.call.weight_on_input) factor = tables.pair_weight[pair];
      }
      store_features<Config>(params, pair, rows,
                             fmaf(sums[k], factor * rows[0].scale, rows[0].bias),
                             fmaf(sums[k + 2], factor * rows[1].scale, rows[1].bias));
      if constexpr (Config::kHasLanes) {
        if (tile.tile + 1 == plan.feature_tiles) clear_rest<Config>(params, pair, me.row);
      }
    }
  }
}

}  // namespace conclave::inline v0::experts::decode
