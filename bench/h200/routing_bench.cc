#include "routing_bench.h"

#include "cuda/check.h"
#include "layer/cuda/route_and_group.h"
#include "logits.h"
#include "support/cuda/graph_timer.h"
#include "support/cuda/routings.h"

#include <algorithm>
#include <span>
#include <vector>

namespace conclave::bench {

namespace {

constexpr int32_t kTileTokens = 16;

class RoutingBench {
 public:
  explicit RoutingBench(const testing::CudaProblem& problem)
      : problem_(problem),
        o_(problem.options()),
        logits_(make_logits(problem)),
        ids_(slots() * sizeof(int32_t)),
        weights_(slots() * sizeof(float)),
        workspace_(dispatch::device_group_workspace_bytes(o_.num_tokens, o_.top_k, o_.num_experts,
                                                          kTileTokens)) {
    spec_.num_experts = o_.num_experts;
    spec_.top_k = o_.top_k;
    spec_.hidden_size = o_.hidden_size;
    spec_.intermediate_size = o_.intermediate_size;
  }

  GroupedRows enqueue(int32_t routing, CUstream_st* stream) {
    const routing::DeviceRouteArgs route{
        .logits = logits_.as<float>() + routing * o_.num_tokens * o_.num_experts,
        .logits_dtype = DType::kF32,
        .logits_stride = o_.num_experts,
        .num_tokens = o_.num_tokens,
        .topk_ids = ids_.as<int32_t>(),
        .topk_weights = weights_.as<float>()};
    const dispatch::DeviceGroupArgs group{.num_experts = static_cast<int32_t>(o_.num_experts),
                                          .num_local_experts = static_cast<int32_t>(o_.num_experts),
                                          .tile_tokens = kTileTokens,
                                          .workspace = workspace_.data()};
    return device_route_and_group(spec_, route, group, stream);
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
    const auto given = problem_.host_ids(0);
    std::vector<int32_t> wanted(given.begin(), given.end());
    for (auto* list : {&ids, &wanted}) {
      for (auto at = list->begin(); at != list->end(); at += o_.top_k) {
        std::sort(at, at + o_.top_k);
      }
    }
    return ids == wanted && begin == host.expert_begin && rows == host.row_slot;
  }

 private:
  size_t slots() const { return static_cast<size_t>(o_.num_tokens * o_.top_k); }

  const testing::CudaProblem& problem_;
  const testing::CudaProblemOptions& o_;
  MoeSpec spec_;
  cuda::DeviceBuffer logits_, ids_, weights_, workspace_;
};

}  // namespace

RoutingMeasurement measure_routing(const testing::CudaProblem& problem, int32_t replays) {
  RoutingBench bench(problem);
  RoutingMeasurement result;
  result.microseconds = testing::time_graph(
      {.inputs = problem.options().routings, .replays = replays},
      [&](int32_t input, CUstream_st* stream) { static_cast<void>(bench.enqueue(input, stream)); });
  result.is_right = bench.is_right();
  return result;
}

}  // namespace conclave::bench
