// The two products of experts whose weights are codes, and what lies between them, for kernels of
// any parameters that begin with CodedParams.
#pragma once

#include "experts/cuda/common/round_rows.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/code_values.h"
#include "experts/cuda/sm90/kernel_names.h"
#include "experts/cuda/sm90/stream/launch.h"
#include "experts/cuda/sm90/stream/stream_codes.h"
#include "experts/cuda/sm90/tensor_maps.h"
#include "quant/gpu_rows.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <cstddef>
#include <string>

namespace conclave::inline v0::experts::stream {

template <class Parameters>
class CodesProducts {
 public:
  CodesProducts(const KernelNames& names, const KernelPairOf<Parameters>& kernels,
                const ExpertsProblem& problem, const DeviceExperts& weights, const DeviceTile& tile)
      : names_(names), problem_(problem), tile_(tile), kernels_(kernels) {
    allow_shared_bytes(kernels_);
    up_ = up_params(problem, weights, kernels_.up);
    down_ = down_params(problem, weights, kernels_.down);
    set_codes(up_, weights.gate_up.factors, kernels_.up);
    set_codes(down_, weights.down.factors, kernels_.down);
    up_.column_factors = weights.down.column_factors;
    if (row_terms(problem) == 2) {
      up_.terms_shift = 1;
      up_.depth_stages *= 2;
      up_.depth = up_.depth_stages * kernels_.up.depth;
    }
    if (!rounds_rows()) return;
    rounding_ = row_rounding(problem.weight_dtype, problem.quant);
    up_.stores_floats = true;
    if (quant::row_factor(problem.quant) == quant::RowFactor::kStated) {
      intermediate_step_ = weights.intermediate_scale;
      up_.row_factors = weights.input_scale;
      down_.row_factors = weights.intermediate_scale;
      up_.row_factor_stride = down_.row_factor_stride = 0;
    }
  }

  // Lets the down product begin on a tile when the up product has stored its rows. It cannot where
  // a launch lies between the two, nor where sorted rows may lie where it writes. Items of narrow
  // tiles are short: counts would cost more than the end of the up product that they hide.
  void begin_by_tiles() {
    constexpr int32_t kLeastTokens = 32;
    if (rounds_rows() || tile_.sorted_input || tile_.tokens < kLeastTokens) return;
    up_.items_before = down_.items_before = static_cast<uint32_t>(up_.feature_tiles);
  }

  // These are known before a call; an owner may add to them.
  const Parameters& up() const { return up_; }
  const Parameters& down() const { return down_; }
  const DeviceTile& tile() const { return tile_; }
  std::string describe() const { return std::string(names_.row) + " " + to_string(tile_); }

  // The intermediate rows of a call.
  struct Intermediate {
    int64_t stride = 0;
    void* rows = nullptr;  // bf16
    float* floats = nullptr;
    float* factors = nullptr;
  };
  bool rounds_rows() const { return problem_.quant.activations != ActivationScale::kNone; }

  Intermediate place_intermediate(const DeviceExpertsCall& call) const {
    const StreamCodesWorkspace layout = stream_codes_workspace(problem_, call.groups.max_rows);
    auto* const base = static_cast<std::byte*>(call.workspace);
    return {.stride = layout.stride,
            .rows = base + layout.rows,
            .floats = reinterpret_cast<float*>(base + layout.floats),
            .factors = reinterpret_cast<float*>(base + layout.factors)};
  }

  void run_up(const DeviceExpertsCall& call, const Intermediate& rows, const Parameters& own,
              CUstream_st* stream) const {
    Parameters params = with_groups(own, call.groups);
    params.input = call.input.data;
    params.input_stride = call.input.row_stride;
    if (tile_.sorted_input) {
      params.rows = map_rows(problem_,
                             {.data = call.input.data,
                              .stride = call.input.row_stride,
                              .rows = call.input.num_rows,
                              .columns = problem_.input_columns(),
                              .dtype = DType::kBF16},
                             kernels_.up.token_box);
    }
    params.input_weights = call.input_weights;
    params.output = rounds_rows() ? rows.floats : rows.rows;
    params.output_stride = rows.stride;
    if (rounds_rows() && has_factors_by_row()) params.row_factors = call.input.scales;
    set_counters(params, call.workspace);
    enqueue(names_.up, kernels_.up, params, call.groups.max_tiles, problem_.gpu().multiprocessors,
            stream);
  }

  void round_rows(const DeviceExpertsCall& call, const Intermediate& rows,
                  CUstream_st* stream) const {
    round_rows_cuda({.rows = rows.floats,
                     .dtype = DType::kF32,
                     .num_rows = call.groups.max_rows,
                     .live_rows = call.groups.expert_begin + problem_.num_local_experts,
                     .columns = problem_.intermediate_size,
                     .row_stride = rows.stride,
                     .rule = rounding_,
                     .stated_step = intermediate_step_,
                     .values = rows.rows,
                     .value_stride = rows.stride,
                     .factors = has_factors_by_row() ? rows.factors : nullptr},
                    stream);
  }

  void run_down(const DeviceExpertsCall& call, const Intermediate& rows, const Parameters& own,
                CUstream_st* stream) const {
    Parameters params = with_groups(own, call.groups);
    params.rows = map_rows(problem_,
                           {.data = rows.rows,
                            .stride = rows.stride,
                            .rows = call.groups.max_rows,
                            .columns = problem_.intermediate_size,
                            .dtype = DType::kBF16},
                           kernels_.down.token_box);
    if (rounds_rows() && has_factors_by_row()) params.row_factors = rows.factors;
    set_counters(params, call.workspace);
    set_output(params, call);
    enqueue(names_.down, kernels_.down, params, call.groups.max_tiles,
            problem_.gpu().multiprocessors, stream);
  }

 private:
  bool has_factors_by_row() const {
    return quant::row_factor(problem_.quant) == quant::RowFactor::kOfRow;
  }

  void set_codes(Parameters& params, const FactorPlanes& planes,
                 const KernelOf<Parameters>& kernel) const {
    if (planes.bytes != nullptr) return set_exact(params, planes, kernel);
    if (planes.scales == nullptr && planes.steps == nullptr) {
      throw Error(ErrorCode::kState, {.what = std::string(names_.row) + " needs FactorPlanes"});
    }
    const int32_t rows = kernel.weight_rows;
    const int64_t stage = kernel.depth;
    // One group of all columns begins with each stage anew.
    const int64_t group = planes.columns;
    const bool is_part = group != 0 && group < stage;
    params.group = group == 0 ? params.depth_stages * static_cast<int32_t>(stage)
                              : static_cast<int32_t>(group);
    params.groups_of_stage = is_part ? static_cast<int32_t>(stage / group) : 1;
    params.steps_shift = 0;
    while (16 << params.steps_shift < (is_part ? group : stage)) ++params.steps_shift;
    params.features_of_tile = rows / static_cast<int32_t>(planes.parts);
    const auto map = [&](const void* data, DType dtype) {
      return map_factors(problem_, planes, {data, dtype}, rows, params.groups_of_stage);
    };
    if (planes.steps != nullptr) {
      const auto words =
          static_cast<int32_t>(step_words(factor_form(problem_), params.groups_of_stage));
      params.scales = map_step_words(problem_, planes, rows, words);
      params.shifts = map_step_units(problem_, planes, rows, 1);
    } else {
      params.scales = map(planes.scales, DType::kF32);
    }
    if (planes.zeros != nullptr) set_shifts(params, map(planes.zeros, DType::kBF16), DType::kBF16);
    if (planes.offsets != nullptr)
      set_shifts(params, map(planes.offsets, DType::kF32), DType::kF32);
    params.values = bf16_values(problem_.weight_dtype);
    params.short_scales = planes.short_scales;
    params.least = quant::format_of(problem_.weight_dtype).codes->whole.least;
  }

  void set_exact(Parameters& params, const FactorPlanes& planes,
                 const KernelOf<Parameters>& kernel) const {
    params.group = static_cast<int32_t>(planes.columns);
    params.groups_of_stage = kernel.depth / params.group;
    params.scales = map_exact_scales(problem_, planes, kernel.weight_rows, params.groups_of_stage);
    params.byte_form = planes.byte_form;
    params.sum_factors = planes.sum_factors;
  }

  static void set_shifts(Parameters& params, const CUtensorMap& map, DType dtype) {
    params.shifts = map;
    params.shift_bytes = static_cast<int32_t>(byte_size(dtype));
  }

  KernelNames names_;
  ExpertsProblem problem_;
  DeviceTile tile_;
  KernelPairOf<Parameters> kernels_;
  Parameters up_;
  Parameters down_;
  RowRounding rounding_ = {};
  const float* intermediate_step_ = nullptr;
};

}  // namespace conclave::inline v0::experts::stream
