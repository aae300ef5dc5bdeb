// Which experts get replicas and which rank holds what, from the rows that each expert had. Pure
// functions: equal loads give equal answers on every rank, so that ranks need not exchange them.
#pragma once

#include "conclave/spec.h"
#include "conclave/version.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

struct BalanceRequest {
  // One of balance_rules():
  //   hierarchical  groups of experts are packed onto nodes, replicas made within a node, and these
  //                 packed onto its ranks: DeepSeek's rule (EPLB), for groups of which a token
  //                 chooses few. Where num_nodes divides num_ranks no more, there is one node;
  //                 where groups do not divide evenly among experts or nodes, the rule is global.
  //   global        the same without groups and nodes: the hottest expert for its replicas gets the
  //                 next one; then the heaviest slot goes to the lightest rank that has room.
  //   surviving     global, with every expert on two ranks at least: any one rank may die. Needs
  //   two
  //                 ranks and a replica for each expert.
  //   steady        begins with `previous` and moves experts one by one, or gives a slot of another
  //                 expert's replicas to one of the busiest rank, while that rank gains.
  std::string rule = "hierarchical";
  int32_t num_ranks = 1;
  // R replicas beside the E experts. The P = E + R slots are spread like a linear placement: the
  // first P % num_ranks ranks hold one more.
  int32_t num_redundant_experts = 0;
  int32_t num_nodes = 1;   // ranks are numbered node by node
  int64_t num_groups = 1;  // RouterSpec::num_groups
  // [P] the expert of each slot as it is now; empty: unknown. With it an expert that stays on its
  // rank keeps its slot there.
  std::vector<int32_t> previous = {};
  // Replicas of an expert lie on different ranks wherever there are enough: two on one rank serve
  // no better than one. False: hierarchical and global do exactly what DeepSeek's functions do.
  bool distinct_ranks = true;
  // For steady: moves that lower the busiest rank's load by less than this part of it are not worth
  // the copy of an expert.
  double least_gain = 0.01;
};

// Says which experts each rank holds.
struct ExpertSlots {
  int64_t num_experts = 0;               // E
  std::vector<int32_t> logical_of = {};  // [P] the expert of each slot, rank by rank
  std::vector<int32_t> first_of = {};    // [ranks + 1]: rank r holds slots first_of[r] onwards

  int32_t num_ranks() const noexcept { return static_cast<int32_t>(first_of.size()) - 1; }
  std::span<const int32_t> of_rank(int32_t rank) const {
    const auto at = static_cast<size_t>(rank);
    return std::span(logical_of)
        .subspan(static_cast<size_t>(first_of[at]),
                 static_cast<size_t>(first_of[at + 1] - first_of[at]));
  }
};

CONCLAVE_API std::span<const std::string_view> balance_rules();

// The slots for experts that had load[e] rows, [E]: counts of routed tokens, as
// MoeLayer::expert_load has them, of any window and without padding. The result depends on nothing
// else than the arguments. Throws Error(kInvalidArgument) naming the field: loads that are not
// finite, negative or all zero; sizes below 1; an unknown rule; `previous` of another size, with
// experts that do not exist or (steady) without some; what `surviving` lacks.
CONCLAVE_API ExpertSlots balance_experts(std::span<const double> load,
                                         const BalanceRequest& request);

// The mean over ranks of the rows that each would have had, over the largest: 1 is perfect.
// Replicas of an expert share its rows evenly. Throws Error(kInvalidArgument) as balance_experts.
CONCLAVE_API double balancedness(std::span<const double> load, const ExpertSlots& slots);

// True if every expert is on two ranks at least.
CONCLAVE_API bool survives_any_rank(const ExpertSlots& slots);

// Slots whose expert was not on their rank before: as many experts travel. Throws
// Error(kInvalidArgument) for another number of ranks or experts.
CONCLAVE_API int64_t moved_experts(const ExpertSlots& before, const ExpertSlots& after);

// The slots of a layer of E experts with `parallel`, experts of a rank in ascending order of their
// physical numbers. Throws Error(kInvalidArgument) as make_placement.
CONCLAVE_API ExpertSlots slots_of(int64_t num_experts, const ParallelSpec& parallel);

// The split of a layer of E experts with `parallel` among the ranks that are left: rank r of it is
// old_ranks[r] of `parallel`, and `rank` is the caller's own. Experts stay where they are; those
// that nobody holds any more go to the ranks with the fewest, lower ones first, and a rank that now
// holds two of an expert gives one up. Equal arguments give equal splits on every rank. Throws
// Error(kInvalidArgument) naming the field: old_ranks that are empty, do not ascend or do not
// exist, a rank that is none of them.
CONCLAVE_API ParallelSpec without_ranks(int64_t num_experts, const ParallelSpec& parallel,
                                        std::span<const int32_t> old_ranks, int32_t rank);

// `parallel` with these slots: ep_size, PlacementStrategy::kCustom, rank_of, replicas. The first
// slot of an expert becomes physical expert e, the others its replicas in the order of slots.
CONCLAVE_API ParallelSpec with_slots(const ParallelSpec& parallel, const ExpertSlots& slots);

}  // namespace conclave::inline v0
