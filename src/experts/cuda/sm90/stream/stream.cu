#include "cuda/launch.h"
#include "experts/cuda/sm90/stream/launch.h"
#include "experts/cuda/sm90/stream/stream.cuh"
#include "experts/cuda/sm90/stream/stream.h"
#include "experts/cuda/sm90/tensor_maps.h"

#include "conclave/error.h"

namespace conclave::inline v0::experts {
namespace {

using stream::KernelPair;
using stream::Params;
using stream::Shape;

template <class Config>
KernelPair kernel_pair() {
  return {.up = stream::describe_kernel<Config>(stream::stream_product<Config, Product::kUp>),
          .down = stream::describe_kernel<Config>(stream::stream_product<Config, Product::kDown>)};
}

// The kernels of the tiles of stream.cc.
template <class Element>
KernelPair find_kernels(const DeviceTile& tile) {
  constexpr auto kNone = Scaling::kNone;
  switch (tile.tokens) {
    case 16:
      return kernel_pair<stream::Config<Element, Shape{16, 128, 2, 6}>>();
    case 32:
      return kernel_pair<stream::Config<Element, Shape{32, 128, 2, 5}>>();
    case 64:
      return kernel_pair<stream::Config<Element, Shape{64, 128, 2, 4}>>();
    case 96:
      return kernel_pair<stream::Config<Element, Shape{96, 256, 1, 5, kNone, 2}>>();
    case 160:
      return kernel_pair<stream::Config<Element, Shape{160, 256, 1, 4, kNone, 1, true}>>();
    default:
      throw Error(ErrorCode::kUnsupported,
                  {.what = "cuda.stream_sm90 has no such tile", .found = to_string(tile)});
  }
}

class StreamKernel final : public DeviceExpertsKernel {
 public:
  StreamKernel(const ExpertsProblem& problem, const DeviceExperts& weights, const DeviceTile& tile)
      : problem_(problem), tile_(tile) {
    kernels_ = problem.weight_dtype == DType::kF16 ? find_kernels<__half>(tile)
                                                   : find_kernels<__nv_bfloat16>(tile);
    stream::allow_shared_bytes(kernels_);
    up_ = stream::up_params(problem, weights, kernels_.up);
    up_.output_stride = intermediate_stride();
    down_ = stream::down_params(problem, weights, kernels_.down);
  }

  int32_t tile_tokens() const override { return tile_.tokens; }

  std::string describe() const override { return "cuda.stream_sm90 " + to_string(tile_); }

  void run(const DeviceExpertsCall& call, CUstream_st* stream) const override {
    if (call.groups.max_rows == 0) return;
    run_up(call, stream);
    run_down(call, stream);
  }

 private:
  // TMA needs rows at multiples of 16 bytes.
  int64_t intermediate_stride() const { return stream_sm90_stride(problem_); }

  void run_up(const DeviceExpertsCall& call, CUstream_st* stream) const {
    Params params = with_groups(up_, call.groups);
    params.input = call.input.data;
    params.input_stride = call.input.row_stride;
    if (tile_.sorted_input) {
      params.rows = map_rows(
          problem_,
          {call.input.data, call.input.row_stride, call.input.num_rows, problem_.hidden_size},
          kernels_.up.token_box);
    }
    params.input_weights = call.input_weights;
    params.output = stream::rows_behind_counters(call.workspace);
    stream::set_counters(params, call.workspace);
    stream::enqueue("experts.stream_sm90.up", kernels_.up, params, call.groups.max_tiles,
                    problem_.gpu().multiprocessors, stream);
  }

  void run_down(const DeviceExpertsCall& call, CUstream_st* stream) const {
    Params params = with_groups(down_, call.groups);
    params.rows = map_rows(problem_,
                           {stream::rows_behind_counters(call.workspace), intermediate_stride(),
                            call.groups.max_rows, problem_.intermediate_size},
                           kernels_.down.token_box);
    stream::set_counters(params, call.workspace);
    set_output(params, call);
    stream::enqueue("experts.stream_sm90.down", kernels_.down, params, call.groups.max_tiles,
                    problem_.gpu().multiprocessors, stream);
  }

  ExpertsProblem problem_;
  DeviceTile tile_;
  KernelPair kernels_;
  Params up_;
  Params down_;
};

}  // namespace

std::unique_ptr<DeviceExpertsKernel> make_stream_sm90(const ExpertsProblem& problem,
                                                      const DeviceExperts& weights,
                                                      const DeviceTile& tile) {
  return std::make_unique<StreamKernel>(problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
