// The host's part of stream_bytes.cuh, for codes of one type.
#pragma once

#include "cuda/launch.h"
#include "experts/cuda/common/quantize_rows.h"
#include "experts/cuda/sm90/kernel_names.h"
#include "experts/cuda/sm90/stream/launch.h"
#include "experts/cuda/sm90/stream/stream_bytes.cuh"
#include "experts/cuda/sm90/stream/stream_bytes.h"
#include "experts/cuda/sm90/tensor_maps.h"

#include "conclave/error.h"

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace conclave::inline v0::experts::stream {

using ByteKernel = KernelOf<ByteParams>;
using ByteKernelPair = KernelPairOf<ByteParams>;

template <class Element, Shape kShape, Product kProduct>
ByteKernel kernel() {
  using Config = Config<Element, kShape>;
  return describe_kernel<Config>(stream_bytes_product<Config, kProduct>);
}

// kWide serves the down product, and the up product with a gate; kNarrow serves that without one.
template <class Element, Shape kWide, Shape kNarrow>
ByteKernelPair kernel_pair(bool gated) {
  return {.up = gated ? kernel<Element, kWide, Product::kUp>()
                      : kernel<Element, kNarrow, Product::kUp>(),
          .down = kernel<Element, kWide, Product::kDown>()};
}

// The kernels of the tiles of stream_bytes.cc.
template <class Element, Scaling kScale>
ByteKernelPair find_kernels(const DeviceTile& tile, bool gated) {
  switch (tile.tokens) {
    case 16:
      return kernel_pair<Element, Shape{16, 256, 1, 6, kScale, 2}, Shape{16, 128, 2, 5, kScale}>(
          gated);
    case 32:
      return kernel_pair<Element, Shape{32, 256, 1, 6, kScale, 2}, Shape{32, 128, 2, 5, kScale}>(
          gated);
    case 64:
      return kernel_pair<Element, Shape{64, 256, 1, 5, kScale, 2}, Shape{64, 128, 2, 4, kScale}>(
          gated);
    case 80:
      return kernel_pair<Element, Shape{80, 256, 1, 5, kScale, 2}, Shape{80, 128, 2, 3, kScale}>(
          gated);
    default:
      throw Error(
          ErrorCode::kUnsupported,
          {.what = "kernels of bytes that stream have no such tile", .found = to_string(tile)});
  }
}

class StreamBytesKernel final : public DeviceExpertsKernel {
 public:
  StreamBytesKernel(const KernelNames& names, const ByteKernelPair& kernels,
                    const ExpertsProblem& problem, const DeviceExperts& weights,
                    const DeviceTile& tile)
      : names_(names), problem_(problem), tile_(tile), kernels_(kernels) {
    allow_shared_bytes(kernels_);
    up_ = up_params(problem, weights, kernels_.up);
    down_ = down_params(problem, weights, kernels_.down);
    fill_up_scales(weights);
    fill_down_scales(weights);
  }

  int32_t tile_tokens() const override { return tile_.tokens; }

  bool finishes_rows() const override { return true; }
  std::string describe() const override { return std::string(names_.row) + " " + to_string(tile_); }

  void run(const DeviceExpertsCall& call, CUstream_st* stream) const override {
    if (call.groups.max_rows == 0) return;
    const Intermediate rows = place_intermediate(call);
    run_up(call, rows, stream);
    if (dynamic_rows() && !up_makes_codes()) quantize(call, rows, stream);
    run_down(call, rows, stream);
  }

 private:
  struct Intermediate {
    int64_t stride = 0;
    uint8_t* codes = nullptr;
    float* scales = nullptr;
    float* values = nullptr;
  };

  bool block() const { return problem_.quant.weights == WeightScale::kBlock; }
  bool dynamic_rows() const { return problem_.quant.activations == ActivationScale::kToken; }

  // Codes are made by fours.
  bool up_makes_codes() const {
    return dynamic_rows() && problem_.intermediate_size % 4 == 0 &&
           problem_.intermediate_size <= kMostRowColumns;
  }

  // Counts of the up product that must be there before the down product begins an item on their
  // rows: one of each item, and one of their codes. If a launch lies between the two, the down
  // product awaits the whole launch.
  uint32_t items_before() const {
    const auto items = static_cast<uint32_t>(up_.feature_tiles);
    if (!dynamic_rows()) return items;
    return up_makes_codes() ? items + 1 : 0;
  }

  Intermediate place_intermediate(const DeviceExpertsCall& call) const {
    const StreamBytesWorkspace layout = stream_bytes_workspace(problem_, call.groups.max_rows);
    auto* base = static_cast<std::byte*>(call.workspace);
    return {.stride = layout.stride,
            .codes = reinterpret_cast<uint8_t*>(base + layout.codes),
            .scales = reinterpret_cast<float*>(base + layout.scales),
            .values = reinterpret_cast<float*>(base + layout.values)};
  }

  void fill_up_scales(const DeviceExperts& weights) {
    ScaleParams& scales = up_.scales;
    fill_weight_scales(scales, weights.gate_up.scale, problem_.intermediate_size,
                       problem_.hidden_size, problem_.activation.gated ? 2 : 1);
    scales.power_of_two = problem_.quant.power_of_two_scales;
    if (problem_.quant.activations == ActivationScale::kTensorStatic) {
      scales.constant = weights.input_scale;
      scales.output_constant = weights.intermediate_scale;
    }
  }

  void fill_down_scales(const DeviceExperts& weights) {
    fill_weight_scales(down_.scales, weights.down.scale, problem_.hidden_size,
                       problem_.intermediate_size, 1);
    if (problem_.quant.activations == ActivationScale::kTensorStatic) {
      down_.scales.constant = weights.intermediate_scale;
    }
  }

  // Sets the weight scales of `parts` matrices [rows, depth] per expert.
  void fill_weight_scales(ScaleParams& scales, const float* data, int64_t rows, int64_t depth,
                          int64_t parts) const {
    scales.weights = data;
    scales.blocks = divide_up(depth, kScaleGroup);
    scales.half_stride = block() ? int64_t{divide_up(rows, kScaleGroup)} * scales.blocks : rows;
    scales.expert_stride = parts * scales.half_stride;
  }

  void run_up(const DeviceExpertsCall& call, const Intermediate& rows, CUstream_st* stream) const {
    ByteParams params = with_groups(up_, call.groups);
    params.input = call.input.data;
    params.input_stride = call.input.row_stride;
    params.input_weights = call.input_weights;
    params.output = dynamic_rows() ? static_cast<void*>(rows.values) : rows.codes;
    params.output_stride = rows.stride;
    if (up_makes_codes()) params.row_codes = rows.codes;
    params.scales.tokens = call.input.scales;
    params.scales.row_stride = call.input.scale_stride;
    params.scales.output = rows.scales;
    params.scales.output_stride = call.groups.max_rows;
    set_counters(params, call.workspace);
    params.items_before = items_before();
    params.groups_are_done = true;
    enqueue(names_.up, kernels_.up, params, call.groups.max_tiles, problem_.gpu().multiprocessors,
            stream);
  }

  void quantize(const DeviceExpertsCall& call, const Intermediate& rows,
                CUstream_st* stream) const {
    quantize_rows_cuda({.rows = rows.values,
                        .dtype = DType::kF32,
                        .num_rows = call.groups.max_rows,
                        .live_rows = call.groups.expert_begin + problem_.num_local_experts,
                        .columns = problem_.intermediate_size,
                        .row_stride = rows.stride,
                        .activations = ActivationScale::kToken,
                        .power_of_two = problem_.quant.power_of_two_scales,
                        .code_dtype = problem_.weight_dtype,
                        .codes = rows.codes,
                        .code_stride = rows.stride,
                        .scales = rows.scales,
                        .scale_stride = 1},
                       stream);
  }

  void run_down(const DeviceExpertsCall& call, const Intermediate& rows,
                CUstream_st* stream) const {
    ByteParams params = with_groups(down_, call.groups);
    params.rows = map_rows(
        problem_, {rows.codes, rows.stride, call.groups.max_rows, problem_.intermediate_size},
        kernels_.down.token_box);
    params.scales.tokens = rows.scales;
    params.scales.block_stride = call.groups.max_rows;
    set_counters(params, call.workspace);
    params.items_before = items_before();
    params.finishes_rows = call.finish.apply;
    params.finish_weights = call.finish.weights;
    params.finish_scale = call.finish.scale;
    set_output(params, call);
    enqueue(names_.down, kernels_.down, params, call.groups.max_tiles,
            problem_.gpu().multiprocessors, stream);
  }

  KernelNames names_;
  ExpertsProblem problem_;
  DeviceTile tile_;
  ByteKernelPair kernels_;
  ByteParams up_;
  ByteParams down_;
};

}  // namespace conclave::inline v0::experts::stream
