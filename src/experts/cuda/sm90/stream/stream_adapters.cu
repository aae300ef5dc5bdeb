#include "cuda/launch.h"
#include "experts/cuda/adapters/terms.h"
#include "experts/cuda/sm90/stream/adapted_block.cuh"
#include "experts/cuda/sm90/stream/adapted_consumer.cuh"
#include "experts/cuda/sm90/stream/launch.h"
#include "experts/cuda/sm90/stream/stream.h"
#include "experts/cuda/sm90/stream/stream_adapters.h"
#include "experts/cuda/sm90/tensor_maps.h"

#include "conclave/error.h"

namespace conclave::inline v0::experts {
namespace {

using stream::AdaptedParams;
using stream::Shape;
using AdaptedPair = stream::KernelPairOf<AdaptedParams>;

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    adapted_product(const __grid_constant__ AdaptedParams params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  stream::run_adapted_block<Config, kProduct, stream::AdaptedConsumer<Config>>(
      params, *reinterpret_cast<stream::SharedStorage<Config>*>(bytes));
}

template <class Config>
AdaptedPair adapted_pair() {
  return {
      .up = stream::describe_kernel<Config>(adapted_product<Config, Product::kUp>),
      .down = stream::describe_kernel<Config>(adapted_product<Config, Product::kDown>),
  };
}

// The kernels of the tiles of stream_adapters.cc.
template <class Element>
AdaptedPair find_adapted_kernels(const DeviceTile& tile) {
  switch (tile.tokens) {
    case 16:
      return adapted_pair<stream::Config<Element, Shape{16, 128, 2, 6}>>();
    case 32:
      return adapted_pair<stream::Config<Element, Shape{32, 128, 2, 5}>>();
    case 64:
      return adapted_pair<stream::Config<Element, Shape{64, 128, 2, 4}>>();
    default:
      throw Error(ErrorCode::kUnsupported,
                  {.what = "cuda.stream_sm90 has no such tile for rows with adapters",
                   .found = to_string(tile)});
  }
}

class StreamAdapters final : public AdapterKernel {
 public:
  StreamAdapters(const ExpertsProblem& problem, const DeviceExperts& weights,
                 const DeviceTile& tile)
      : problem_(problem), tile_(tile) {
    kernels_ = problem.weight_dtype == DType::kF16 ? find_adapted_kernels<__half>(tile)
                                                   : find_adapted_kernels<__nv_bfloat16>(tile);
    stream::allow_shared_bytes(kernels_);
    up_ = stream::up_params(problem, weights, kernels_.up);
    up_.output_stride = intermediate_stride();
    // The kernel of terms, which comes before, has waited for the grouping.
    up_.groups_are_done = true;
    down_ = stream::down_params(problem, weights, kernels_.down);
  }

  int32_t tile_tokens() const override { return tile_.tokens; }

  void run(const AdaptedCall& call, CUstream_st* stream) const override {
    if (call.experts.groups.max_rows == 0) return;
    make_adapter_terms(call, AdaptedProduct::kGateUp, call.source, stream);
    run_up(call, stream);
    make_adapter_terms(call, AdaptedProduct::kDown,
                       {.rows = stream::rows_behind_counters(call.experts.workspace),
                        .dtype = problem_.weight_dtype,
                        .stride = intermediate_stride(),
                        .columns = problem_.intermediate_size,
                        .is_sorted = true},
                       stream);
    run_down(call, stream);
  }

 private:
  int64_t intermediate_stride() const { return stream_sm90_stride(problem_); }

  void run_up(const AdaptedCall& call, CUstream_st* stream) const {
    const DeviceExpertsCall& experts = call.experts;
    AdaptedParams params = stream::with_terms(with_groups(up_, experts.groups), call.up);
    params.input = experts.input.data;
    params.input_stride = experts.input.row_stride;
    params.input_weights = experts.input_weights;
    params.output = stream::rows_behind_counters(experts.workspace);
    stream::set_counters(params, experts.workspace);
    stream::enqueue("experts.stream_sm90.adapted_up", kernels_.up, params, experts.groups.max_tiles,
                    problem_.gpu().multiprocessors, stream);
  }

  void run_down(const AdaptedCall& call, CUstream_st* stream) const {
    const DeviceExpertsCall& experts = call.experts;
    AdaptedParams params = stream::with_terms(with_groups(down_, experts.groups), call.down);
    params.rows = map_rows(problem_,
                           {stream::rows_behind_counters(experts.workspace), intermediate_stride(),
                            experts.groups.max_rows, problem_.intermediate_size},
                           kernels_.down.token_box);
    stream::set_counters(params, experts.workspace);
    stream::set_output(params, experts);
    stream::enqueue("experts.stream_sm90.adapted_down", kernels_.down, params,
                    experts.groups.max_tiles, problem_.gpu().multiprocessors, stream);
  }

  ExpertsProblem problem_;
  DeviceTile tile_;
  AdaptedPair kernels_;
  AdaptedParams up_;
  AdaptedParams down_;
};

}  // namespace

std::unique_ptr<AdapterKernel> make_stream_adapters(const ExpertsProblem& problem,
                                                    const DeviceExperts& weights,
                                                    const DeviceTile& tile) {
  return std::make_unique<StreamAdapters>(problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
