#include "plan/strategy.h"

#include "conclave/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace conclave::tool {
namespace {

constexpr std::string_view kLinear = "linear";
constexpr std::string_view kRoundRobin = "round_robin";

// Wider tensor groups would compute slices of a few columns.
constexpr int64_t kLeastColumns = 16;
// The rule that moves experts one by one looks at all pairs of slots.
constexpr int32_t kMostSlotsOfSteady = 512;

std::vector<int32_t> expert_group_sizes(const Cluster& cluster) {
  std::set<int32_t> sizes = {cluster.gpus_per_node, cluster.num_gpus()};
  for (int64_t nodes = 2; nodes < cluster.nodes; nodes *= 2) {
    if (cluster.nodes % nodes == 0) {
      sizes.insert(static_cast<int32_t>(nodes) * cluster.gpus_per_node);
    }
  }
  sizes.erase(1);
  return {sizes.begin(), sizes.end()};
}

bool slices_fit(const MoeSpec& spec, int32_t tp) {
  return spec.intermediate_size / tp >= kLeastColumns;
}

// Numbers of replicas that fill the slots of `ep` ranks evenly: none where experts divide evenly,
// then one more slot a rank, then twice as many.
std::vector<int32_t> redundant_counts(const MoeSpec& spec, int32_t ep) {
  const auto experts = static_cast<int32_t>(spec.num_experts);
  const int32_t slots = (experts + ep - 1) / ep;
  std::set<int32_t> counts;
  for (const int32_t each : {slots, slots + 1, 2 * slots}) counts.insert(each * ep - experts);
  return {counts.begin(), counts.end()};
}

// Elsewhere a rule refuses the request, does the same as another, or takes long.
bool rule_serves(std::string_view rule, const Cluster& cluster, const MoeSpec& spec, int32_t ep,
                 int32_t redundant) {
  if (rule == "hierarchical") {
    const int32_t nodes = ep / cluster.gpus_per_node;
    return nodes > 1 && spec.router.num_groups % nodes == 0;
  }
  if (rule == "surviving") return ep >= 2 && redundant >= spec.num_experts;
  if (rule == "steady") return spec.num_experts + redundant <= kMostSlotsOfSteady;
  return true;
}

void add_expert_parallel(const Cluster& cluster, const MoeSpec& spec, int32_t ep, int32_t tp,
                         std::vector<Strategy>& list) {
  const auto add = [&](std::string_view placement, int32_t redundant) {
    list.push_back(
        {.ep = ep, .tp = tp, .placement = std::string(placement), .redundant_experts = redundant});
  };
  // Without replicas ranks beyond the experts hold nothing.
  if (ep <= spec.num_experts) {
    add(kLinear, 0);
    if (tp == 1) add(kRoundRobin, 0);
  }
  for (const int32_t redundant : redundant_counts(spec, ep)) {
    for (const std::string_view rule : balance_rules()) {
      if (tp > 1 && rule != "global") continue;
      if (rule_serves(rule, cluster, spec, ep * tp, redundant)) add(rule, redundant);
    }
  }
}

ExpertSlots slots_of(const ExpertPlacement& placement) {
  ExpertSlots slots{.num_experts = placement.num_experts, .logical_of = {}, .first_of = {0}};
  for (const std::vector<int32_t>& experts : placement.experts_of) {
    for (const int32_t physical : experts) {
      slots.logical_of.push_back(placement.logical_of[static_cast<size_t>(physical)]);
    }
    slots.first_of.push_back(static_cast<int32_t>(slots.logical_of.size()));
  }
  return slots;
}

ExpertSlots fixed_slots(const Strategy& strategy, int64_t num_experts) {
  return slots_of(make_placement(
      num_experts, {.ep_size = strategy.ep,
                    .placement = strategy.placement == kRoundRobin ? PlacementStrategy::kRoundRobin
                                                                   : PlacementStrategy::kLinear,
                    .num_redundant_experts = strategy.redundant_experts}));
}

}  // namespace

bool Strategy::is_balanced() const {
  return !placement.empty() && placement != kLinear && placement != kRoundRobin;
}

std::string Strategy::name() const {
  if (group() == 1) return "1 GPU";
  if (ep == 1) return fmt::format("TP {}", tp);
  std::string text = fmt::format("EP {}", ep);
  if (tp > 1) text += fmt::format(" x TP {}", tp);
  text += " " + placement;
  if (redundant_experts > 0) text += fmt::format(" +{}", redundant_experts);
  return text;
}

GroupShape group_shape(const Cluster& cluster, const Strategy& strategy) {
  const int32_t group = strategy.group();
  const int32_t per_node = std::min(group, cluster.gpus_per_node);
  return {.nodes = (group + per_node - 1) / per_node, .per_node = per_node};
}

GroupShape expert_group_shape(const Cluster& cluster, const Strategy& strategy) {
  GroupShape shape = group_shape(cluster, strategy);
  shape.per_node = std::max(shape.per_node / strategy.tp, 1);
  return shape;
}

std::vector<Strategy> candidate_strategies(const Cluster& cluster, const MoeSpec& spec) {
  std::vector<Strategy> list;
  if (cluster.num_gpus() == 1) return {Strategy{}};
  for (const int32_t tp : std::set<int32_t>{cluster.gpus_per_node, cluster.num_gpus()}) {
    if (tp > 1 && slices_fit(spec, tp)) list.push_back({.ep = 1, .tp = tp});
  }
  for (const int32_t ep : expert_group_sizes(cluster)) {
    add_expert_parallel(cluster, spec, ep, 1, list);
  }
  for (const int32_t group : expert_group_sizes(cluster)) {
    for (int32_t tp = 2; tp < std::min(group, cluster.gpus_per_node + 1); tp *= 2) {
      if (cluster.gpus_per_node % tp != 0 || !slices_fit(spec, tp)) continue;
      add_expert_parallel(cluster, spec, group / tp, tp, list);
    }
  }
  return list;
}

ExpertSlots place_experts(const Strategy& strategy, const Cluster& cluster, const MoeSpec& spec,
                          std::span<const double> load) {
  if (!strategy.is_balanced()) return fixed_slots(strategy, spec.num_experts);
  const GroupShape shape = group_shape(cluster, strategy);
  BalanceRequest request{.rule = strategy.placement,
                         .num_ranks = strategy.ep,
                         .num_redundant_experts = strategy.redundant_experts,
                         .num_nodes = shape.nodes,
                         .num_groups = spec.router.num_groups};
  if (strategy.placement == "steady") {
    request.previous = fixed_slots(strategy, spec.num_experts).logical_of;
  }
  // A layer that was never used may be placed in any way.
  const bool used = std::ranges::any_of(load, [](double rows) { return rows > 0; });
  const std::vector<double> even(used ? 0 : load.size(), 1.0);
  return balance_experts(used ? load : std::span<const double>(even), request);
}

}  // namespace conclave::tool
