#include "conclave/placement.h"

#include <string>

namespace conclave::inline v0 {

StrategyChoice determine_placement_strategy(const StrategyRequest& request) {
  if (request.wanted != PlacementStrategy::kRoundRobin) return {.strategy = request.wanted};
  const auto linear = [](std::string reason) {
    return StrategyChoice{.strategy = PlacementStrategy::kLinear, .reason = std::move(reason)};
  };
  if (request.num_groups <= 1) return linear("round-robin needs more than one group of experts");
  if (request.num_redundant_experts != 0) {
    return linear("round-robin excludes redundant experts; asked for " +
                  std::to_string(request.num_redundant_experts));
  }
  if (request.rebalances) return linear("round-robin excludes rebalancing");
  if (!request.transport_permits) return linear("the transport needs contiguous experts per rank");
  return {.strategy = PlacementStrategy::kRoundRobin};
}

}  // namespace conclave::inline v0
