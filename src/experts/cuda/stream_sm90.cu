#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "experts/cuda/stream_sm90.cuh"
#include "experts/cuda/stream_sm90.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::experts {
namespace {

using stream::Params;
using stream::Side;

// What differs between the kernels, without their types.
struct KernelPair {
  DeviceTile tile;
  void (*up)(const Params) = nullptr;
  void (*down)(const Params) = nullptr;
  size_t shared_bytes = 0;
  int32_t threads = 0;
  int32_t weight_rows = 0;
  int32_t depth = 0;  // elements of K a stage
  int32_t token_box = 0;
};

template <class Config>
KernelPair kernel_pair() {
  constexpr size_t kBytes = sizeof(stream::SharedStorage<Config>);
  static_assert(kBytes <= 232448, "a block has at most 227 KiB of shared memory");
  return {.tile = {.tokens = Config::kMaxTokens,
                   .features = Config::kWeightRows,
                   .depth = Config::kAtoms * Config::kAtomBytes,
                   .stages = Config::kStages},
          .up = stream::stream_product<Config, Side::kUp>,
          .down = stream::stream_product<Config, Side::kDown>,
          .shared_bytes = kBytes,
          .threads = Config::kThreads,
          .weight_rows = Config::kWeightRows,
          .depth = Config::kDepth,
          .token_box = Config::kTokenBox};
}

template <class Element>
KernelPair find_kernels(const DeviceTile& tile) {
  const std::array pairs = {kernel_pair<stream::Config<Element, 16, 128, 2, 6>>(),
                            kernel_pair<stream::Config<Element, 32, 128, 2, 5>>(),
                            kernel_pair<stream::Config<Element, 64, 128, 2, 4>>(),
                            kernel_pair<stream::Config<Element, 64, 256, 1, 5>>(),
                            kernel_pair<stream::Config<Element, 96, 256, 1, 5>>(),
                            kernel_pair<stream::Config<Element, 128, 256, 1, 4>>(),
                            kernel_pair<stream::Config<Element, 160, 256, 1, 4>>()};
  for (const KernelPair& pair : pairs) {
    if (pair.tile == tile) return pair;
  }
  throw Error(ErrorCode::kUnsupported,
              {.what = "cuda.stream_sm90 has no such tile", .found = to_string(tile)});
}

constexpr uint64_t kElementBytes = 2;

// {K, 8 rows, gate and up, groups of 8 rows, E}: a box holds 8 gate rows, 8 up rows, 8 gate rows...
// so that a thread's accumulators have gate and up of a feature. The last group of rows may reach
// into what follows the gate; those features are not stored.
CUtensorMap map_gated(const DeviceExpertsProblem& sizes, const DeviceExperts& weights,
                      const KernelPair& kernels, CUtensorMapDataType type) {
  const auto row = static_cast<uint64_t>(weights.gate_up_stride) * kElementBytes;
  const auto rows = static_cast<uint64_t>(sizes.intermediate_size);
  const std::array dimensions = {
      cuda::MapDimension{.size = static_cast<uint64_t>(sizes.hidden_size), .box = 64},
      cuda::MapDimension{.size = 8, .stride_bytes = row, .box = 8},
      cuda::MapDimension{.size = 2, .stride_bytes = rows * row, .box = 2},
      cuda::MapDimension{.size = (rows + 7) / 8,
                         .stride_bytes = 8 * row,
                         .box = static_cast<uint32_t>(kernels.weight_rows) / 16},
      cuda::MapDimension{.size = static_cast<uint64_t>(sizes.num_local_experts),
                         .stride_bytes = 2 * rows * row}};
  return cuda::make_tensor_map({.data = weights.gate_up, .type = type, .dimensions = dimensions});
}

struct PlainMatrix {
  const void* data = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t depth = 0;
};

CUtensorMap map_plain(const PlainMatrix& matrix, int64_t experts, const KernelPair& kernels,
                      CUtensorMapDataType type) {
  const auto row = static_cast<uint64_t>(matrix.stride) * kElementBytes;
  const auto rows = static_cast<uint64_t>(matrix.rows);
  const std::array dimensions = {
      cuda::MapDimension{.size = static_cast<uint64_t>(matrix.depth), .box = 64},
      cuda::MapDimension{
          .size = rows, .stride_bytes = row, .box = static_cast<uint32_t>(kernels.weight_rows)},
      cuda::MapDimension{.size = static_cast<uint64_t>(experts), .stride_bytes = rows * row}};
  return cuda::make_tensor_map({.data = matrix.data, .type = type, .dimensions = dimensions});
}

int32_t divide_up(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

bool wide(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

class StreamKernel final : public DeviceExpertsKernel {
 public:
  StreamKernel(const DeviceExpertsProblem& problem, const DeviceExperts& weights,
               const KernelPair& kernels)
      : kernels_(kernels), problem_(problem) {
    type_ = problem.weight_dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cuda::allow_shared_bytes(reinterpret_cast<const void*>(kernels.up), kernels.shared_bytes);
    cuda::allow_shared_bytes(reinterpret_cast<const void*>(kernels.down), kernels.shared_bytes);
    fill_up(weights);
    fill_down(weights);
  }

  int32_t tile_tokens() const override { return kernels_.tile.tokens; }

  size_t workspace_bytes(int64_t max_tokens) const override {
    return static_cast<size_t>(max_tokens * problem_.top_k * intermediate_stride()) * kElementBytes;
  }

  std::string describe() const override { return "cuda.stream_sm90 " + to_string(kernels_.tile); }

  void run(const DeviceExpertsCall& call, CUstream_st* stream) const override {
    if (call.groups.max_rows == 0) return;
    run_up(call, stream);
    run_down(call, stream);
  }

 private:
  // TMA needs rows at multiples of 16 bytes.
  int64_t intermediate_stride() const { return (problem_.intermediate_size + 7) / 8 * 8; }

  void fill_up(const DeviceExperts& weights) {
    const bool gated = problem_.activation.gated;
    const int64_t width = problem_.intermediate_size;
    up_.weights =
        gated ? map_gated(problem_, weights, kernels_, type_)
              : map_plain({weights.gate_up, weights.gate_up_stride, width, problem_.hidden_size},
                          problem_.num_local_experts, kernels_, type_);
    up_.bias = weights.gate_up_bias;
    up_.features = static_cast<int32_t>(width);
    up_.feature_tiles = divide_up(gated ? 2 * width : width, kernels_.weight_rows);
    up_.depth = static_cast<int32_t>(problem_.hidden_size);
    up_.depth_stages = divide_up(problem_.hidden_size, kernels_.depth);
    up_.activation = activation::device_activation(problem_.activation);
    up_.output_stride = intermediate_stride();
  }

  void fill_down(const DeviceExperts& weights) {
    down_.weights = map_plain(
        {weights.down, weights.down_stride, problem_.hidden_size, problem_.intermediate_size},
        problem_.num_local_experts, kernels_, type_);
    down_.bias = weights.down_bias;
    down_.features = static_cast<int32_t>(problem_.hidden_size);
    down_.feature_tiles = divide_up(problem_.hidden_size, kernels_.weight_rows);
    down_.depth = static_cast<int32_t>(problem_.intermediate_size);
    down_.depth_stages = divide_up(problem_.intermediate_size, kernels_.depth);
  }

  CUtensorMap map_intermediate(const DeviceExpertsCall& call) const {
    const std::array dimensions = {
        cuda::MapDimension{.size = static_cast<uint64_t>(problem_.intermediate_size), .box = 64},
        cuda::MapDimension{
            .size = static_cast<uint64_t>(call.groups.max_rows),
            .stride_bytes = static_cast<uint64_t>(intermediate_stride()) * kElementBytes,
            .box = static_cast<uint32_t>(kernels_.token_box)}};
    return cuda::make_tensor_map({.data = call.workspace, .type = type_, .dimensions = dimensions});
  }

  void launch(std::string_view name, void (*kernel)(const Params), const Params& params,
              int64_t max_tiles, CUstream_st* stream) const {
    const int64_t items = max_tiles * params.feature_tiles;
    cuda::launch(name, kernel,
                 {.blocks = std::min<int64_t>(items, problem_.device.multiprocessors),
                  .threads = kernels_.threads,
                  .shared_bytes = kernels_.shared_bytes,
                  .stream = stream},
                 params);
  }

  static Params with_groups(Params params, const GroupedRows& groups) {
    params.tiles = groups.tiles;
    params.num_tiles = groups.num_tiles;
    params.row_slot = groups.row_slot;
    params.top_k = groups.top_k;
    return params;
  }

  void run_up(const DeviceExpertsCall& call, CUstream_st* stream) const {
    Params params = with_groups(up_, call.groups);
    params.input = call.input.data;
    params.input_stride = call.input.row_stride;
    params.input_weights = call.input_weights;
    params.output = call.workspace;
    launch("experts.stream_sm90.up", kernels_.up, params, call.groups.max_tiles, stream);
  }

  void run_down(const DeviceExpertsCall& call, CUstream_st* stream) const {
    Params params = with_groups(down_, call.groups);
    params.rows = map_intermediate(call);
    params.output = call.output;
    params.output_stride = call.output_stride;
    params.wide_stores = wide(call.output, call.output_stride);
    launch("experts.stream_sm90.down", kernels_.down, params, call.groups.max_tiles, stream);
  }

  KernelPair kernels_;
  DeviceExpertsProblem problem_;
  CUtensorMapDataType type_ = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  Params up_;
  Params down_;
};

}  // namespace

std::unique_ptr<DeviceExpertsKernel> make_stream_sm90(const DeviceExpertsProblem& problem,
                                                      const DeviceExperts& weights,
                                                      const DeviceTile& tile) {
  return std::make_unique<StreamKernel>(problem, weights,
                                        problem.weight_dtype == DType::kF16
                                            ? find_kernels<__half>(tile)
                                            : find_kernels<__nv_bfloat16>(tile));
}

}  // namespace conclave::inline v0::experts
