#include "placement/epoch.h"

#include <string>

namespace conclave::inline v0 {

std::shared_ptr<const PlacementEpoch> first_epoch(int64_t num_experts,
                                                  const ParallelSpec& parallel) {
  auto epoch = std::make_shared<PlacementEpoch>();
  epoch->experts = make_placement(num_experts, parallel);
  if (epoch->has_replicas()) {
    epoch->replicas = make_replica_map(epoch->experts.logical_of, num_experts);
  }
  return epoch;
}

Support can_follow(const PlacementEpoch& planned, const PlacementEpoch& next) {
  const auto differ = [](const char* what, int64_t from, int64_t to) {
    return Support::no(std::string("the plan is for ") + std::to_string(from) + " " + what +
                       ", the epoch has " + std::to_string(to));
  };
  const ExpertPlacement& from = planned.experts;
  const ExpertPlacement& to = next.experts;
  if (from.num_experts != to.num_experts) {
    return differ("experts", from.num_experts, to.num_experts);
  }
  if (from.num_physical() != to.num_physical()) {
    return differ("physical experts", from.num_physical(), to.num_physical());
  }
  if (from.num_ranks != to.num_ranks) return differ("ranks", from.num_ranks, to.num_ranks);
  for (size_t rank = 0; rank < to.experts_of.size(); ++rank) {
    if (to.experts_of[rank].size() <= from.experts_of[rank].size()) continue;
    return Support::no("rank " + std::to_string(rank) + " has places for " +
                       std::to_string(from.experts_of[rank].size()) + " experts, the epoch gives " +
                       std::to_string(to.experts_of[rank].size()));
  }
  return Support::yes();
}

}  // namespace conclave::inline v0
