#include "core/float_convert.h"
#include "cuda/launch.h"
#include "experts/cuda/sm90/stream/launch.h"
#include "experts/cuda/sm90/stream/stream.cuh"
#include "experts/cuda/sm90/stream/stream_codes.h"
#include "experts/cuda/sm90/tensor_maps.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <array>
#include <cstddef>

namespace conclave::inline v0::experts {
namespace {

using stream::CodedParams;
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

template <Shape kShape, int kCodeBits, int kStepsOfSum = 2>
KernelPair kernel_pair() {
  using Config = stream::Config<__nv_bfloat16, kShape, kCodeBits, kStepsOfSum>;
  return {.up = stream::describe_kernel<Config>(stream_codes_product<Config, Product::kUp>),
          .down = stream::describe_kernel<Config>(stream_codes_product<Config, Product::kDown>)};
}

// The kernels of the tiles of stream_codes.cc.
KernelPair find_kernels(const ExpertsProblem& problem, const DeviceTile& tile) {
  const bool four = bit_size(problem.weight_dtype) == 4;
  const bool fine = columns_of_group(problem) == 16;
  switch (tile.tokens) {
    case 16:
      if (fine) return kernel_pair<Shape{16, 128, 4, 5}, 4, 1>();
      return four ? kernel_pair<Shape{16, 128, 4, 5}, 4>() : kernel_pair<Shape{16, 128, 2, 7}, 8>();
    case 32:
      return four ? kernel_pair<Shape{32, 128, 4, 4}, 4>() : kernel_pair<Shape{32, 128, 2, 6}, 8>();
    case 64:
      if (fine) return kernel_pair<Shape{64, 128, 4, 3}, 4, 1>();
      return four ? kernel_pair<Shape{64, 128, 4, 3}, 4>() : kernel_pair<Shape{64, 128, 2, 5}, 8>();
    case 96:
      return four ? kernel_pair<Shape{96, 128, 4, 2}, 4>() : kernel_pair<Shape{96, 128, 2, 4}, 8>();
    default:
      throw Error(ErrorCode::kUnsupported,
                  {.what = "cuda.stream_codes_sm90 has no such tile", .found = to_string(tile)});
  }
}

// Values of all codes of a format, which bf16 holds.
void fill_values(DType dtype, uint16_t (&values)[256]) {
  const quant::WeightFormat& format = quant::format_of(dtype);
  const int codes = 1 << bit_size(dtype);
  for (int code = 0; code < codes; ++code) {
    const auto row = static_cast<std::byte>(code);
    float value = 0;
    format.decode(&row, 0, 1, &value);
    values[code] = float_to_bf16(value);
  }
}

class StreamCodesKernel final : public DeviceExpertsKernel {
 public:
  StreamCodesKernel(const ExpertsProblem& problem, const DeviceExperts& weights,
                    const DeviceTile& tile)
      : problem_(problem), tile_(tile), kernels_(find_kernels(problem, tile)) {
    stream::allow_shared_bytes(kernels_);
    up_ = stream::up_params(problem, weights, kernels_.up);
    up_.output_stride = intermediate_stride();
    down_ = stream::down_params(problem, weights, kernels_.down);
    set_codes(up_, weights.gate_up.factors, kernels_.up.weight_rows);
    set_codes(down_, weights.down.factors, kernels_.down.weight_rows);
  }

  int32_t tile_tokens() const override { return tile_.tokens; }

  std::string describe() const override { return "cuda.stream_codes_sm90 " + to_string(tile_); }

  void run(const DeviceExpertsCall& call, CUstream_st* stream) const override {
    if (call.groups.max_rows == 0) return;
    run_up(call, stream);
    run_down(call, stream);
  }

 private:
  // TMA needs rows at multiples of 16 bytes.
  int64_t intermediate_stride() const { return round_up(problem_.intermediate_size, 8); }

  void set_codes(CodedParams& params, const FactorPlanes& planes, int32_t rows) const {
    const int64_t stage = columns_of_stage(problem_);
    // One group of all columns begins with each stage anew.
    const int64_t group = columns_of_group(problem_);
    const bool is_part = group != 0 && group < stage;
    params.group = group == 0 ? params.depth_stages * static_cast<int32_t>(stage)
                              : static_cast<int32_t>(group);
    params.groups_of_stage = is_part ? static_cast<int32_t>(stage / group) : 1;
    params.steps_shift = 0;
    while (16 << params.steps_shift < (is_part ? group : stage)) ++params.steps_shift;
    params.features_of_tile = rows / static_cast<int32_t>(planes.parts);
    params.scales =
        map_factors(problem_, planes, {planes.scales, DType::kF32}, rows, params.groups_of_stage);
    params.has_zeros = planes.zeros != nullptr;
    if (params.has_zeros) {
      params.zeros =
          map_factors(problem_, planes, {planes.zeros, DType::kBF16}, rows, params.groups_of_stage);
    }
    fill_values(problem_.weight_dtype, params.values);
  }

  void run_up(const DeviceExpertsCall& call, CUstream_st* stream) const {
    CodedParams params = with_groups(up_, call.groups);
    params.input = call.input.data;
    params.input_stride = call.input.row_stride;
    params.input_weights = call.input_weights;
    params.output = call.workspace;
    stream::enqueue("experts.stream_codes_sm90.up", kernels_.up, params, call.groups.max_tiles,
                    problem_.gpu().multiprocessors, stream);
  }

  void run_down(const DeviceExpertsCall& call, CUstream_st* stream) const {
    CodedParams params = with_groups(down_, call.groups);
    params.rows = map_rows(problem_,
                           {.data = call.workspace,
                            .stride = intermediate_stride(),
                            .rows = call.groups.max_rows,
                            .columns = problem_.intermediate_size,
                            .dtype = DType::kBF16},
                           kernels_.down.token_box);
    set_output(params, call);
    stream::enqueue("experts.stream_codes_sm90.down", kernels_.down, params, call.groups.max_tiles,
                    problem_.gpu().multiprocessors, stream);
  }

  ExpertsProblem problem_;
  DeviceTile tile_;
  KernelPair kernels_;
  CodedParams up_;
  CodedParams down_;
};

}  // namespace

std::unique_ptr<DeviceExpertsKernel> make_stream_codes(const ExpertsProblem& problem,
                                                       const DeviceExperts& weights,
                                                       const DeviceTile& tile) {
  return std::make_unique<StreamCodesKernel>(problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
