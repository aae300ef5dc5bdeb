#include "layer/rank_part.h"

#include <fmt/format.h>

#include <string>

namespace conclave::inline v0 {

Support tensor_reduction_supports(const Communicator* communicator, const ParallelSpec& parallel) {
  if (communicator == nullptr) {
    return Support::no("the context has no tensor_communicator; Reduce::kPartial needs none");
  }
  if (communicator->size() != parallel.tp_size || communicator->rank() != parallel.tp_rank) {
    return Support::no(fmt::format(
        "the tensor_communicator is rank {} of {}, the layer is planned as rank {} of {}",
        communicator->rank(), communicator->size(), parallel.tp_rank, parallel.tp_size));
  }
  return Support::yes();
}

RankPart plan_rank_part(const MoeSpec& spec, const ParallelSpec& parallel, int32_t num_spare) {
  RankPart part;
  part.epoch = first_epoch(spec.num_experts, parallel, num_spare);
  part.num_spare = num_spare;
  const ExpertPlacement& placement = part.placement();
  for (const int32_t physical : placement.experts_of[static_cast<size_t>(parallel.ep_rank)]) {
    part.local_experts.push_back(placement.logical_of[static_cast<size_t>(physical)]);
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
                 .found = "Reduce::kPartial",
                 .hint = "use Reduce::kFull"});
  }
  if (parallel.reduce == Reduce::kPartial) {
    part.holds_dense = parallel.ep_rank == 0;
    part.adds_rest = parallel.ep_rank == 0 && parallel.tp_rank == 0;
  }
  return part;
}

std::string describe_part(const RankPart& part, const MoeSpec& spec, const ParallelSpec& parallel) {
  const int64_t physical = part.placement().num_physical();
  std::string text = fmt::format("{} of {} experts", part.local_experts.size(), physical);
  if (part.has_replicas()) {
    text += fmt::format(" ({} and {} replicas)", spec.num_experts, physical - spec.num_experts);
  }
  if (parallel.ep_size > 1) {
    text += fmt::format(" on rank {} of {}", parallel.ep_rank, parallel.ep_size);
  }
  if (part.num_spare > 0) text += fmt::format(", {} spare", part.num_spare);
  if (parallel.tp_size > 1) {
    text += fmt::format("; columns {} to {} of {} on rank {} of {}", part.inner.begin,
                        part.inner.end, spec.intermediate_size, parallel.tp_rank, parallel.tp_size);
  }
  if (parallel.reduce == Reduce::kPartial) text += "; the caller adds up";
  return text;
}

}  // namespace conclave::inline v0
