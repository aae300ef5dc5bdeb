// The down product of the decode kernel: a block's columns over all parts (unit, slice of I).
// Slices of intermediate rows are loaded to shared memory in rounds of as many as fit: one round
// for few tokens. Weights keep arriving meanwhile.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "experts/cuda/sm90/decode/consumer.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// part_row(p) is the number of part p's first row.
__device__ __forceinline__ int part_row(const DecodePlan& plan, const DecodeTables& tables,
                                        int part) {
  const int unit = part / plan.k_slices;
  const int slice = part - unit * plan.k_slices;
  return tables.unit_row[unit] * plan.k_slices + __popc(tables.unit_tokens[unit]) * slice;
}

// The end of the round that starts at part `begin`: all parts whose rows fit, and at least one.
__device__ __forceinline__ int end_of_round(const DecodeParams& params, const DecodeTables& tables,
                                            int begin, int parts) {
  const DecodePlan& plan = params.plan;
  const int first = part_row(plan, tables, begin);
  const int last =
      part_row(plan, tables, parts - 1) + __popc(tables.unit_tokens[(parts - 1) / plan.k_slices]);
  if (last - first <= params.shared.down_rows) return parts;
  int end = begin + 1;
  while (end + 1 < parts && part_row(plan, tables, end + 1) - first <= params.shared.down_rows)
    ++end;
  return end;
}

__device__ __forceinline__ const char* intermediate_row(const DecodeParams& params, int pair) {
  return static_cast<const char*>(params.call.workspace) +
         pair * params.plan.intermediate_stride * params.plan.intermediate_bytes;
}

// True if each row of codes is made by a warp at once, which then finds its scale as well.
template <class Config>
__device__ __forceinline__ bool finds_own_scales(const DecodeParams& params) {
  return Config::kRowScales && params.row_scale == RowScale::kToken && params.plan.k_slices == 1;
}

// Finds the scale of each intermediate row; every block does so for itself.
template <class Config>
__device__ __forceinline__ void find_pair_scales(const DecodeParams& params, const Shared& shared,
                                                 const Thread& me, int tokens) {
  using Rule = typename Config::RowRule;
  const DecodePlan& plan = params.plan;
  const int width = (plan.intermediate_size + 7) / 8 * 8;
  for (int pair = me.warp; pair < tokens * plan.top_k; pair += Config::kConsumerWarps) {
    if (shared.tables->pair_expert[pair] < 0) continue;
    float scale = 0;
    if (params.row_scale == RowScale::kStatic) {
      scale = params.weights.intermediate_scale[0];
    } else {
      // A token's second slot with an expert has no row, and its scale is not used.
      const auto* row = reinterpret_cast<const float*>(intermediate_row(params, pair));
      float amax = 0;
#pragma unroll 8
      for (int column = me.lane * 4; column < width; column += 128) {
        const float4 x = __ldcg(reinterpret_cast<const float4*>(row + column));
        amax = Rule::larger(Rule::larger(Rule::larger(Rule::larger(amax, x.x), x.y), x.z), x.w);
      }
      scale = Rule::scale(warp_max<Rule, 32>(amax), params.power_of_two_scales);
    }
    if (me.lane == 0) shared.tables->pair_scale[pair] = scale;
  }
  consumer_sync<Config>();
}

// Makes one box of codes from float32 values; returns the step.
template <class Config>
__device__ __forceinline__ float quantize_box(const DecodeParams& params, const float4& x,
                                              float scale, uint32_t* target) {
  using Rule = typename Config::RowRule;
  if constexpr (Config::kBlockScales) {
    const float amax = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
    scale = Rule::scale(warp_max<Rule, 32>(amax), params.power_of_two_scales);
  }
  const Step step = make_step(scale);
  *target =
      Rule::pack(divide<Config::kRowScales>(x.x, step), divide<Config::kRowScales>(x.y, step),
                 divide<Config::kRowScales>(x.z, step), divide<Config::kRowScales>(x.w, step));
  return scale;
}

// One warp copies a slice of one row, 16-bit values as they are, to shared memory.
__device__ __forceinline__ void copy_slice(const DecodeParams& params, const Shared& shared,
                                           int lane, int pair, const DownItem& part, int row) {
  const uint32_t target =
      ptx::shared_address(shared.rows) + static_cast<uint32_t>(row) * params.shared.down_pitch;
  const char* source = intermediate_row(params, pair);
  const int chunks = params.plan.row_box_bytes / 16;  // a box has
  for (int chunk = part.begin * chunks + lane; chunk < part.end * chunks; chunk += 32) {
    const bool inside = chunk * 8 < params.plan.intermediate_columns;
    ptx::cp_async_16(target + static_cast<uint32_t>(chunk - part.begin * chunks) * 16,
                     source + (inside ? chunk : 0) * 16, inside);
  }
}

// Stores a slice as codes, with one step per box or per row. The code of the loop over boxes
// stays short: most launches run it once, and instructions come from memory too. Where the slice is
// a row whose scale nobody knows, the boxes are read from the last to the first, and then from
// these, which are at hand, to the last.
template <class Config>
__device__ __forceinline__ void quantize_slice(const DecodeParams& params, const Shared& shared,
                                               int lane, int pair, const DownItem& part, int row) {
  using Rule = typename Config::RowRule;
  constexpr int kAhead = 8;
  const DecodePlan& plan = params.plan;
  unsigned char* target = shared.rows + row * static_cast<int>(params.shared.down_pitch) + lane * 4;
  float* steps = shared.row_scales + row * min(plan.slice_boxes, plan.down_boxes);
  const int width = (plan.intermediate_size + 7) / 8 * 8;
  const char* source = intermediate_row(params, pair) + lane * 16;
  const bool finds_scale = finds_own_scales<Config>(params);
  float row_scale = 1.0F;
  if (Config::kRowScales && !finds_scale) row_scale = shared.tables->pair_scale[pair];
  float amax = 0;
  const int back = (part.end - part.begin - 1) / kAhead;  // turns from the last boxes to the first
  for (int turn = finds_scale ? -back : 0; turn <= back; ++turn) {
    const int first = part.begin + abs(turn) * kAhead;
    float4 x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      x[i] = {};
      if (first + i < part.end && (first + i) * 128 + lane * 4 < width)
        x[i] = __ldcg(reinterpret_cast<const float4*>(source + int64_t{first + i} * 512));
    }
    if constexpr (Config::kRowScales) {
      if (finds_scale && turn <= 0) {
#pragma unroll
        for (const float4& of_box : x) {
          amax = Rule::larger(Rule::larger(amax, of_box.x), of_box.y);
          amax = Rule::larger(Rule::larger(amax, of_box.z), of_box.w);
        }
        if (turn < 0) continue;
        row_scale = Rule::scale(warp_max<Rule, 32>(amax), params.power_of_two_scales);
      }
    }
#pragma unroll 2
    for (int box = first; box < min(first + kAhead, part.end); ++box) {
      const float step = quantize_box<Config>(
          params, x[0], row_scale, reinterpret_cast<uint32_t*>(target + (box - part.begin) * 128));
      if (lane == 0) steps[box - part.begin] = step;
#pragma unroll
      for (int i = 0; i + 1 < kAhead; ++i) x[i] = x[i + 1];
    }
  }
}

// The consumers load the rows of parts [begin, end).
template <class Config>
__device__ __forceinline__ void load_round(const DecodeParams& params, const Shared& shared,
                                           const Thread& me, int begin, int end) {
  const DecodePlan& plan = params.plan;
  const DecodeTables& tables = *shared.tables;
  const int first_row = part_row(plan, tables, begin);
  for (int index = begin + me.warp; index < end; index += Config::kConsumerWarps) {
    const DownItem part = down_item(plan, index);
    int row = part_row(plan, tables, index) - first_row;
    for (uint32_t tokens = tables.unit_tokens[part.unit]; tokens != 0; tokens &= tokens - 1) {
      const int token = __ffs(static_cast<int>(tokens)) - 1;
      const int pair = token * plan.top_k + tables.unit_slot[part.unit][token];
      if constexpr (Config::kIsByte) {
        quantize_slice<Config>(params, shared, me.lane, pair, part, row++);
      } else {
        copy_slice(params, shared, me.lane, pair, part, row++);
      }
    }
  }
  if constexpr (!Config::kIsByte) {
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
  }
  consumer_sync<Config>();
}

// Weighted sums over units of this warp's boxes: [product][i] as in Sums.
struct Output {
  float sum[kMaxProducts][4] = {};
};

// Biases and scales of a lane's rows in a pass; the products, which take longer, hide their loads.
template <int kProducts>
struct DownRows {
  float bias[kProducts][2] = {};
  float scale[kProducts][2] = {};  // with one scale per row
};

template <class Config, int kProducts>
__device__ __forceinline__ DownRows<kProducts> read_down_rows(const DecodeParams& params,
                                                              const Thread& me, int expert,
                                                              int first_row, bool with_bias) {
  const DecodePlan& plan = params.plan;
  DownRows<kProducts> rows;
#pragma unroll
  for (int p = 0; p < kProducts; ++p) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_pass = p * 16 + half * 8 + me.row;
      const int row = first_row + in_pass;
      if (in_pass >= plan.pass_rows || row >= plan.hidden_size) continue;
      const int64_t at = int64_t{expert} * plan.hidden_size + row;
      if constexpr (Config::kRowScales) rows.scale[p][half] = params.weights.down.scale[at];
      if (with_bias) rows.bias[p][half] = params.weights.down.bias[at];
    }
  }
  return rows;
}

// Adds a part, times the weights of its tokens.
template <class Config, int kProducts>
__device__ __forceinline__ void add_part(const DecodeParams& params, const Shared& shared,
                                         const Thread& me, int unit,
                                         const DownRows<kProducts>& rows, const Operand& operand,
                                         const Sums<Config, kProducts>& sums, Output& output) {
  const DecodeTables& tables = *shared.tables;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = me.quad * 2 + i;
    if ((tables.unit_tokens[unit] >> token & 1U) == 0) continue;
    const float weight = params.call.weight_on_input ? 1.0F : tables.unit_weight[unit][token];
    const float step = Config::kRowScales ? operand.steps[i][0] : 1.0F;
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float value = sums.get(p, i + 2 * half);
        const float factor = Config::kRowScales       ? rows.scale[p][half] * step
                             : Config::kHasSumFactors ? operand.sum_factors[0]
                                                      : 1.0F;
        float& sum = output.sum[p][i + 2 * half];
        sum = fmaf(weight, fmaf(value, factor, rows.bias[p][half]), sum);
      }
    }
  }
}

template <class Config, int kProducts>
__device__ __forceinline__ void multiply_part(const DecodeParams& params, const Shared& shared,
                                              const Thread& me, const DownItem& part,
                                              uint32_t tokens, int row, int first_row, Ring& ring,
                                              Output& output) {
  const DecodePlan& plan = params.plan;
  const int expert = shared.tables->unit_expert[part.unit];
  const int shift = expert * plan.down_boxes;
  const bool adds_bias = params.weights.down.bias != nullptr && part.slice == 0 && me.warp == 0;
  const int begin = part.begin * Config::kUnitsOfBox;
  const int end = part.end * Config::kUnitsOfBox;
  if (!adds_bias && !has_boxes(me, shift, begin, end)) {
    skip_boxes(params, shared, me, part.begin, part.end, plan.down_stage_boxes, ring);
    return;
  }
  // Any row will do for tokens that do not take part.
  const auto row_of = [&](int token) {
    return (tokens >> token & 1U) != 0 ? row + __popc(tokens & ((1U << token) - 1U)) : row;
  };
  const int slice_boxes = min(plan.slice_boxes, plan.down_boxes);
  Operand operand = {.begin = begin,
                     .end = end,
                     .stage_boxes = plan.down_stage_boxes * Config::kUnitsOfBox,
                     .box_bytes = static_cast<uint32_t>(plan.down_box_bytes),
                     .products = (plan.pass_rows + 15) / 16,
                     .shift = shift,
                     .present = (tokens >> me.group & 1U) != 0,
                     .row = static_cast<uint32_t>(row_of(me.group)) * params.shared.down_pitch,
                     .steps = {shared.row_scales + row_of(me.quad * 2) * slice_boxes,
                               shared.row_scales + row_of(me.quad * 2 + 1) * slice_boxes},
                     .second = 0,
                     .factors = plan.down_factors,
                     .box_rows = plan.pass_rows,
                     .scale_rows = plan.down_scale_rows,
                     .scale_first = first_row % 16,
                     .has_zeros = params.weights.down.factors.zeros != nullptr,
                     .has_near_scales = has_near_scales<Config>(params.weights.down.factors),
                     .step_parts = step_parts<Config>(params.weights.down.factors)};
  if constexpr (Config::kBlockScales) {
#pragma unroll
    for (int i = 0; i < 2 * kProducts; ++i) {
      const bool second = (first_row + i * 8 + me.row) / kScaleGroup != first_row / kScaleGroup;
      operand.second |= second ? 1U << i : 0U;
    }
  }
  if constexpr (Config::kCodes.exact) {
    operand.multiply_sums(params.weights.down.factors.sum_factors[expert]);
  }
  if constexpr (Config::kTakesTable) operand.multiply_sums(params.values.unit);
  const DownRows<kProducts> rows =
      read_down_rows<Config, kProducts>(params, me, expert, first_row, adds_bias);
  const Sums<Config, kProducts> sums =
      run_boxes<Config, kProducts>(operand, params, shared, me, ring);
  add_part<Config, kProducts>(params, shared, me, part.unit, rows, operand, sums, output);
}

__device__ __forceinline__ void write_output(const DecodeParams& params, int64_t at, float value) {
  switch (params.call.out_dtype) {
    case DType::kF32:
      static_cast<float*>(params.call.out)[at] = value;
      return;
    case DType::kF16:
      static_cast<__half*>(params.call.out)[at] = __float2half_rn(value);
      return;
    default:
      static_cast<__nv_bfloat16*>(params.call.out)[at] = __float2bfloat16_rn(value);
  }
}

// Adds the warps' sums in order of warps and rounds them once.
template <class Config>
__device__ __forceinline__ void write_pass(const DecodeParams& params, const Shared& shared,
                                           const Thread& me, int first_row, int tokens,
                                           const Output& output) {
  const DecodePlan& plan = params.plan;
  const int pitch = plan.pass_rows;
#pragma unroll
  for (int p = 0; p < kMaxProducts; ++p) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = p * 16 + (i / 2) * 8 + me.row;
      const int token = me.quad * 2 + i % 2;
      if (row < pitch && token < tokens)
        shared.tiles[(me.warp * tokens + token) * pitch + row] = output.sum[p][i];
    }
  }
  consumer_sync<Config>();
  const int rows = min(pitch, plan.hidden_size - first_row);
  for (int i = static_cast<int>(threadIdx.x); i < tokens * rows; i += Config::kConsumers) {
    const int token = i / rows;
    const int row = i - token * rows;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < Config::kConsumerWarps; ++warp)
      sum += shared.tiles[(warp * tokens + token) * pitch + row];
    write_output(params, token * params.call.out_stride + first_row + row,
                 sum * params.call.output_scale);
  }
  consumer_sync<Config>();
}

template <class Config, int kProducts>
__device__ __forceinline__ void multiply_parts(const DecodeParams& params, const Shared& shared,
                                               const Thread& me, const Walk& walk, int first_row,
                                               Ring& ring, Output& output) {
  const DecodePlan& plan = params.plan;
  const DecodeTables& tables = *shared.tables;
  for (int begin = 0; begin < walk.num_parts;) {
    const int end = end_of_round(params, tables, begin, walk.num_parts);
    load_round<Config>(params, shared, me, begin, end);
    DownItem part = down_item(plan, begin);
    int row = 0;
    for (int index = begin; index < end; ++index) {
      const uint32_t its_tokens = tables.unit_tokens[part.unit];
      multiply_part<Config, kProducts>(params, shared, me, part, its_tokens, row, first_row, ring,
                                       output);
      row += __popc(its_tokens);
      part = next_item(plan, part);
    }
    consumer_sync<Config>();
    begin = end;
  }
}

template <class Config>
__device__ __forceinline__ void run_down(const DecodeParams& params, const Shared& shared,
                                         const Thread& me, const Walk& walk, int tokens,
                                         Ring& ring) {
  const DecodePlan& plan = params.plan;
  if constexpr (Config::kRowScales) {
    if (!finds_own_scales<Config>(params)) find_pair_scales<Config>(params, shared, me, tokens);
  }
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int first_row = walk.first_row + pass * plan.pass_rows;
    if (first_row >= plan.hidden_size) return;
    Output output;
    if (plan.pass_rows <= 16) {
      multiply_parts<Config, 1>(params, shared, me, walk, first_row, ring, output);
    } else if (Config::kHasLanes && plan.pass_rows <= 32) {
      // Loops over products that are not there would still take registers and instructions.
      multiply_parts<Config, Config::kHasLanes ? 2 : 1>(params, shared, me, walk, first_row, ring,
                                                        output);
    } else {
      multiply_parts<Config, kMaxProducts>(params, shared, me, walk, first_row, ring, output);
    }
    write_pass<Config>(params, shared, me, first_row, tokens, output);
  }
}

}  // namespace conclave::inline v0::experts::decode
