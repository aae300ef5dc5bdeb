#include "cuda/launch.h"
#include "experts/cuda/common/round_rows.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/code_values.h"
#include "experts/cuda/sm90/stream/launch.h"
#include "experts/cuda/sm90/stream/stream.cuh"
#include "experts/cuda/sm90/stream/stream_codes.h"
#include "experts/cuda/sm90/tensor_maps.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <cstddef>

namespace conclave::inline v0::experts {
namespace {

using stream::CodedParams;
using stream::Codes;
using stream::Shape;
using KernelPair = stream::KernelPairOf<CodedParams>;

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_codes_product(const __grid_constant__ CodedParams params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<stream::SharedStorage<Config>*>(bytes);
  stream::fill_values(params, shared);
  stream::run_block<Config, kProduct, stream::Consumer<Config>>(params, shared);
}

template <Shape kShape, Codes kCodes>
KernelPair kernel_pair() {
  using Config = stream::Config<__nv_bfloat16, kShape, kCodes>;
  return {.up = stream::describe_kernel<Config>(stream_codes_product<Config, Product::kUp>),
          .down = stream::describe_kernel<Config>(stream_codes_product<Config, Product::kDown>)};
}

[[noreturn]] void refuse_tile(const DeviceTile& tile) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "cuda.stream_codes_sm90 has no such tile", .found = to_string(tile)});
}

template <int kTokens, Codes kCodes, int kWeightRows = 128>
KernelPair pair_of_tile() {
  constexpr CodeKernelForm kForm{
      .bits = kCodes.bits, .fine = kCodes.steps_of_sum == 1, .offsets = kCodes.offsets};
  constexpr Shape kShape{.max_tokens = kTokens,
                         .weight_rows = kWeightRows,
                         .atoms = kCodes.bits == 4 ? 4 : 2,
                         .stages = code_stages(kForm, kTokens, kWeightRows),
                         .consumers = kWeightRows / 64};
  return kernel_pair<kShape, kCodes>();
}

// The kernels of the tiles of stream_codes.cc, in the forms that have all of them.
template <Codes kCodes>
KernelPair find_in_all(const DeviceTile& tile) {
  const bool wide = tile.features == 256;
  switch (tile.tokens) {
    case 16:
      return wide ? pair_of_tile<16, kCodes, 256>() : pair_of_tile<16, kCodes>();
    case 32:
      return wide ? pair_of_tile<32, kCodes, 256>() : pair_of_tile<32, kCodes>();
    case 64:
      return pair_of_tile<64, kCodes>();
    case 96:
      return pair_of_tile<96, kCodes>();
    default:
      refuse_tile(tile);
  }
}

// The same in the other forms.
template <Codes kCodes>
KernelPair find_in_few(const DeviceTile& tile) {
  if (tile.tokens == 16) return pair_of_tile<16, kCodes>();
  if (tile.tokens == 64) return pair_of_tile<64, kCodes>();
  refuse_tile(tile);
}

template <int kBits>
KernelPair find_kernels(const CodeKernelForm& form, const DeviceTile& tile) {
  if (form.fine) {
    return form.offsets ? find_in_few<Codes{kBits, 1, true}>(tile)
                        : find_in_few<Codes{kBits, 1}>(tile);
  }
  return form.offsets ? find_in_few<Codes{kBits, 2, true}>(tile)
                      : find_in_all<Codes{kBits, 2}>(tile);
}

KernelPair find_kernels(const ExpertsProblem& problem, const DeviceTile& tile) {
  const CodeKernelForm form = code_kernel_form(problem);
  if (form.two_terms) {
    return form.fine ? find_in_few<Codes{4, 1, false, 2}>(tile)
                     : find_in_few<Codes{4, 2, false, 2}>(tile);
  }
  return form.bits == 4 ? find_kernels<4>(form, tile) : find_kernels<8>(form, tile);
}

class StreamCodesKernel final : public DeviceExpertsKernel {
 public:
  StreamCodesKernel(const ExpertsProblem& problem, const DeviceExperts& weights,
                    const DeviceTile& tile)
      : problem_(problem), tile_(tile), kernels_(find_kernels(problem, tile)) {
    stream::allow_shared_bytes(kernels_);
    up_ = stream::up_params(problem, weights, kernels_.up);
    down_ = stream::down_params(problem, weights, kernels_.down);
    set_codes(up_, weights.gate_up.factors, kernels_.up.weight_rows);
    set_codes(down_, weights.down.factors, kernels_.down.weight_rows);
    up_.column_factors = weights.down.column_factors;
    if (row_terms(problem) == 2) {
      up_.terms_shift = 1;
      up_.depth_stages *= 2;
      up_.depth = static_cast<int32_t>(up_.depth_stages * columns_of_stage(problem));
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

  int32_t tile_tokens() const override { return tile_.tokens; }

  std::string describe() const override { return "cuda.stream_codes_sm90 " + to_string(tile_); }

  void run(const DeviceExpertsCall& call, CUstream_st* stream) const override {
    if (call.groups.max_rows == 0) return;
    const Intermediate rows = place_intermediate(call);
    run_up(call, rows, stream);
    if (rounds_rows()) round_rows(call, rows, stream);
    run_down(call, rows, stream);
  }

 private:
  struct Intermediate {
    int64_t stride = 0;
    void* rows = nullptr;  // bf16
    float* floats = nullptr;
    float* factors = nullptr;
  };

  bool rounds_rows() const { return problem_.quant.activations != ActivationScale::kNone; }
  bool has_factors_by_row() const {
    return quant::row_factor(problem_.quant) == quant::RowFactor::kOfRow;
  }

  Intermediate place_intermediate(const DeviceExpertsCall& call) const {
    const StreamCodesWorkspace layout = stream_codes_workspace(problem_, call.groups.max_rows);
    auto* const base = static_cast<std::byte*>(call.workspace);
    return {.stride = layout.stride,
            .rows = base + layout.rows,
            .floats = reinterpret_cast<float*>(base + layout.floats),
            .factors = reinterpret_cast<float*>(base + layout.factors)};
  }

  void set_codes(CodedParams& params, const FactorPlanes& planes, int32_t rows) const {
    if (planes.scales == nullptr) {
      throw Error(ErrorCode::kState, {.what = "cuda.stream_codes_sm90 needs FactorPlanes"});
    }
    const int64_t stage = columns_of_stage(problem_);
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
    params.scales = map(planes.scales, DType::kF32);
    params.has_zeros = planes.zeros != nullptr;
    if (params.has_zeros) params.shifts = map(planes.zeros, DType::kBF16);
    if (planes.offsets != nullptr) params.shifts = map(planes.offsets, DType::kF32);
    fill_bf16_values(problem_.weight_dtype, params.values);
  }

  void run_up(const DeviceExpertsCall& call, const Intermediate& rows, CUstream_st* stream) const {
    CodedParams params = with_groups(up_, call.groups);
    params.input = call.input.data;
    params.input_stride = call.input.row_stride;
    params.input_weights = call.input_weights;
    params.output = rounds_rows() ? rows.floats : rows.rows;
    params.output_stride = rows.stride;
    if (rounds_rows() && has_factors_by_row()) params.row_factors = call.input.scales;
    stream::enqueue("experts.stream_codes_sm90.up", kernels_.up, params, call.groups.max_tiles,
                    problem_.gpu().multiprocessors, stream);
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

  void run_down(const DeviceExpertsCall& call, const Intermediate& rows,
                CUstream_st* stream) const {
    CodedParams params = with_groups(down_, call.groups);
    params.rows = map_rows(problem_,
                           {.data = rows.rows,
                            .stride = rows.stride,
                            .rows = call.groups.max_rows,
                            .columns = problem_.intermediate_size,
                            .dtype = DType::kBF16},
                           kernels_.down.token_box);
    if (rounds_rows() && has_factors_by_row()) params.row_factors = rows.factors;
    set_output(params, call);
    stream::enqueue("experts.stream_codes_sm90.down", kernels_.down, params, call.groups.max_tiles,
                    problem_.gpu().multiprocessors, stream);
  }

  ExpertsProblem problem_;
  DeviceTile tile_;
  KernelPair kernels_;
  CodedParams up_;
  CodedParams down_;
  RowRounding rounding_ = {};
  const float* intermediate_step_ = nullptr;
};

}  // namespace

std::unique_ptr<DeviceExpertsKernel> make_stream_codes(const ExpertsProblem& problem,
                                                       const DeviceExperts& weights,
                                                       const DeviceTile& tile) {
  return std::make_unique<StreamCodesKernel>(problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
