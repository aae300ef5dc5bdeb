#include "layer/cuda/one_launch.h"

#include "core/verdicts.h"
#include "experts/ladder.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Yes if the row can do the whole forward for few tokens in one launch.
Support one_launch_fits(const CudaPlan& plan, const experts::OneLaunchRow& row) {
  if (plan.routed.problem.num_local_experts == 0) return Support::no("no experts are here");
  if (plan.options.determinism == Determinism::kBatchInvariant) {
    return Support::no("its sums run in another order; LayerOptions ask for batch invariance");
  }
  if (plan.options.kernel == row.name) {
    return Support::no("serves few tokens only, beside another kernel: it cannot be forced");
  }
  if (!plan.options.kernel.empty()) {
    return Support::no("LayerOptions ask for " + plan.options.kernel);
  }
  // It multiplies an expert's weights with a token's row once, even if two choices name the expert.
  if (plan.spec.weight_on == WeightOn::kInput && plan.spec.top_k > 1) {
    return Support::no("every choice reads a row of its own");
  }
  if (!plan.router_limit.empty()) return Support::no(plan.router_limit);
  if (!plan.end.only_slots) {
    return Support::no("the layer does more than a weighted sum of its slots");
  }
  return row.supports(plan.routed.problem);
}

// The most tokens of a call that the row can take.
int64_t one_launch_limit(const CudaPlan& plan, const experts::OneLaunchRow& row) {
  return std::min(row.reach(plan.routed.problem).most, plan.options.max_tokens);
}

// The most tokens that the row serves: by rule, or as far as measured entries prefer it.
int64_t one_launch_tokens(const CudaPlan& plan, const experts::OneLaunchRow& row) {
  const experts::OneLaunchReach reach = row.reach(plan.routed.problem);
  const int64_t most = one_launch_limit(plan, row);
  const int64_t by_rule = std::min(most, reach.preferred);
  if (plan.options.tuning == nullptr) return by_rule;
  const TuningKey key = experts::tuning_key(plan.routed.problem);
  for (int64_t tokens = 1; tokens <= most; ++tokens) {
    const TuningEntry* const entry = plan.options.tuning->find(key, tokens);
    const bool measured = entry != nullptr && entry->tokens <= reach.measured;
    const bool serves = measured ? entry->kernel == row.name : tokens <= by_rule;
    if (!serves) return tokens - 1;
  }
  return most;
}

}  // namespace

void choose_one_launch(CudaPlan& plan) {
  const TableChoice table{.table = "kernel", .why = "serves few tokens in one launch"};
  const auto rows = experts::one_launch_kernels().rows();
  const auto fits = [&](const experts::OneLaunchRow& row) { return one_launch_fits(plan, row); };
  std::vector<PlanRow>& verdicts = plan.summary.rows;
  plan.decode_row = settle_first(list_fitting(rows, table, fits, verdicts), table, verdicts);
  if (plan.decode_row != nullptr) plan.decode_tokens = one_launch_tokens(plan, *plan.decode_row);
}

std::vector<TuningEntry> list_candidates(const CudaPlan& plan, int64_t tokens) {
  std::vector<TuningEntry> entries;
  const auto entry_of = [&](const experts::KernelRow& row, std::string tile) {
    return TuningEntry{.key = experts::tuning_key(plan.routed.problem),
                       .tokens = tokens,
                       .kernel = std::string(row.name),
                       .tile = std::move(tile)};
  };
  for (const experts::OneLaunchRow& row : experts::one_launch_kernels().rows()) {
    const bool fits = one_launch_fits(plan, row) && tokens <= one_launch_limit(plan, row);
    if (fits) entries.push_back(entry_of(row, ""));
  }
  for (const experts::DeviceKernelRow& row : experts::device_kernels().rows()) {
    const bool forced_out = !plan.options.kernel.empty() && row.name != plan.options.kernel;
    // The reference kernel serves only if nothing else fits.
    const bool unneeded = row.is_reference && !entries.empty();
    if (forced_out || unneeded || !row.supports(plan.routed.problem)) continue;
    for (const experts::DeviceTile& tile : row.tiles(plan.routed.problem)) {
      entries.push_back(entry_of(row, experts::to_string(tile)));
    }
  }
  return entries;
}

}  // namespace conclave::inline v0
