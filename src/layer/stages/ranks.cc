#include "layer/stages/ranks.h"

#include <span>

namespace conclave::inline v0 {

Routing route_to_replicas(const PipelineArgs& args, const Routing& routing) {
  if (!args.epoch.has_replicas()) return routing;
  auto* ids = slice_as<int32_t>(args.workspace, args.plan.slices.physical_ids);
  const int64_t slots_per_token = routing.top_k * args.plan.stages.rows_per_token;
  for (int64_t token = 0; token < args.chunk.count; ++token) {
    for (int64_t at = token * slots_per_token; at < (token + 1) * slots_per_token; ++at) {
      ids[at] =
          physical_expert(args.epoch.replicas, routing.topk_ids[at], args.chunk.begin + token);
    }
  }
  Routing physical = routing;
  physical.topk_ids = ids;
  return physical;
}

const float* sum_over_tensor_ranks(const PipelineArgs& args, const float* rows,
                                   int64_t row_elements, const WorkspaceSlice& destination) {
  const RankPart& part = args.plan.part;
  if (!part.reduces() || rows == nullptr || args.chunk.count == 0) return rows;
  auto* sums = slice_as<float>(args.workspace, destination);
  const auto elements = static_cast<size_t>(args.chunk.count * row_elements);
  part.tensor_communicator->all_reduce(std::as_bytes(std::span(rows, elements)),
                                       std::as_writable_bytes(std::span(sums, elements)),
                                       DType::kF32, ReduceOp::kSum, "forward: add up the slices");
  return sums;
}

}  // namespace conclave::inline v0
