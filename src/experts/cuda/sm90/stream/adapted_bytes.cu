#include "experts/cuda/adapters/terms.h"
#include "experts/cuda/common/quantize_rows.h"
#include "experts/cuda/sm90/stream/adapted_bytes.cuh"
#include "experts/cuda/sm90/stream/adapted_bytes.h"
#include "experts/cuda/sm90/stream/launch.h"
#include "experts/cuda/sm90/stream/stream_bytes.h"

#include "conclave/error.h"

#include <string_view>

namespace conclave::inline v0::experts {
namespace {

using stream::AdaptedParams;
using stream::Shape;
using AdaptedPair = stream::KernelPairOf<AdaptedParams>;

template <class Element, Shape kShape, Product kProduct>
stream::KernelOf<AdaptedParams> kernel() {
  using Config = stream::Config<Element, kShape>;
  return stream::describe_kernel<Config>(stream::adapted_bytes_product<Config, kProduct>);
}

// kWide serves the down product, and the up product with a gate; kNarrow serves that without one.
template <class Element, Shape kWide, Shape kNarrow>
AdaptedPair adapted_bytes_pair(bool gated) {
  return {.up = gated ? kernel<Element, kWide, Product::kUp>()
                      : kernel<Element, kNarrow, Product::kUp>(),
          .down = kernel<Element, kWide, Product::kDown>()};
}

// The kernels of the tiles of adapted_bytes.cc.
template <class Element, Scaling kScale>
AdaptedPair find_adapted_bytes(const DeviceTile& tile, bool gated) {
  switch (tile.tokens) {
    case 16:
      return adapted_bytes_pair<Element, Shape{16, 256, 1, 6, kScale, 2},
                                Shape{16, 128, 2, 5, kScale}>(gated);
    case 32:
      return adapted_bytes_pair<Element, Shape{32, 256, 1, 6, kScale, 2},
                                Shape{32, 128, 2, 5, kScale}>(gated);
    default:
      throw Error(ErrorCode::kUnsupported,
                  {.what = "kernels of bytes have no such tile for rows with adapters",
                   .found = to_string(tile)});
  }
}

class AdaptedBytes final : public AdapterKernel {
 public:
  AdaptedBytes(const AdaptedPair& kernels, const ExpertsProblem& problem,
               const DeviceExperts& weights, const DeviceTile& tile)
      : problem_(problem),
        tile_(tile),
        kernels_(kernels),
        intermediate_step_(weights.intermediate_scale) {
    stream::allow_shared_bytes(kernels_);
    up_ = stream::up_params(problem, weights, kernels_.up);
    down_ = stream::down_params(problem, weights, kernels_.down);
    // The kernel of terms has waited for the grouping.
    up_.groups_are_done = true;
    fill_scales(up_.scales, weights.gate_up.scale, problem.intermediate_size, problem.hidden_size,
                problem.activation.gated ? 2 : 1);
    fill_scales(down_.scales, weights.down.scale, problem.hidden_size, problem.intermediate_size,
                1);
    if (problem.quant.activations != ActivationScale::kTensorStatic) return;
    up_.scales.constant = weights.input_scale;
    down_.scales.constant = weights.intermediate_scale;
  }

  int32_t tile_tokens() const override { return tile_.tokens; }

  void run(const AdaptedCall& call, CUstream_st* stream) const override {
    const GroupedRows& groups = call.experts.groups;
    if (groups.max_rows == 0) return;
    const AdaptedBytesWorkspace layout = adapted_bytes_workspace(problem_, groups.max_rows);
    auto* const base = static_cast<std::byte*>(call.experts.workspace);
    const Intermediate rows{.stride = layout.stride,
                            .codes = reinterpret_cast<uint8_t*>(base + layout.codes),
                            .scales = reinterpret_cast<float*>(base + layout.scales),
                            .values = reinterpret_cast<float*>(base + layout.values)};
    make_adapter_terms(call, AdaptedProduct::kGateUp, call.source, stream);
    run_up(call, rows, stream);
    make_adapter_terms(call, AdaptedProduct::kDown,
                       {.rows = rows.values,
                        .dtype = DType::kF32,
                        .stride = rows.stride,
                        .columns = problem_.intermediate_size,
                        .is_sorted = true},
                       stream);
    quantize(groups, rows, stream);
    run_down(call, rows, stream);
  }

 private:
  struct Intermediate {
    int64_t stride = 0;
    uint8_t* codes = nullptr;
    float* scales = nullptr;
    float* values = nullptr;
  };

  bool in_groups() const { return problem_.quant.activations == ActivationScale::kGroup; }

  // The weight scales of `parts` matrices [rows, depth] per expert.
  void fill_scales(stream::ScaleParams& scales, const float* data, int64_t rows, int64_t depth,
                   int64_t parts) const {
    const bool in_blocks = problem_.quant.weights == WeightScale::kBlock;
    scales.weights = data;
    scales.blocks = stream::divide_up(depth, kScaleGroup);
    scales.half_stride =
        in_blocks ? int64_t{stream::divide_up(rows, kScaleGroup)} * scales.blocks : rows;
    scales.expert_stride = parts * scales.half_stride;
    scales.power_of_two = problem_.quant.power_of_two_scales;
  }

  void run_up(const AdaptedCall& call, const Intermediate& rows, CUstream_st* stream) const {
    const DeviceExpertsCall& experts = call.experts;
    AdaptedParams params = stream::with_terms(with_groups(up_, experts.groups), call.up);
    params.input = experts.input.data;
    params.input_stride = experts.input.row_stride;
    params.input_weights = experts.input_weights;
    params.output = rows.values;
    params.output_stride = rows.stride;
    params.scales.tokens = experts.input.scales;
    params.scales.row_stride = experts.input.scale_stride;
    stream::set_counters(params, experts.workspace);
    stream::enqueue("experts.stream_bytes_sm90.adapted_up", kernels_.up, params,
                    experts.groups.max_tiles, problem_.gpu().multiprocessors, stream);
  }

  void quantize(const GroupedRows& groups, const Intermediate& rows, CUstream_st* stream) const {
    quantize_rows_cuda({.rows = rows.values,
                        .dtype = DType::kF32,
                        .num_rows = groups.max_rows,
                        .live_rows = groups.expert_begin + problem_.num_local_experts,
                        .columns = problem_.intermediate_size,
                        .row_stride = rows.stride,
                        .activations = problem_.quant.activations,
                        .power_of_two = problem_.quant.power_of_two_scales,
                        .static_scale = intermediate_step_,
                        .code_dtype = problem_.weight_dtype,
                        .codes = rows.codes,
                        .code_stride = rows.stride,
                        .scales = rows.scales,
                        .scale_stride = 1,
                        .group_stride = in_groups() ? groups.max_rows : 1},
                       stream);
  }

  void run_down(const AdaptedCall& call, const Intermediate& rows, CUstream_st* stream) const {
    const DeviceExpertsCall& experts = call.experts;
    AdaptedParams params = stream::with_terms(with_groups(down_, experts.groups), call.down);
    params.rows = map_rows(
        problem_, {rows.codes, rows.stride, experts.groups.max_rows, problem_.intermediate_size},
        kernels_.down.token_box);
    params.scales.tokens = rows.scales;
    params.scales.block_stride = experts.groups.max_rows;
    stream::set_counters(params, experts.workspace);
    stream::set_output(params, experts);
    stream::enqueue("experts.stream_bytes_sm90.adapted_down", kernels_.down, params,
                    experts.groups.max_tiles, problem_.gpu().multiprocessors, stream);
  }

  ExpertsProblem problem_;
  DeviceTile tile_;
  AdaptedPair kernels_;
  const float* intermediate_step_ = nullptr;
  AdaptedParams up_;
  AdaptedParams down_;
};

}  // namespace

std::unique_ptr<AdapterKernel> make_adapted_fp8(const ExpertsProblem& problem,
                                                const DeviceExperts& weights,
                                                const DeviceTile& tile) {
  const bool gated = problem.activation.gated;
  const bool in_blocks = problem.quant.weights == WeightScale::kBlock;
  return std::make_unique<AdaptedBytes>(
      in_blocks ? find_adapted_bytes<__nv_fp8_e4m3, Scaling::kBlock>(tile, gated)
                : find_adapted_bytes<__nv_fp8_e4m3, Scaling::kRow>(tile, gated),
      problem, weights, tile);
}

std::unique_ptr<AdapterKernel> make_adapted_int8(const ExpertsProblem& problem,
                                                 const DeviceExperts& weights,
                                                 const DeviceTile& tile) {
  return std::make_unique<AdaptedBytes>(
      find_adapted_bytes<int8_t, Scaling::kRow>(tile, problem.activation.gated), problem, weights,
      tile);
}

}  // namespace conclave::inline v0::experts
