#include "dispatch/ep_plan.h"

#include "core/checked.h"
#include "dispatch/call_checks.h"

#include "conclave/error.h"

#include <algorithm>
#include <numeric>

namespace conclave::inline v0::dispatch {

int64_t bounded_product(int64_t a, int64_t b) {
  if (const auto result = checked_mul(a, b)) return *result;
  throw Error(ErrorCode::kSizeOverflow,
              {.what = "a bound of the expert-parallel plan does not fit 63 bits",
               .found = std::to_string(a) + " x " + std::to_string(b)});
}

EpPlan make_ep_plan(const DispatchProblem& problem) {
  EpPlan plan;
  plan.problem = problem;
  plan.problem.epoch = epoch_of(problem);
  const PlaceTable& places = plan.problem.epoch->places;
  plan.fixed_slots = problem.transport == EpTransport::kFixedSlots;
  plan.reduced = problem.combine == EpCombine::kReducedPerRank;

  const int64_t ranks = problem.ep_size;
  const int64_t tokens = problem.max_tokens;
  for (const auto& row : places.experts) {
    const auto owned = static_cast<int64_t>(row.size());
    plan.results_per_row.push_back(std::min(owned, plan.reduced ? int64_t{1} : problem.top_k));
  }
  const auto self = static_cast<size_t>(problem.ep_rank);
  plan.num_local_experts = static_cast<int64_t>(places.experts[self].size());
  plan.terms = plan.reduced ? ranks : problem.top_k;
  bounded_product(tokens, plan.terms);

  plan.max_send_rows = bounded_product(tokens, std::min(problem.top_k, ranks));
  plan.max_received_rows = plan.num_local_experts == 0 ? 0 : bounded_product(tokens, ranks);
  bounded_product(plan.max_received_rows, problem.top_k);
  plan.slots_per_expert = plan.max_received_rows;
  plan.max_slots = bounded_product(
      plan.max_received_rows,
      plan.fixed_slots ? plan.num_local_experts : std::min(problem.top_k, plan.num_local_experts));
  plan.max_owed_rows = bounded_product(plan.max_received_rows, plan.results_per_row[self]);
  // With fixed slots every rank returns as many results as it could; otherwise a token has at most
  // k.
  const int64_t all_results =
      std::accumulate(plan.results_per_row.begin(), plan.results_per_row.end(), int64_t{0});
  plan.max_home_rows = bounded_product(
      tokens, plan.fixed_slots ? all_results : std::min(problem.top_k, all_results));
  return plan;
}

}  // namespace conclave::inline v0::dispatch
