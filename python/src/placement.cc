#include "conclave/placement.h"

#include "fields.h"
#include "names.h"
#include "permute.h"

#include <string>
#include <vector>

namespace conclave::python {
namespace {

ExpertPlacement placement_of(int64_t num_experts, const nb::dict& parallel) {
  return make_placement(num_experts, parallel_from_dict(parallel));
}

}  // namespace

void bind_placement(nb::module_& module) {
  module.def(
      "expert_map",
      [](int64_t num_experts, const nb::dict& parallel, int32_t num_shared) {
        const ParallelSpec split = parallel_from_dict(parallel);
        return make_placement(num_experts, split).expert_map(split.ep_rank, num_shared);
      },
      nb::arg("num_experts"), nb::arg("parallel"), nb::arg("num_shared") = 0,
      "The local index of each expert on ep_rank, -1 for others; then those of shared experts.");
  module.def(
      "expert_mask",
      [](int64_t num_experts, const nb::dict& parallel, int32_t num_shared) {
        const ParallelSpec split = parallel_from_dict(parallel);
        return make_placement(num_experts, split).expert_mask(split.ep_rank, num_shared);
      },
      nb::arg("num_experts"), nb::arg("parallel"), nb::arg("num_shared") = 0,
      "1 for experts of ep_rank and shared ones, 0 for others; the last is that of the sentinel.");
  module.def(
      "routing_tables",
      [](int64_t num_experts, const nb::dict& parallel) {
        const ParallelSpec split = parallel_from_dict(parallel);
        const RoutingTables tables =
            make_routing_tables(make_placement(num_experts, split), split.ep_rank);
        nb::dict dict;
        dict["position_of_expert"] = tables.position_of_expert;
        dict["expert_at_position"] = tables.expert_at_position;
        dict["expert_of_local"] = tables.expert_of_local;
        return dict;
      },
      nb::arg("num_experts"), nb::arg("parallel"),
      "Between the router's numbering and one in which experts are sorted by rank.");
  module.def(
      "experts_of_ranks",
      [](int64_t num_experts, const nb::dict& parallel) {
        return placement_of(num_experts, parallel).experts_of;
      },
      nb::arg("num_experts"), nb::arg("parallel"), "The experts of each rank, by local index.");
  module.def(
      "expert_map_text", [](const std::vector<int32_t>& map) { return expert_map_text(map); },
      nb::arg("map"), "Local index and expert of every entry but -1, for logs.");
  module.def(
      "placement_strategy",
      [](const std::string& wanted, int64_t num_groups, int32_t num_redundant_experts,
         bool rebalances, bool transport_permits) {
        const StrategyChoice choice =
            determine_placement_strategy({.wanted = parse_word<PlacementStrategy>("wanted", wanted),
                                          .num_groups = num_groups,
                                          .num_redundant_experts = num_redundant_experts,
                                          .rebalances = rebalances,
                                          .transport_permits = transport_permits});
        return std::pair(std::string(word_of(choice.strategy)), choice.reason);
      },
      nb::arg("wanted"), nb::arg("num_groups") = 1, nb::arg("num_redundant_experts") = 0,
      nb::arg("rebalances") = false, nb::arg("transport_permits") = true,
      "The strategy that can be had, and why not the one wanted.");
  module.def(
      "flatten_groups",
      [](int32_t tp_size, int32_t tp_rank, int32_t pcp_size, int32_t pcp_rank, int32_t dp_size,
         int32_t dp_rank, bool expert_parallel, bool sequence_parallel) {
        const ParallelSpec::Groups groups{.tp_size = tp_size,
                                          .tp_rank = tp_rank,
                                          .pcp_size = pcp_size,
                                          .pcp_rank = pcp_rank,
                                          .dp_size = dp_size,
                                          .dp_rank = dp_rank,
                                          .expert_parallel = expert_parallel,
                                          .sequence_parallel = sequence_parallel};
        nb::dict dict = parallel_to_dict(ParallelSpec::flatten(groups));
        dict["needs_all_to_all"] = needs_all_to_all(groups);
        return dict;
      },
      nb::arg("tp_size") = 1, nb::arg("tp_rank") = 0, nb::arg("pcp_size") = 1,
      nb::arg("pcp_rank") = 0, nb::arg("dp_size") = 1, nb::arg("dp_rank") = 0,
      nb::arg("expert_parallel") = false, nb::arg("sequence_parallel") = false,
      "From an engine's groups to the split of its MoE layers.");
}

}  // namespace conclave::python
