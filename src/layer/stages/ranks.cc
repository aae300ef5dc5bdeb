#include "layer/stages/ranks.h"

#include "conclave/dtype.h"
#include "conclave/placement.h"

namespace conclave::inline v0 {

Routing route_to_replicas(const ReplicaChoice& choice, const Routing& routing, int32_t* ids) {
  if (!choice.epoch.has_replicas()) return routing;
  const int64_t slots_per_token = routing.top_k * choice.rows_per_token;
  for (int64_t token = 0; token < routing.num_tokens / choice.rows_per_token; ++token) {
    for (int64_t at = token * slots_per_token; at < (token + 1) * slots_per_token; ++at) {
      ids[at] =
          physical_expert(choice.epoch.replicas, routing.topk_ids[at], choice.first_token + token);
    }
  }
  Routing physical = routing;
  physical.topk_ids = ids;
  return physical;
}

const float* sum_over_tensor_ranks(Communicator* communicator, std::span<const float> rows,
                                   float* sums) {
  if (communicator == nullptr || rows.empty()) return rows.data();
  communicator->all_reduce(std::as_bytes(rows),
                           std::as_writable_bytes(std::span(sums, rows.size())), DType::kF32,
                           ReduceOp::kSum, "forward: add up the slices");
  return sums;
}

}  // namespace conclave::inline v0
