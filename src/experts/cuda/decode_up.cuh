// The up product of the decode kernel: a tile of features of an expert at a time.
#pragma once

#include "activation/device/formulas.cuh"
#include "experts/cuda/decode_product.cuh"
#include "experts/cuda/decode_ring.cuh"

#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::experts::decode {

struct StoreIntermediate {
  void* target;
  int64_t stride;
  bool is_float;
  bool is_half;

  __device__ void operator()(int pair, int feature, float value) const {
    const int64_t at = pair * stride + feature;
    if (is_float) {
      static_cast<float*>(target)[at] = value;
    } else if (is_half) {
      static_cast<__half*>(target)[at] = __float2half_rn(value);
    } else {
      static_cast<__nv_bfloat16*>(target)[at] = __float2bfloat16_rn(value);
    }
  }
};

// What turns a feature's product into a value of the intermediate.
struct UpRow {
  int feature = 0;
  float bias = 0;
  float scale = 1;  // with a scale a row
};

template <class C>
__device__ UpRow read_up_row(const DecodeParams& params, int expert, int tile, int row,
                             bool is_up) {
  const DecodePlan& plan = params.plan;
  const bool gated = plan.tile_features == 8;
  UpRow result;
  result.feature = tile * plan.tile_features + row + (!gated && is_up ? 8 : 0);
  if (result.feature >= plan.intermediate_size) return result;
  const int64_t rows = int64_t{plan.intermediate_size} * (gated ? 2 : 1);
  const int64_t at = expert * rows + (gated && is_up ? plan.intermediate_size : 0) + result.feature;
  if (params.weights.gate_up_bias != nullptr) result.bias = params.weights.gate_up_bias[at];
  if constexpr (C::kRowScales) result.scale = params.weights.gate_up_scale[at];
  return result;
}

template <class C>
__device__ void finish_up_unit(const DecodeParams& params, const Shared& shared, const Thread& me,
                               int unit, const UpRow (&rows)[2], const Sums<C, 1>& sums) {
  const DecodePlan& plan = params.plan;
  const StoreIntermediate store = {static_cast<char*>(params.call.workspace) + 256,
                                   plan.intermediate_stride, C::kIsE4M3,
                                   std::is_same_v<C, Config<DecodeElement::kF16>>};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = me.quad * 2 + i;
    const int slot = shared.tables->unit_slot[unit][token];
    if (slot < 0) continue;
    const int pair = token * plan.top_k + slot;
    float value[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float product = sums.get(0, i + 2 * half);
      if constexpr (C::kRowScales) product *= rows[half].scale * shared.row_scales[token];
      if (params.call.weight_on_input && !C::kIsE4M3) product *= shared.tables->pair_weight[pair];
      value[half] = product + rows[half].bias;
    }
    // Features beyond I are read as zeros by the down product's last group of eight.
    const bool first = rows[0].feature < plan.intermediate_size;
    if (plan.tile_features == 8) {
      store(pair, rows[0].feature,
            first ? activation::device::apply(params.activation, value[0], value[1]) : 0.0F);
    } else {
      store(pair, rows[0].feature,
            first ? activation::device::apply(params.activation, 0.0F, value[0]) : 0.0F);
      if (rows[1].feature < plan.intermediate_stride)
        store(pair, rows[1].feature,
              rows[1].feature < plan.intermediate_size
                  ? activation::device::apply(params.activation, 0.0F, value[1])
                  : 0.0F);
    }
  }
}

template <class C>
__device__ void run_up(const DecodeParams& params, const Shared& shared, const Thread& me,
                       const Work& work, Ring<C>& ring, Producer<C>& producer) {
  const DecodePlan& plan = params.plan;
  const uint32_t rows = ptx::shared_address(shared.rows) + me.group * params.shared.row_pitch +
                        static_cast<uint32_t>(me.quad * 16);
  for (int i = 0; i < work.num_up; ++i) {
    const UpUnit unit = work.up(plan, i);
    const int expert = shared.tables->unit_expert[unit.unit];
    const bool present = shared.tables->unit_slot[unit.unit][me.group] >= 0;
    const UpRow up_rows[2] = {read_up_row<C>(params, expert, unit.tile, me.row, false),
                              read_up_row<C>(params, expert, unit.tile, me.row, true)};
    Sums<C, 1> sums;
    for (int box = 0; box < plan.up_boxes; box += kUpStageBoxes) {
      ring.wait();
#pragma unroll
      for (int b = 0; b < kUpStageBoxes; ++b) {
        if (box + b >= plan.up_boxes) break;
        Fragment x = {};
        if (present) {
          const uint32_t place = rows + static_cast<uint32_t>((box + b) * kDecodeBoxBytes);
          x.half[0] = ptx::load_shared(place);
          x.half[1] = ptx::load_shared(place + 64);
        }
        BoxScales<1> scales = {};
        if constexpr (C::kBlockScales) {
          scales.rows[0][0] = ring.stage_scales()[2 * b];
          scales.rows[0][1] = ring.stage_scales()[2 * b + 1];
          const float2 pair = *reinterpret_cast<const float2*>(
              shared.row_scales + (box + b) * kDecodeMaxTokens + me.quad * 2);
          scales.tokens[0] = pair.x;
          scales.tokens[1] = pair.y;
        }
        multiply_box<C, 1>(ring.address() + static_cast<uint32_t>(b * kUpBoxBytes) + me.fragment, x,
                           scales, sums);
      }
      __syncwarp();
      producer.issue(ring, ring.slot);
      ring.advance();
    }
    finish_up_unit<C>(params, shared, me, unit.unit, up_rows, sums);
  }
}

}  // namespace conclave::inline v0::experts::decode
