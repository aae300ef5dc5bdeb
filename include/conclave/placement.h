// Says which rank holds which expert, which replica of an expert serves a token, and which slice of
// a matrix a tensor-parallel rank holds. Pure functions: layers use the same ones.
// Logical experts are those of the router, [0, E). Physical experts, [0, P) with P = E + R, are the
// places where weights are held: several may be replicas of one logical expert.
#pragma once

#include "conclave/spec.h"
#include "conclave/version.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

struct ExpertPlacement {
  PlacementStrategy strategy = PlacementStrategy::kLinear;
  int32_t num_ranks = 1;
  int64_t num_experts = 0;                       // E
  std::vector<int32_t> logical_of;               // [P] logical expert of each physical one
  std::vector<int32_t> rank_of;                  // [P]; -1: on no rank
  std::vector<int32_t> local_of;                 // [P] index among its rank's experts, or -1
  std::vector<std::vector<int32_t>> experts_of;  // [ranks] physical ids by local index

  int64_t num_physical() const noexcept { return static_cast<int64_t>(logical_of.size()); }

  // [P + S]: the local index of each expert on `rank`, -1 for experts of other ranks. The S shared
  // experts that run as experts of every rank follow the rank's own: local index n, n + 1, ...
  CONCLAVE_API std::vector<int32_t> expert_map(int32_t rank, int32_t num_shared = 0) const;
  // [P + S + 1]: 1 for experts of `rank` and for shared ones, 0 for others; the last entry, 0,
  // belongs to the sentinel id P + S. Both throw Error(kInvalidArgument) for a rank outside [0,
  // num_ranks).
  CONCLAVE_API std::vector<int32_t> expert_mask(int32_t rank, int32_t num_shared = 0) const;
};

// The placement that a layer of E experts has with `parallel` (its ep_ fields, placement and R
// replicas; E + R up to 2^24). Ranks beyond P hold none. Throws Error(kInvalidArgument) by field.
CONCLAVE_API ExpertPlacement make_placement(int64_t num_experts, const ParallelSpec& parallel);

// The same experts and replicas over another number of ranks. A custom placement names its ranks
// and cannot follow: Error(kInvalidArgument).
CONCLAVE_API ExpertPlacement update_placement(const ExpertPlacement& placement, int32_t num_ranks);

// The split of a layer that computes only what the caller's expert map or mask says:
// PlacementStrategy::kCustom with Reduce::kPartial, no communicator. `map` [E]: the local index of
// each expert that this rank holds, -1 for others; indexes 0..n-1 in any order. `mask`: [E] of 0
// and 1; further entries (shared experts, sentinel) are passed over. Shared experts count on
// ep_rank 0. Throws Error(kInvalidArgument).
CONCLAVE_API ParallelSpec from_expert_map(std::span<const int32_t> map, int32_t ep_rank = 0,
                                          int32_t ep_size = 1);
CONCLAVE_API ParallelSpec from_expert_mask(std::span<const int32_t> mask, int64_t num_experts,
                                           int32_t ep_rank = 0, int32_t ep_size = 1);

// "0->4, 1->9": local index and expert of each entry other than -1, in expert order. For logs.
CONCLAVE_API std::string expert_map_text(std::span<const int32_t> map);

// Tables between the router's numbering and one in which the experts of rank 0 come first, then
// those of rank 1, and so on. Transports that address experts by position need them.
struct RoutingTables {
  std::vector<int32_t> position_of_expert;  // [P], global to physical; -1: on no rank
  std::vector<int32_t> expert_at_position;  // [P on ranks], physical to global
  std::vector<int32_t> expert_of_local;     // for `rank`, local to global
};
// Throws Error(kInvalidArgument) for a rank outside [0, num_ranks).
CONCLAVE_API RoutingTables make_routing_tables(const ExpertPlacement& placement, int32_t rank);

// The facts that decide whether round-robin placement is possible.
struct StrategyRequest {
  PlacementStrategy wanted = PlacementStrategy::kLinear;
  int64_t num_groups = 1;  // RouterSpec::num_groups
  int32_t num_redundant_experts = 0;
  bool rebalances = false;        // experts move between ranks while the layer lives
  bool transport_permits = true;  // the engine's transport can address experts of any rank
};
struct StrategyChoice {
  PlacementStrategy strategy = PlacementStrategy::kLinear;
  std::string reason = {};  // why the wanted strategy was refused; empty if it was not
};
// Round-robin pays when groups of experts are chosen together, and stays in place only without
// replicas and rebalancing: otherwise the choice is linear, with the reason. Other strategies are
// granted as wanted.
CONCLAVE_API StrategyChoice determine_placement_strategy(const StrategyRequest& request);

// The physical experts of each logical expert.
struct ReplicaMap {
  std::vector<int32_t> first;     // [E + 1]: replicas of e are physical[first[e]] .. [first[e+1]-1]
  std::vector<int32_t> physical;  // ascending within an expert
};
// logical_of [P], entries in [-1, E); -1 marks a place that holds nothing. Throws
// Error(kInvalidArgument).
CONCLAVE_API ReplicaMap make_replica_map(std::span<const int32_t> logical_of, int64_t num_experts);
// (token * 0x9E3779B9) mod 2^32: a Weyl sequence, so that successive tokens spread evenly.
constexpr uint32_t replica_hash(int64_t token) noexcept {
  return static_cast<uint32_t>(token) * uint32_t{0x9E3779B9};
}
// The physical expert that serves `expert` for token number `token` of a call: replica
// replica_hash(token) mod count. -1 for an expert outside [0, E) and for one held nowhere.
CONCLAVE_API int32_t physical_expert(const ReplicaMap& map, int32_t expert, int64_t token) noexcept;

// Rows [begin, end) of gate and up, and columns of down, that a tensor-parallel rank holds out of
// `size`: [size * rank / ranks, size * (rank + 1) / ranks). Sizes differ by at most one and may be
// 0.
struct TensorSlice {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const noexcept { return end - begin; }
};
constexpr TensorSlice tensor_slice(int64_t size, int32_t rank, int32_t ranks) noexcept {
  return {.begin = size * rank / ranks, .end = size * (rank + 1) / ranks};
}

}  // namespace conclave::inline v0
