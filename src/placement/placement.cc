#include "conclave/placement.h"

#include "core/max_places.h"
#include "core/max_ranks.h"

#include "conclave/error.h"

#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

void check_sizes(int64_t num_experts, int64_t num_replicas, int32_t num_ranks) {
  if (num_experts < 1 || num_experts > kMaxPlaces) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "cannot place this number of experts",
                 .tensor = "num_experts",
                 .expected = "between 1 and " + std::to_string(kMaxPlaces),
                 .found = std::to_string(num_experts)});
  }
  if (num_replicas < 0 || num_replicas > kMaxPlaces - num_experts) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "cannot place this number of replicas",
                 .tensor = "num_redundant_experts",
                 .found = std::to_string(num_replicas),
                 .limit = "0 to " + std::to_string(kMaxPlaces - num_experts)});
  }
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "cannot place experts on this number of ranks",
                 .tensor = "num_ranks",
                 .found = std::to_string(num_ranks),
                 .limit = "1 to " + std::to_string(kMaxRanks)});
  }
}

// The first P % ranks ranks hold one expert more than the others.
int32_t linear_rank(int64_t expert, int64_t num_experts, int64_t num_ranks) {
  const int64_t base = num_experts / num_ranks;
  const int64_t larger_ranks = num_experts % num_ranks;
  const int64_t in_larger_ranks = larger_ranks * (base + 1);
  if (expert < in_larger_ranks) return static_cast<int32_t>(expert / (base + 1));
  return static_cast<int32_t>(larger_ranks + (expert - in_larger_ranks) / base);
}

std::vector<int32_t> ranks_by_strategy(int64_t num_physical, int32_t num_ranks,
                                       PlacementStrategy strategy) {
  std::vector<int32_t> ranks;
  ranks.reserve(static_cast<size_t>(num_physical));
  for (int64_t expert = 0; expert < num_physical; ++expert) {
    ranks.push_back(strategy == PlacementStrategy::kLinear
                        ? linear_rank(expert, num_physical, num_ranks)
                        : static_cast<int32_t>(expert % num_ranks));
  }
  return ranks;
}

std::vector<int32_t> custom_ranks(int64_t num_physical, const ParallelSpec& parallel) {
  if (static_cast<int64_t>(parallel.rank_of.size()) != num_physical) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a custom placement names one rank for each expert and replica",
                 .tensor = "rank_of",
                 .expected = std::to_string(num_physical) + " entries",
                 .found = std::to_string(parallel.rank_of.size())});
  }
  for (const int32_t rank : parallel.rank_of) {
    if (rank >= -1 && rank < parallel.ep_size) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a custom placement names a rank that does not exist",
                 .tensor = "rank_of",
                 .found = std::to_string(rank),
                 .limit = "-1 to " + std::to_string(parallel.ep_size - 1)});
  }
  return parallel.rank_of;
}

std::vector<int32_t> ranks_of(int64_t num_physical, const ParallelSpec& parallel) {
  switch (parallel.placement) {
    case PlacementStrategy::kLinear:
    case PlacementStrategy::kRoundRobin:
      return ranks_by_strategy(num_physical, parallel.ep_size, parallel.placement);
    case PlacementStrategy::kCustom:
      return custom_ranks(num_physical, parallel);
  }
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "no placement strategy of this value",
               .tensor = "placement",
               .expected = "PlacementStrategy::kLinear, PlacementStrategy::kRoundRobin or "
                           "PlacementStrategy::kCustom",
               .found = std::to_string(static_cast<int>(parallel.placement))});
}

std::vector<int32_t> logical_experts(int64_t num_experts, const ParallelSpec& parallel) {
  const auto replicas = static_cast<size_t>(parallel.num_redundant_experts);
  if (!parallel.replica_of.empty() && parallel.replica_of.size() != replicas) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "replicas need one logical expert each",
                                              .tensor = "replica_of",
                                              .expected = std::to_string(replicas) + " entries",
                                              .found = std::to_string(parallel.replica_of.size())});
  }
  std::vector<int32_t> logical;
  logical.reserve(static_cast<size_t>(num_experts) + replicas);
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    logical.push_back(static_cast<int32_t>(expert));
  }
  for (size_t replica = 0; replica < replicas; ++replica) {
    const int32_t expert = parallel.replica_of.empty()
                               ? static_cast<int32_t>(static_cast<int64_t>(replica) % num_experts)
                               : parallel.replica_of[replica];
    if (expert < 0 || expert >= num_experts) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "a replica of an expert that does not exist",
                   .tensor = "replica_of",
                   .found = std::to_string(expert),
                   .limit = std::to_string(num_experts - 1)});
    }
    logical.push_back(expert);
  }
  return logical;
}

void number_locally(ExpertPlacement& placement) {
  placement.local_of.clear();
  placement.experts_of.assign(static_cast<size_t>(placement.num_ranks), {});
  for (size_t expert = 0; expert < placement.rank_of.size(); ++expert) {
    const int32_t rank = placement.rank_of[expert];
    if (rank < 0) {
      placement.local_of.push_back(-1);
      continue;
    }
    std::vector<int32_t>& owned = placement.experts_of[static_cast<size_t>(rank)];
    placement.local_of.push_back(static_cast<int32_t>(owned.size()));
    owned.push_back(static_cast<int32_t>(expert));
  }
}

}  // namespace

ExpertPlacement make_placement(int64_t num_experts, const ParallelSpec& parallel) {
  check_sizes(num_experts, parallel.num_redundant_experts, parallel.ep_size);
  const int64_t physical = num_experts + parallel.num_redundant_experts;
  ExpertPlacement placement;
  placement.strategy = parallel.placement;
  placement.num_ranks = parallel.ep_size;
  placement.num_experts = num_experts;
  placement.logical_of = logical_experts(num_experts, parallel);
  placement.rank_of = ranks_of(physical, parallel);
  number_locally(placement);
  return placement;
}

ExpertPlacement update_placement(const ExpertPlacement& placement, int32_t num_ranks) {
  check_sizes(placement.num_experts, placement.num_physical() - placement.num_experts, num_ranks);
  if (placement.strategy == PlacementStrategy::kCustom) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a custom placement cannot follow a change of ranks",
                 .tensor = "placement",
                 .hint = "make it anew with rank_of"});
  }
  ExpertPlacement updated = placement;
  updated.num_ranks = num_ranks;
  updated.rank_of = ranks_by_strategy(placement.num_physical(), num_ranks, placement.strategy);
  number_locally(updated);
  return updated;
}

}  // namespace conclave::inline v0
