#include "placement/placement.h"

#include "conclave/error.h"

#include <limits>
#include <string>

namespace conclave::inline v0::placement {
namespace {

void check_sizes(int64_t num_experts, int32_t num_ranks) {
  if (num_experts < 1 || num_experts > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "cannot place this number of experts",
                                              .tensor = "num_experts",
                                              .expected = "between 1 and 2147483647",
                                              .found = std::to_string(num_experts)});
  }
  if (num_ranks < 1) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "experts need at least one rank",
                                              .tensor = "num_ranks",
                                              .expected = "at least 1",
                                              .found = std::to_string(num_ranks)});
  }
}

// The first E % ranks ranks hold one expert more than the others.
int32_t linear_rank(int64_t expert, int64_t num_experts, int64_t num_ranks) {
  const int64_t base = num_experts / num_ranks;
  const int64_t larger_ranks = num_experts % num_ranks;
  const int64_t in_larger_ranks = larger_ranks * (base + 1);
  if (expert < in_larger_ranks) return static_cast<int32_t>(expert / (base + 1));
  return static_cast<int32_t>(larger_ranks + (expert - in_larger_ranks) / base);
}

int32_t rank_of_expert(int64_t expert, int64_t num_experts, int64_t num_ranks,
                       PlacementStrategy strategy) {
  switch (strategy) {
    case PlacementStrategy::kLinear:
      return linear_rank(expert, num_experts, num_ranks);
    case PlacementStrategy::kRoundRobin:
      return static_cast<int32_t>(expert % num_ranks);
  }
  throw Error(ErrorCode::kInvalidArgument, {.what = "no placement strategy of this value",
                                            .tensor = "placement",
                                            .expected = "kLinear or kRoundRobin",
                                            .found = std::to_string(static_cast<int>(strategy))});
}

}  // namespace

std::vector<int32_t> ExpertPlacement::expert_map(int32_t rank) const {
  std::vector<int32_t> map(rank_of.size(), -1);
  for (size_t expert = 0; expert < rank_of.size(); ++expert) {
    if (rank_of[expert] == rank) map[expert] = local_of[expert];
  }
  return map;
}

ExpertPlacement make_placement(int64_t num_experts, int32_t num_ranks, PlacementStrategy strategy) {
  check_sizes(num_experts, num_ranks);
  ExpertPlacement placement;
  placement.num_ranks = num_ranks;
  placement.rank_of.reserve(static_cast<size_t>(num_experts));
  placement.local_of.reserve(static_cast<size_t>(num_experts));
  placement.experts_of.resize(static_cast<size_t>(num_ranks));
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int32_t rank = rank_of_expert(expert, num_experts, num_ranks, strategy);
    std::vector<int32_t>& owned = placement.experts_of[static_cast<size_t>(rank)];
    placement.rank_of.push_back(rank);
    placement.local_of.push_back(static_cast<int32_t>(owned.size()));
    owned.push_back(static_cast<int32_t>(expert));
  }
  return placement;
}

}  // namespace conclave::inline v0::placement
