#include "core/max_places.h"

#include "conclave/error.h"
#include "conclave/placement.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0 {
namespace {

void check_rank(int32_t rank, int32_t num_ranks) {
  if (rank >= 0 && rank < num_ranks) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "no such rank in this placement",
                                            .tensor = "rank",
                                            .found = std::to_string(rank),
                                            .limit = "0 to " + std::to_string(num_ranks - 1)});
}

void check_shared(int32_t num_shared) {
  if (num_shared >= 0 && num_shared <= kMaxPlaces) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "no map has this number of shared experts",
                                            .tensor = "num_shared",
                                            .found = std::to_string(num_shared),
                                            .limit = "0 to " + std::to_string(kMaxPlaces)});
}

// Local indexes must be 0..n-1, each once: any other set is a map of something else.
void check_local_indexes(std::span<const int32_t> map) {
  const auto held = static_cast<int32_t>(
      std::count_if(map.begin(), map.end(), [](int32_t local) { return local != -1; }));
  std::vector<bool> seen(static_cast<size_t>(held), false);
  for (const int32_t local : map) {
    if (local == -1) continue;
    const bool inside = local >= 0 && local < held;
    if (inside && !seen[static_cast<size_t>(local)]) {
      seen[static_cast<size_t>(local)] = true;
      continue;
    }
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "an expert map numbers the experts it holds from 0, each once",
                 .tensor = "expert_map",
                 .found = std::to_string(local) + (inside ? " twice" : ""),
                 .limit = std::to_string(held - 1)});
  }
}

ParallelSpec partial_spec(int32_t ep_rank, int32_t ep_size) {
  check_rank(ep_rank, ep_size);
  ParallelSpec parallel;
  parallel.ep_size = ep_size;
  parallel.ep_rank = ep_rank;
  parallel.placement = PlacementStrategy::kCustom;
  parallel.reduce = Reduce::kPartial;
  return parallel;
}

}  // namespace

std::vector<int32_t> ExpertPlacement::expert_map(int32_t rank, int32_t num_shared) const {
  check_rank(rank, num_ranks);
  check_shared(num_shared);
  std::vector<int32_t> map(rank_of.size(), -1);
  for (size_t expert = 0; expert < rank_of.size(); ++expert) {
    if (rank_of[expert] == rank) map[expert] = local_of[expert];
  }
  auto next = static_cast<int32_t>(experts_of[static_cast<size_t>(rank)].size());
  for (int32_t shared = 0; shared < num_shared; ++shared) map.push_back(next++);
  return map;
}

std::vector<int32_t> ExpertPlacement::expert_mask(int32_t rank, int32_t num_shared) const {
  std::vector<int32_t> mask = expert_map(rank, num_shared);
  for (int32_t& entry : mask) entry = entry >= 0 ? 1 : 0;
  mask.push_back(0);
  return mask;
}

ParallelSpec from_expert_map(std::span<const int32_t> map, int32_t ep_rank, int32_t ep_size) {
  ParallelSpec parallel = partial_spec(ep_rank, ep_size);
  check_local_indexes(map);
  for (const int32_t local : map) parallel.rank_of.push_back(local >= 0 ? ep_rank : -1);
  return parallel;
}

ParallelSpec from_expert_mask(std::span<const int32_t> mask, int64_t num_experts, int32_t ep_rank,
                              int32_t ep_size) {
  ParallelSpec parallel = partial_spec(ep_rank, ep_size);
  if (num_experts < 0 || static_cast<int64_t>(mask.size()) < num_experts) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "an expert mask has an entry for each expert",
                                              .tensor = "expert_mask",
                                              .expected = std::to_string(num_experts),
                                              .found = std::to_string(mask.size())});
  }
  for (const int32_t held : mask.first(static_cast<size_t>(num_experts))) {
    if (held != 0 && held != 1) {
      throw Error(ErrorCode::kInvalidArgument, {.what = "an expert mask holds zeros and ones",
                                                .tensor = "expert_mask",
                                                .found = std::to_string(held),
                                                .limit = "0 or 1"});
    }
    parallel.rank_of.push_back(held == 1 ? ep_rank : -1);
  }
  return parallel;
}

std::string expert_map_text(std::span<const int32_t> map) {
  std::string text;
  for (size_t expert = 0; expert < map.size(); ++expert) {
    if (map[expert] == -1) continue;
    text +=
        (text.empty() ? "" : ", ") + std::to_string(map[expert]) + "->" + std::to_string(expert);
  }
  return text;
}

RoutingTables make_routing_tables(const ExpertPlacement& placement, int32_t rank) {
  check_rank(rank, placement.num_ranks);
  RoutingTables tables;
  tables.position_of_expert.assign(placement.rank_of.size(), -1);
  for (const std::vector<int32_t>& owned : placement.experts_of) {
    for (const int32_t expert : owned) {
      tables.position_of_expert[static_cast<size_t>(expert)] =
          static_cast<int32_t>(tables.expert_at_position.size());
      tables.expert_at_position.push_back(expert);
    }
  }
  tables.expert_of_local = placement.experts_of[static_cast<size_t>(rank)];
  return tables;
}

}  // namespace conclave::inline v0
