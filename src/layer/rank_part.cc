#include "layer/rank_part.h"

#include "conclave/error.h"

#include <string>

namespace conclave::inline v0 {
namespace {

Communicator* require_tensor_communicator(const Context& context, const ParallelSpec& parallel) {
  Communicator* const communicator = context.tensor_communicator();
  if (communicator == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "tensor parallelism needs ContextOptions.tensor_communicator",
                 .found = "none",
                 .hint = "give one, or ask for Reduce::kPartial"});
  }
  if (communicator->size() == parallel.tp_size && communicator->rank() == parallel.tp_rank) {
    return communicator;
  }
  const auto rank_of = [](int32_t rank, int32_t size) {
    return "rank " + std::to_string(rank) + " of " + std::to_string(size);
  };
  throw Error(ErrorCode::kUnsupported,
              {.what = "ContextOptions.tensor_communicator is of another group than the layer",
               .expected = rank_of(parallel.tp_rank, parallel.tp_size),
               .found = rank_of(communicator->rank(), communicator->size())});
}

}  // namespace

RankPart plan_rank_part(const Context& context, const MoeSpec& spec, const ParallelSpec& parallel) {
  RankPart part;
  part.placement = make_placement(spec.num_experts, parallel);
  for (const int32_t physical : part.placement.experts_of[static_cast<size_t>(parallel.ep_rank)]) {
    part.local_experts.push_back(part.placement.logical_of[static_cast<size_t>(physical)]);
  }
  if (part.has_replicas()) {
    part.replicas = make_replica_map(part.placement.logical_of, spec.num_experts);
  }
  const auto slice = [&](int64_t size) {
    return tensor_slice(size, parallel.tp_rank, parallel.tp_size);
  };
  part.inner = slice(spec.intermediate_size);
  part.shared_inner = slice(spec.shared.intermediate_size);
  part.residual_inner = slice(spec.residual.intermediate_size);
  part.adds_down_bias = parallel.tp_rank == 0;
  const bool is_part =
      parallel.reduce == Reduce::kPartial && (parallel.ep_size > 1 || parallel.tp_size > 1 ||
                                              parallel.placement == PlacementStrategy::kCustom);
  if (is_part && spec.latent.has_norm) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "LatentSpec.has_norm needs the whole sum of a token",
                 .found = "ParallelSpec.reduce = Reduce::kPartial",
                 .hint = "use Reduce::kFull"});
  }
  if (parallel.reduce == Reduce::kPartial) {
    part.holds_dense = parallel.ep_rank == 0;
    part.adds_rest = parallel.ep_rank == 0 && parallel.tp_rank == 0;
  } else if (parallel.tp_size > 1) {
    part.tensor_communicator = require_tensor_communicator(context, parallel);
  }
  return part;
}

}  // namespace conclave::inline v0
