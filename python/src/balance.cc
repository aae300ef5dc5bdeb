#include "conclave/balance.h"

#include "fields.h"
#include "permute.h"

#include <string>
#include <vector>

namespace conclave::python {
namespace {

ExpertSlots slots_of(int64_t num_experts, std::vector<int32_t> logical_of,
                     std::vector<int32_t> first_of) {
  return {.num_experts = num_experts,
          .logical_of = std::move(logical_of),
          .first_of = std::move(first_of)};
}

}  // namespace

void bind_balance(nb::module_& module) {
  module.def(
      "balance_rules",
      [] {
        std::vector<std::string> names;
        for (const std::string_view name : balance_rules()) names.emplace_back(name);
        return names;
      },
      "The names of rules.");
  module.def(
      "balance_experts",
      [](const std::vector<double>& load, const std::string& rule, int32_t num_ranks,
         int32_t num_redundant_experts, int32_t num_nodes, int64_t num_groups,
         std::vector<int32_t> previous, bool distinct_ranks, double least_gain) {
        ExpertSlots slots = balance_experts(load, {.rule = rule,
                                                   .num_ranks = num_ranks,
                                                   .num_redundant_experts = num_redundant_experts,
                                                   .num_nodes = num_nodes,
                                                   .num_groups = num_groups,
                                                   .previous = std::move(previous),
                                                   .distinct_ranks = distinct_ranks,
                                                   .least_gain = least_gain});
        return std::pair(std::move(slots.logical_of), std::move(slots.first_of));
      },
      nb::arg("load"), nb::arg("rule"), nb::arg("num_ranks"), nb::arg("num_redundant_experts"),
      nb::arg("num_nodes"), nb::arg("num_groups"), nb::arg("previous"), nb::arg("distinct_ranks"),
      nb::arg("least_gain"), "The expert of each slot, and the first slot of each rank.");
  module.def(
      "balancedness",
      [](const std::vector<double>& load, int64_t num_experts, std::vector<int32_t> logical_of,
         std::vector<int32_t> first_of) {
        return balancedness(load,
                            slots_of(num_experts, std::move(logical_of), std::move(first_of)));
      },
      nb::arg("load"), nb::arg("num_experts"), nb::arg("logical_of"), nb::arg("first_of"),
      "The mean over ranks of the rows of each, over the largest.");
  module.def(
      "survives_any_rank",
      [](int64_t num_experts, std::vector<int32_t> logical_of, std::vector<int32_t> first_of) {
        return survives_any_rank(slots_of(num_experts, std::move(logical_of), std::move(first_of)));
      },
      nb::arg("num_experts"), nb::arg("logical_of"), nb::arg("first_of"),
      "Whether every expert is on two ranks at least.");
  module.def(
      "moved_experts",
      [](int64_t num_experts, std::vector<int32_t> before, std::vector<int32_t> after,
         const std::vector<int32_t>& first_of) {
        return moved_experts(slots_of(num_experts, std::move(before), first_of),
                             slots_of(num_experts, std::move(after), first_of));
      },
      nb::arg("num_experts"), nb::arg("before"), nb::arg("after"), nb::arg("first_of"),
      "How many slots have an expert that was not on their rank before.");
  module.def(
      "without_ranks",
      [](int64_t num_experts, const nb::dict& parallel, const std::vector<int32_t>& old_ranks,
         int32_t rank) {
        return parallel_to_dict(
            without_ranks(num_experts, parallel_from_dict(parallel), old_ranks, rank));
      },
      nb::arg("num_experts"), nb::arg("parallel"), nb::arg("old_ranks"), nb::arg("rank"),
      "The split of the ranks that are left.");
  module.def(
      "with_slots",
      [](const nb::dict& parallel, int64_t num_experts, std::vector<int32_t> logical_of,
         std::vector<int32_t> first_of) {
        return parallel_to_dict(
            with_slots(parallel_from_dict(parallel),
                       slots_of(num_experts, std::move(logical_of), std::move(first_of))));
      },
      nb::arg("parallel"), nb::arg("num_experts"), nb::arg("logical_of"), nb::arg("first_of"),
      "A split of a layer with these slots.");
}

}  // namespace conclave::python
