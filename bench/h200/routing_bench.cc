#include "routing_bench.h"

#include "cuda/check.h"
#include "dispatch/cuda/catalog.h"
#include "layer/cuda/route_and_group.h"
#include "routing/router.h"
#include "support/cuda/graph_timer.h"
#include "support/cuda/routings.h"
#include "support/executors.h"

#include <random>
#include <span>
#include <vector>

namespace conclave::bench {

namespace {

constexpr int32_t kTileTokens = 16;
constexpr int32_t kLaunches = 24;  // per graph, each on logits of its own

std::vector<float> random_floats(int64_t count, float deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

cuda::DeviceBuffer to_device(const std::vector<float>& values) {
  cuda::DeviceBuffer buffer(values.size() * sizeof(float));
  cuda::upload(std::span<const float>(values), buffer.data());
  return buffer;
}

class RoutingBench {
 public:
  RoutingBench(const std::string& case_name, const testing::CudaProblemOptions& options)
      : o_(options),
        host_logits_(random_floats(kLaunches * o_.num_tokens * o_.num_experts, 2.0F, 7)),
        host_bias_(random_floats(o_.num_experts, 0.1F, 8)),
        logits_(to_device(host_logits_)),
        bias_(to_device(host_bias_)),
        ids_(slots() * sizeof(int32_t)),
        weights_(slots() * sizeof(float)),
        workspace_(dispatch::device_group_workspace_bytes(o_.num_tokens, o_.top_k, o_.num_experts,
                                                          kTileTokens)) {
    spec_.num_experts = o_.num_experts;
    spec_.top_k = o_.top_k;
    spec_.hidden_size = o_.hidden_size;
    spec_.intermediate_size = o_.intermediate_size;
    spec_.router = router_of(case_name);
    plan_ = routing::plan_device_route(spec_);
    plan_launches();
  }

  GroupedRows enqueue(int32_t launch, CUstream_st* stream) {
    const routing::DeviceRouteArgs route{
        .logits = logits_.as<float>() + launch * o_.num_tokens * o_.num_experts,
        .logits_dtype = DType::kF32,
        .logits_stride = o_.num_experts,
        .num_tokens = o_.num_tokens,
        .selection_bias = spec_.router.has_selection_bias ? bias_.as<float>() : nullptr,
        .topk_ids = ids_.as<int32_t>(),
        .topk_weights = weights_.as<float>()};
    const dispatch::DeviceGroupArgs group{.launches = launches_,
                                          .num_experts = static_cast<int32_t>(o_.num_experts),
                                          .num_local_experts = static_cast<int32_t>(o_.num_experts),
                                          .tile_tokens = kTileTokens,
                                          .workspace = workspace_.data()};
    return device_route_and_group(plan_, route, group, stream);
  }

  bool is_right() {
    const GroupedRows groups = enqueue(0, nullptr);
    cuda::check(cudaDeviceSynchronize(), "routing");
    std::vector<int32_t> ids(slots());
    cuda::copy_to_host(ids_.data(), std::as_writable_bytes(std::span(ids)));
    const auto host = testing::group_rows(ids, o_.num_experts, kTileTokens);
    std::vector<int32_t> begin(host.expert_begin.size());
    std::vector<int32_t> rows(host.row_slot.size());
    cuda::copy_to_host(groups.expert_begin, std::as_writable_bytes(std::span(begin)));
    cuda::copy_to_host(groups.row_slot, std::as_writable_bytes(std::span(rows)));
    return ids == host_ids() && begin == host.expert_begin && rows == host.row_slot;
  }

 private:
  // As a layer's plan chooses them.
  void plan_launches() {
    launches_ = dispatch::group_launches(o_.num_tokens, o_.top_k, o_.num_experts);
    dispatch::prepare_group_kernels(launches_.shape);
    launches_.routed = route_group_ladder({.route = &plan_,
                                           .num_local_experts = o_.num_experts,
                                           .max_tokens = o_.num_tokens,
                                           .cluster_blocks = find_cluster_blocks()})
                           .back()
                           .shape;
    if (launches_.routed.blocks > 0) prepare_route_and_group(plan_, launches_.routed);
  }

  size_t slots() const { return static_cast<size_t>(o_.num_tokens * o_.top_k); }

  // The ids for the first launch.
  std::vector<int32_t> host_ids() const {
    const auto router = routing::router_catalog().find(spec_.router.name, "router").make(spec_);
    testing::SerialExecutor executor;
    std::vector<double> scratch(router->scratch_bytes(executor.concurrency()) / sizeof(double));
    std::vector<int32_t> ids(slots());
    std::vector<float> weights(slots());
    RouterWeights given;
    if (spec_.router.has_selection_bias) given.selection_bias = host_bias_.data();
    router->route({.num_tokens = o_.num_tokens,
                   .num_experts = o_.num_experts,
                   .num_logits = o_.num_experts,
                   .logits = host_logits_.data(),
                   .weights = given,
                   .scratch = std::as_writable_bytes(std::span(scratch))},
                  {.topk_ids = ids.data(), .topk_weights = weights.data()}, executor);
    return ids;
  }

  const testing::CudaProblemOptions& o_;
  MoeSpec spec_;
  routing::DeviceRoutePlan plan_;
  dispatch::GroupLaunches launches_;
  std::vector<float> host_logits_, host_bias_;
  cuda::DeviceBuffer logits_, bias_, ids_, weights_, workspace_;
};

}  // namespace

RouterSpec router_of(const std::string& case_name) {
  RouterSpec router;
  if (case_name.starts_with("olmoe")) {
    router.renormalize = Renormalize::kNone;
  } else if (case_name.starts_with("gpt-oss")) {
    router.order = RouterOrder::kTopkThenScore;
    router.renormalize = Renormalize::kNone;
  } else if (case_name.starts_with("deepseek-v3")) {
    router.score = RouterScore::kSigmoid;
    router.has_selection_bias = true;
    router.num_groups = 8;
    router.topk_groups = 4;
    router.epsilon = 1e-20;
    router.scale = 2.5;
  }
  return router;
}

RoutingMeasurement measure_routing(const std::string& case_name,
                                   const testing::CudaProblemOptions& options, int32_t replays) {
  RoutingBench bench(case_name, options);
  RoutingMeasurement result;
  result.microseconds = testing::time_graph({.inputs = kLaunches, .replays = replays},
                                            [&](int32_t launch, CUstream_st* stream) {
                                              static_cast<void>(bench.enqueue(launch, stream));
                                            });
  result.is_right = bench.is_right();
  return result;
}

}  // namespace conclave::bench
