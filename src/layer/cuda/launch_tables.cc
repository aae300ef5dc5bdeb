#include "layer/cuda/launch_tables.h"

#include "core/shared_facts.h"
#include "core/verdicts.h"
#include "dispatch/cuda/window_rows.h"
#include "dispatch/cuda/window_sums.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

// "1 to 96 tokens, 200 to 300 tokens": the calls of the rungs that `serves` names.
template <class Rung, class Serves>
std::string calls_of(const std::vector<Rung>& ladder, const Serves& serves) {
  std::string text;
  int64_t first = 1;
  for (size_t i = 0; i < ladder.size(); ++i) {
    const int64_t begin = first;
    first = ladder[i].last_tokens + 1;
    if (!serves(ladder[i])) continue;
    while (i + 1 < ladder.size() && serves(ladder[i + 1])) ++i;
    first = ladder[i].last_tokens + 1;
    const int64_t last = ladder[i].last_tokens;
    text += text.empty() ? "calls of " : ", ";
    text += begin == last ? fmt::format("{} tokens", last)
                          : fmt::format("{} to {} tokens", begin, last);
  }
  return text;
}

// Lists a catalog's row: the calls that it serves and why, or why it serves none.
template <class Row>
PlanRow verdict_by_calls(const char* table, const Row& row, const Support& support,
                         const std::string& calls) {
  return verdict_on(
      table, row.name, support, !calls.empty(),
      calls.empty() ? "no number of tokens prefers it" : fmt::format("{}: {}", calls, row.reason));
}

void choose_gate(CudaPlan& plan, const char* table, int64_t num_logits,
                 std::vector<gemm::GateRung>& ladder) {
  const gemm::DeviceGateProblem problem{.num_logits = num_logits,
                                        .max_tokens = plan.options.max_tokens,
                                        .shared_bytes = plan.device.shared_bytes_per_block};
  ladder = gemm::gate_ladder(problem);
  for (const gemm::DeviceGateRow& row : gemm::device_gate_catalog().rows()) {
    const auto serves = [&row](const gemm::GateRung& rung) { return rung.row == &row; };
    plan.summary.rows.push_back(
        verdict_by_calls(table, row, row.supports(problem), calls_of(ladder, serves)));
  }
}

void choose_gates(CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  GatePlans& gates = plan.gates;
  if (spec.has_gate) choose_gate(plan, "gate product", num_logits(spec), gates.router);
  if (shared_facts(spec).has_sigmoid_gate()) {
    choose_gate(plan, "shared gate", 1, gates.shared_gate);
  }
  if (shared_facts(spec).has_mix_gate()) choose_gate(plan, "mix gate", 2, gates.mix);
  if (spec.latent.size == 0) return;
  choose_gate(plan, "latent down", spec.latent.size, gates.latent_down);
  choose_gate(plan, "latent up", spec.hidden_size, gates.latent_up);
}

// A rank without experts groups nothing, but still counts the load.
int64_t grouped_experts(const CudaMlpPlan& part) {
  return std::max<int64_t>(part.problem.num_local_experts, 1);
}

dispatch::GroupLimits limits_of(const cuda::DeviceInfo& device) {
  return {.cluster_blocks = most_cluster_blocks(device),
          .shared_bytes = device.shared_bytes_per_block};
}

void choose_grouping(const CudaPlan& plan, CudaMlpPlan& part) {
  part.grouping = dispatch::group_ladder({.slots_per_token = part.problem.top_k,
                                          .num_local_experts = grouped_experts(part),
                                          .max_tokens = part.problem.max_tokens,
                                          .limits = limits_of(plan.device)});
}

void list_grouping(CudaPlan& plan) {
  using dispatch::GroupRung;
  const std::vector<GroupRung>& ladder = plan.routed.grouping;
  for (const auto& row : dispatch::device_group_catalog().rows()) {
    const auto serves = [&row](const GroupRung& rung) { return rung.row == &row; };
    const Support support =
        dispatch::supports(row, grouped_experts(plan.routed), limits_of(plan.device));
    plan.summary.rows.push_back(verdict_by_calls("group", row, support, calls_of(ladder, serves)));
  }
  if (ladder.empty()) throw_no_row("group", plan.summary.rows);
  for (const auto& row : dispatch::device_check_catalog().rows()) {
    const auto serves = [&row](const GroupRung& rung) { return rung.check == &row; };
    plan.summary.rows.push_back(
        verdict_by_calls("given ids", row, Support::yes(), calls_of(ladder, serves)));
  }
}

// The route kernel where it chooses the experts, not where it weighs what the router has chosen.
const routing::DeviceRoutePlan* choosing_route(const CudaPlan& plan) {
  const bool chooses = plan.router != nullptr && !plan.router_writes_choices;
  return chooses ? plan.router->finish() : nullptr;
}

void choose_routing(CudaPlan& plan) {
  // Rows that gather are grouped when those of all ranks are there.
  const RouteGroupProblem problem{.route = plan.gathers_rows() ? nullptr : choosing_route(plan),
                                  .num_local_experts = grouped_experts(plan.routed),
                                  .max_tokens = plan.options.max_tokens,
                                  .cluster_blocks = most_cluster_blocks(plan.device),
                                  .shared_bytes = plan.device.shared_bytes_per_block,
                                  .has_replicas = plan.part.has_replicas()};
  plan.routing = route_group_ladder(problem);
  for (const RouteGroupRow& row : route_group_catalog().rows()) {
    const auto serves = [&row](const RouteGroupRung& rung) { return rung.row == &row; };
    plan.summary.rows.push_back(
        verdict_by_calls("route", row, row.supports(problem), calls_of(plan.routing, serves)));
  }
}

void prepare_gate(const std::vector<gemm::GateRung>& ladder, DType weights_dtype) {
  for (const gemm::GateRung& rung : ladder) {
    gemm::prepare_gate_product(rung.row->kernel, weights_dtype);
  }
}

void prepare_grouping(const CudaMlpPlan& part) {
  for (const dispatch::GroupRung& rung : part.grouping) {
    dispatch::prepare_group_kernels(rung.launches.shape);
  }
}

}  // namespace

void choose_launches(CudaPlan& plan) {
  choose_gates(plan);
  choose_routing(plan);
  choose_grouping(plan, plan.routed);
  if (plan.shared) choose_grouping(plan, *plan.shared);
  if (plan.residual) choose_grouping(plan, *plan.residual);
  list_grouping(plan);
}

void prepare_launches(const CudaPlan& plan, const CudaWeights& weights) {
  const GatePlans& gates = plan.gates;
  prepare_gate(gates.router, weights.own[weights::kRouter].dtype);
  prepare_gate(gates.shared_gate, weights.own[weights::kSharedExpertGate].dtype);
  prepare_gate(gates.mix, weights.own[weights::kMixGate].dtype);
  prepare_gate(gates.latent_down, weights.own[weights::kLatentDown].dtype);
  prepare_gate(gates.latent_up, weights.own[weights::kLatentUp].dtype);
  for (const RouteGroupRung& rung : plan.routing) {
    if (rung.shape.blocks > 0) prepare_route_and_group(*choosing_route(plan), rung.shape);
  }
  if (plan.gathers_rows()) dispatch::prepare_window_rows();
  if (plan.gathers_rows() || plan.sums_ranks()) dispatch::prepare_window_sums();
  prepare_grouping(plan.routed);
  if (plan.shared) prepare_grouping(*plan.shared);
  if (plan.residual) prepare_grouping(*plan.residual);
}

dispatch::GroupLaunches routed_launches(const CudaPlan& plan, int64_t tokens) {
  dispatch::GroupLaunches launches = rung_for(plan.routed.grouping, tokens).launches;
  launches.routed = rung_for(plan.routing, tokens).shape;
  return launches;
}

}  // namespace conclave::inline v0
