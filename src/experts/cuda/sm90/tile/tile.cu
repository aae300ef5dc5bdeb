#include "cuda/launch.h"
#include "experts/cuda/common/vocabulary.h"
#include "experts/cuda/sm90/tensor_maps.h"
#include "experts/cuda/sm90/tile/params.h"
#include "experts/cuda/sm90/tile/tile.h"

#include "conclave/error.h"

#include <algorithm>
#include <cstddef>
#include <string>

namespace conclave::inline v0::experts {
namespace {

using tile::Formulas;
using tile::Kernel;
using tile::Params;
using tile::Shape;

bool matches(const Shape& shape, int32_t tokens, const ProductTile& tile) {
  return shape.tokens == tokens && shape.features == tile.features && shape.stages == tile.stages &&
         shape.cluster == tile.cluster && shape.gathers == tile.gathers;
}

struct KernelKey {
  DType dtype;
  Product product;
  Formulas formulas;
  int32_t tokens;
};

const Kernel& find_kernel(const KernelKey& key, const ProductTile& tile) {
  const std::span<const Kernel> kernels =
      key.dtype == DType::kF16 ? tile::kernels_f16() : tile::kernels_bf16();
  for (const Kernel& kernel : kernels) {
    if (kernel.product == key.product && kernel.formulas == key.formulas &&
        matches(kernel.shape, key.tokens, tile)) {
      return kernel;
    }
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      {.what = "cuda.tile_sm90 has no kernel of this tile",
       .found = std::to_string(key.tokens) + " x " + std::to_string(tile.features) + ", " +
                std::to_string(tile.stages) + " stages, cluster " + std::to_string(tile.cluster)});
}

constexpr int32_t kBoxTokens = 64;  // per copy of token rows

Formulas formulas_of(const ExpertsProblem& problem, Product product) {
  const bool all = is_up(product) && !tile_sm90_common(problem.activation);
  return all ? Formulas::kAll : Formulas::kCommon;
}

constexpr size_t kDownQueue = 128;  // apart from the queue of up, so that they share no line

// One of the two products, ready to be launched.
struct PlannedProduct {
  const Kernel* kernel = nullptr;
  Params params{};
};

class TileSm90 final : public DeviceExpertsKernel {
 public:
  TileSm90(const ExpertsProblem& problem, const DeviceExperts& weights, const TilePlan& plan)
      : problem_(problem), plan_(plan) {
    const bool gated = problem.activation.gated;
    const WeightMatrix gate_up{weights.gate_up.data, weights.gate_up.stride,
                               problem.intermediate_size * (gated ? 2 : 1), problem.hidden_size};
    plan_product(plan.up, gated ? Product::kUpGated : Product::kUpPlain, gate_up, &up_);
    up_.params.weights = gated ? map_gated_weights(problem, weights, up_.kernel->box_features)
                               : map_weights(problem, gate_up, up_.kernel->box_features);
    up_.params.columns = static_cast<int32_t>(problem.intermediate_size);
    up_.params.bias = weights.gate_up.bias;
    up_.params.output_stride = tile_sm90_stride(problem);
    up_.params.whole_chunks = true;
    const WeightMatrix down{weights.down.data, weights.down.stride, problem.hidden_size,
                            problem.intermediate_size};
    plan_product(plan.down, Product::kDown, down, &down_);
    down_.params.weights = map_weights(problem, down, down_.kernel->box_features);
    down_.params.columns = static_cast<int32_t>(problem.hidden_size);
    down_.params.bias = weights.down.bias;
    adding_ = &find_kernel(
        {problem.weight_dtype, Product::kDownSums, Formulas::kCommon, plan.tokens}, plan.down);
    allow_shared_bytes(*adding_);
  }

  int32_t tile_tokens() const override { return plan_.tokens; }
  std::string describe() const override { return "cuda.tile_sm90 " + to_string(plan_); }

  void run(const DeviceExpertsCall& call, CUstream_st* stream) const override {
    if (call.groups.max_rows == 0) return;
    PlannedProduct up = up_;
    read_groups(call.groups, &up.params);
    if (plan_.up.gathers) {
      up.params.input = call.input.data;
      up.params.input_stride = call.input.row_stride;
    } else {
      up.params.rows = map_rows(
          problem_,
          {call.input.data, call.input.row_stride, call.input.num_rows, problem_.hidden_size},
          kBoxTokens);
    }
    up.params.input_weights = call.input_weights;
    auto* workspace = static_cast<std::byte*>(call.workspace);
    up.params.queue = workspace;
    up.params.output = workspace + kTileQueueBytes;
    launch("experts.tile_sm90.up", up, call.groups, stream);

    PlannedProduct down = down_;
    read_groups(call.groups, &down.params);
    down.params.rows = map_rows(problem_,
                                {up.params.output, up.params.output_stride, call.groups.max_rows,
                                 problem_.intermediate_size},
                                kBoxTokens);
    down.params.queue = workspace + kDownQueue;
    down.params.output = call.output;
    down.params.output_stride = call.output_stride;
    down.params.whole_chunks =
        call.output_stride % 8 == 0 && reinterpret_cast<uintptr_t>(call.output) % 16 == 0;
    if (call.sums.rows != nullptr) add_to(call.sums, &down);
    launch("experts.tile_sm90.down", down, call.groups, stream);
  }

 private:
  void plan_product(const ProductTile& tile, Product product, const WeightMatrix& matrix,
                    PlannedProduct* planned) {
    planned->kernel = &find_kernel(
        {problem_.weight_dtype, product, formulas_of(problem_, product), plan_.tokens}, tile);
    Params& params = planned->params;
    params.depth = static_cast<int32_t>(matrix.depth);
    params.feature_tiles = static_cast<int32_t>((matrix.rows + tile.features - 1) / tile.features);
    const int32_t group = tile.group > 0 ? tile.group
                                         : token_tiles_of_group({.tile_tokens = plan_.tokens,
                                                                 .tile_features = tile.features,
                                                                 .depth_bytes = matrix.depth * 2},
                                                                problem_.gpu());
    params.group = std::max(1, group / tile.cluster);
    params.activation = activation::device_activation(problem_.activation);
    allow_shared_bytes(*planned->kernel);
  }
  static void allow_shared_bytes(const Kernel& kernel) {
    cuda::allow_shared_bytes(reinterpret_cast<const void*>(kernel.function), kernel.shared_bytes);
  }

  void add_to(const RowSums& sums, PlannedProduct* down) const {
    down->kernel = adding_;
    down->params.sum_weights = sums.weights;
    down->params.output = sums.rows;
    down->params.output_stride = sums.stride;
  }

  static void read_groups(const GroupedRows& groups, Params* params) {
    params->tiles = groups.tiles;
    params->num_tiles = groups.num_tiles;
    params->expert_begin = groups.expert_begin;
    params->row_slot = groups.row_slot;
    params->top_k = groups.top_k;
  }

  void launch(std::string_view name, const PlannedProduct& planned, const GroupedRows& groups,
              CUstream_st* stream) const {
    const int64_t cluster = planned.kernel->shape.cluster;
    const int64_t units = (groups.max_tiles + cluster - 1) / cluster * planned.params.feature_tiles;
    const int64_t clusters = std::min<int64_t>(problem_.gpu().multiprocessors / cluster, units);
    cuda::launch(name, planned.kernel->function,
                 {.blocks = clusters * cluster,
                  .threads = planned.kernel->threads,
                  .shared_bytes = planned.kernel->shared_bytes,
                  .cluster = static_cast<int32_t>(cluster),
                  .stream = stream},
                 planned.params);
  }

  ExpertsProblem problem_;
  TilePlan plan_;
  PlannedProduct up_;
  PlannedProduct down_;
  const Kernel* adding_ = nullptr;  // replaces down's if rows are added
};

}  // namespace

std::unique_ptr<DeviceExpertsKernel> make_tile_sm90_plan(const ExpertsProblem& problem,
                                                         const DeviceExperts& weights,
                                                         const TilePlan& plan) {
  return std::make_unique<TileSm90>(problem, weights, plan);
}

std::unique_ptr<DeviceExpertsKernel> make_tile_sm90(const ExpertsProblem& problem,
                                                    const DeviceExperts& weights,
                                                    const DeviceTile& tile) {
  return make_tile_sm90_plan(problem, weights, tile_sm90_plan(problem, tile));
}

}  // namespace conclave::inline v0::experts
