// The host's part of tile_bytes.cuh, for codes of one type.
#pragma once

#include "cuda/launch.h"
#include "experts/cuda/common/quantize_rows.h"
#include "experts/cuda/sm90/kernel_names.h"
#include "experts/cuda/sm90/tensor_maps.h"
#include "experts/cuda/sm90/tile_bytes/tile_bytes.cuh"
#include "experts/cuda/sm90/tile_bytes/tile_bytes.h"

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0::experts::tile_bytes {

inline constexpr int32_t kClusterTokens = 256;
inline constexpr int32_t kBoxRows = 128;  // weight rows per box
inline constexpr int32_t kBoxTokens = 64;
inline constexpr int32_t kCluster = 2;
inline constexpr int64_t kDepth = 128;
inline constexpr int64_t kStages = 4;

struct Kernel {
  void (*function)(CUtensorMap, CUtensorMap, Params) = nullptr;
  size_t shared_bytes = 0;
  int32_t threads = 0;
  int32_t features = 0;  // per tile
};

template <class Config>
Kernel describe_kernel() {
  const Kernel result{.function = &tile_bytes_product<Config>,
                      .shared_bytes = sizeof(SharedStorage<Config>),
                      .threads = Config::kThreads,
                      .features = Config::kFeatures};
  cuda::allow_shared_bytes(reinterpret_cast<const void*>(result.function), result.shared_bytes);
  return result;
}

// True if a product over `depth` columns takes a whole number of rounds of the ring of stages.
inline bool whole_rounds(int64_t depth) { return (depth + kDepth - 1) / kDepth % kStages == 0; }

struct Kernels {
  Kernel up;
  Kernel down;
  Kernel adding;  // replaces down if rows are added
};

template <class Element, Scaling kScaling, WeightForm kForm = WeightForm::kBytes>
struct KernelFinder {
  template <Product kProduct>
  static Kernel find(int64_t depth) {
    // With room for a loop over constant stages, three of them, math threads would spill.
    if constexpr (kForm == WeightForm::kLanes) {
      return describe_kernel<Config<Element, kProduct, kScaling, false, kForm>>();
    } else {
      return whole_rounds(depth) ? describe_kernel<Config<Element, kProduct, kScaling, true>>()
                                 : describe_kernel<Config<Element, kProduct, kScaling, false>>();
    }
  }
  static Kernels find_all(const ExpertsProblem& problem) {
    return {.up = problem.activation.gated ? find<Product::kUpGated>(problem.hidden_size)
                                           : find<Product::kUpPlain>(problem.hidden_size),
            .down = find<Product::kDown>(problem.intermediate_size),
            .adding = find<Product::kDownSums>(problem.intermediate_size)};
  }
};

// Codes of rows, and the form of the weights beside them.
struct Operands {
  DType rows = DType::kF8E4M3;
  WeightForm weights = WeightForm::kBytes;
};

class TileBytes final : public DeviceExpertsKernel {
 public:
  TileBytes(const KernelNames& names, const Kernels& kernels, const Operands& operands,
            const ExpertsProblem& problem, const DeviceExperts& weights, const DeviceTile& tile)
      : names_(names),
        problem_(problem),
        weights_(weights),
        tile_(tile),
        kernels_(kernels),
        operands_(operands) {
    const uint32_t box_bytes = has_lanes() ? kHalfBoxBytes : kBoxBytes;
    up_map_ = problem.activation.gated
                  ? map_gated_weights(problem, weights, kBoxRows, box_bytes)
                  : map_weights(problem,
                                {weights.gate_up.data, weights.gate_up.stride,
                                 problem.intermediate_size, problem.hidden_size},
                                kBoxRows, box_bytes);
    down_map_ = map_weights(
        problem,
        {weights.down.data, weights.down.stride, problem.hidden_size, problem.intermediate_size},
        kBoxRows, box_bytes);
  }

  int32_t tile_tokens() const override { return kClusterTokens; }
  bool finishes_rows() const override { return true; }
  std::string describe() const override { return std::string(names_.row) + " " + to_string(tile_); }

  void run(const DeviceExpertsCall& call, CUstream_st* stream) const override {
    if (call.groups.max_rows == 0) return;
    const TileBytesWorkspace layout = tile_bytes_workspace(problem_, call.groups.max_rows);
    auto* workspace = static_cast<std::byte*>(call.workspace);
    auto* codes = reinterpret_cast<uint8_t*>(workspace + layout.codes);
    auto* scales = reinterpret_cast<float*>(workspace + layout.scales);
    auto* values = reinterpret_cast<float*>(workspace + layout.values);
    const bool quantize_after = problem_.quant.activations == ActivationScale::kToken;

    Params up = up_params(call);
    up.output = quantize_after ? static_cast<void*>(values) : codes;
    up.output_stride = layout.code_stride;
    up.output_scales = scales;
    up.output_scale_stride = layout.scale_stride;
    up.tickets = workspace + layout.tickets;
    up.hands_over_tiles = call.finish.apply && !quantize_after;
    up.ended = reinterpret_cast<uint32_t*>(workspace + layout.ended);
    enqueue(names_.up, kernels_.up,
            map_rows(problem_,
                     {call.input.data, call.input.row_stride, call.groups.max_rows,
                      problem_.hidden_size, operands_.rows},
                     kBoxTokens),
            up_map_, up, call.groups, stream);
    if (quantize_after) {
      quantize_rows_cuda({.rows = values,
                          .dtype = DType::kF32,
                          .num_rows = call.groups.max_rows,
                          .live_rows = call.groups.expert_begin + problem_.num_local_experts,
                          .columns = problem_.intermediate_size,
                          .row_stride = layout.code_stride,
                          .activations = ActivationScale::kToken,
                          .power_of_two = problem_.quant.power_of_two_scales,
                          .code_dtype = operands_.rows,
                          .codes = codes,
                          .code_stride = layout.code_stride,
                          .in_lanes = has_lanes(),
                          .scales = scales,
                          .scale_stride = 1},
                         stream);
    }
    Params down = down_params(call);
    down.row_scales = scales;
    down.group_scale_stride = layout.scale_stride;
    down.tickets = workspace + layout.down_tickets;
    down.hands_over_tiles = up.hands_over_tiles;
    down.ended = up.ended;
    down.up_feature_tiles = up.feature_tiles;
    enqueue(names_.down, call.sums.rows != nullptr ? kernels_.adding : kernels_.down,
            map_rows(problem_,
                     {codes, layout.code_stride, call.groups.max_rows, problem_.intermediate_size,
                      operands_.rows},
                     kBoxTokens),
            down_map_, down, call.groups, stream);
  }

 private:
  bool has_lanes() const { return operands_.weights == WeightForm::kLanes; }
  bool block() const { return problem_.quant.weights == WeightScale::kBlock; }
  bool is_static() const { return problem_.quant.activations == ActivationScale::kTensorStatic; }

  Params common(const DeviceExpertsCall& call, const Kernel& kernel, int64_t depth,
                int64_t features) const {
    Params p;
    p.depth = static_cast<int32_t>(depth);
    p.features = static_cast<int32_t>(features);
    p.feature_tiles = static_cast<int32_t>((features + kernel.features - 1) / kernel.features);
    p.group_tiles = tile_bytes_group(p.feature_tiles, depth, problem_.gpu().l2_bytes);
    p.scale_blocks = static_cast<int32_t>((depth + kDepth - 1) / kDepth);
    p.row_slot = call.groups.row_slot;
    p.tiles = call.groups.tiles;
    p.num_tiles = call.groups.num_tiles;
    p.activation = activation::device_activation(problem_.activation);
    p.power_of_two = problem_.quant.power_of_two_scales;
    return p;
  }

  void set_lanes(Params& p, const FactorPlanes& factors) const {
    if (!has_lanes()) return;
    p.scale_bytes = static_cast<const uint8_t*>(factors.bytes);
    p.sum_factors = factors.sum_factors;
    p.byte_stride = factors.byte_stride;
    p.scale_groups = static_cast<int32_t>(factors.groups);
  }

  Params up_params(const DeviceExpertsCall& call) const {
    Params p = common(call, kernels_.up, problem_.hidden_size, problem_.intermediate_size);
    p.row_scales = call.input.scales;
    p.group_scale_stride = call.input.group_stride;
    if (is_static()) {
      p.constant_scale = weights_.input_scale;
      p.output_constant_scale = weights_.intermediate_scale;
    }
    set_lanes(p, weights_.gate_up.factors);
    p.weight_scales = weights_.gate_up.scale;
    const int64_t row_blocks = (problem_.intermediate_size + kDepth - 1) / kDepth;
    p.half_scale_stride = block() ? row_blocks * p.scale_blocks : problem_.intermediate_size;
    p.expert_scale_stride = p.half_scale_stride * (problem_.activation.gated ? 2 : 1);
    p.bias = weights_.gate_up.bias;
    p.input_weights = call.input_weights;
    return p;
  }

  Params down_params(const DeviceExpertsCall& call) const {
    Params p = common(call, kernels_.down, problem_.intermediate_size, problem_.hidden_size);
    if (is_static()) p.constant_scale = weights_.intermediate_scale;
    set_lanes(p, weights_.down.factors);
    p.weight_scales = weights_.down.scale;
    const int64_t row_blocks = (problem_.hidden_size + kDepth - 1) / kDepth;
    p.expert_scale_stride = block() ? row_blocks * p.scale_blocks : problem_.hidden_size;
    p.bias = weights_.down.bias;
    p.output = call.output;
    p.output_stride = call.output_stride;
    p.finishes_rows = call.finish.apply;
    p.finish_weights = call.finish.weights;
    p.finish_scale = call.finish.scale;
    if (call.sums.rows != nullptr) {
      p.top_k = call.groups.top_k;
      p.finish_weights = call.sums.weights;
      p.output = call.sums.rows;
      p.output_stride = call.sums.stride;
    }
    return p;
  }

  void enqueue(std::string_view name, const Kernel& kernel, const CUtensorMap& token_map,
               const CUtensorMap& weight_map, const Params& params, const GroupedRows& groups,
               CUstream_st* stream) const {
    const int64_t items = groups.max_tiles * params.feature_tiles;
    const cuda::LaunchShape shape{
        .blocks = std::min<int64_t>(problem_.gpu().multiprocessors / kCluster, items) * kCluster,
        .threads = kernel.threads,
        .shared_bytes = kernel.shared_bytes,
        .cluster = kCluster,
        .stream = stream};
    cuda::launch(name, kernel.function, shape, token_map, weight_map, params);
  }

  KernelNames names_;
  ExpertsProblem problem_;
  DeviceExperts weights_;
  DeviceTile tile_;
  Kernels kernels_;
  Operands operands_;
  CUtensorMap up_map_;
  CUtensorMap down_map_;
};

}  // namespace conclave::inline v0::experts::tile_bytes
