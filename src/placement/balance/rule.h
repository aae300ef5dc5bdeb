// A rule by which experts are balanced, and what rules share.
#pragma once

#include "conclave/balance.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace conclave::inline v0::placement {

// Experts by rank, or items by pack, in the order in which they were put there.
using Packs = std::vector<std::vector<int32_t>>;

struct BalanceRule {
  std::string_view name;
  Packs (*balance)(std::span<const double> load, const BalanceRequest& request);
};

Packs balance_hierarchical(std::span<const double> load, const BalanceRequest& request);
Packs balance_global(std::span<const double> load, const BalanceRequest& request);
Packs balance_surviving(std::span<const double> load, const BalanceRequest& request);
Packs balance_steady(std::span<const double> load, const BalanceRequest& request);

// Slots of each rank: the first ones hold one more where they do not divide evenly.
std::vector<int32_t> capacities(int64_t num_slots, int32_t num_ranks);

// The rule's first step: experts [0, E), then a replica after the other for the expert whose
// replicas have the most rows each, the first of equals.
struct Replicas {
  std::vector<int32_t> expert_of;  // [slots]
  std::vector<int32_t> count;      // [E]
};
struct ReplicaLimits {
  int32_t least = 1;         // replicas of any expert
  int32_t most = INT32_MAX;  // replicas of one while another has fewer
};
Replicas replicate(std::span<const double> load, int64_t num_slots, ReplicaLimits limits);

// The second: items by descending weight, each into the lightest pack that is not full, the first
// of equals. Where no pack holds more than one, item i goes to pack i.
Packs pack(std::span<const double> weights, std::span<const int32_t> capacities);

// Swaps experts between ranks [first, last) until none has two replicas of one, of an expert with
// no more replicas than there are ranks. `share` [E]: the load of one replica.
void separate(std::span<const double> share, size_t first, size_t last, Packs& ranks);

}  // namespace conclave::inline v0::placement
