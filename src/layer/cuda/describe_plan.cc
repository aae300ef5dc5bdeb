#include "layer/cuda/describe_plan.h"

#include "comm/one_launch.h"
#include "core/part_spec.h"
#include "core/weight_types.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/book_workspace.h"
#include "layer/cuda/gathered_row.h"
#include "layer/cuda/row_format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Those of the rungs, in their order.
std::string arithmetic_text(const CudaPlan& plan) {
  std::vector<std::string_view> names;
  for (const experts::LadderRung& rung : plan.routed.ladder) {
    if (std::ranges::find(names, rung.row->arithmetic) == names.end()) {
      names.push_back(rung.row->arithmetic);
    }
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

size_t weight_bytes(const experts::ExpertsProblem& problem) {
  const int64_t halves = problem.activation.gated ? 2 : 1;
  const DType dtype = problem.weight_dtype;
  const int64_t rows = halves * problem.intermediate_size;
  const auto row_of = [&](int64_t columns) {
    return padded_row(experts::stored_columns(problem, columns), dtype);
  };
  const int64_t gate_up = rows * row_of(problem.input_columns());
  const int64_t down = problem.hidden_size * row_of(problem.intermediate_size);
  return static_cast<size_t>(packed_bytes(dtype, problem.num_local_experts * (gate_up + down)));
}

// D1 requires a fixed order in every sum.
std::string determinism_text(const CudaPlan& plan) {
  if (plan.options.determinism == Determinism::kBatchInvariant) return "D1 D2";
  const CallRange calls{.first = 1, .last = plan.gathered(plan.options.max_tokens)};
  return tokens_added(plan.routed.ladder, calls) > 0 ? "none" : "D1";
}

void summarise_workspace(CudaPlan& plan) {
  const auto total = [&](int64_t tokens) { return workspace_bytes(plan, tokens); };
  Plan& summary = plan.summary;
  int64_t first = 1;
  if (plan.decode_tokens > 0) {
    summary.ladder.push_back({.first_tokens = first,
                              .last_tokens = plan.decode_tokens,
                              .kernel = std::string(plan.decode_row->name),
                              .tile = "",
                              .reason = "one launch",
                              .workspace_bytes = total(plan.decode_tokens)});
    first = plan.decode_tokens + 1;
  }
  for (const experts::LadderRung& rung : plan.routed.ladder) {
    // Where rows gather, calls to which every rank brings as many tokens.
    const int64_t last = rung.last_tokens / plan.gathered(1);
    if (last < first) continue;
    summary.ladder.push_back({.first_tokens = first,
                              .last_tokens = last,
                              .kernel = std::string(rung.row->name),
                              .tile = experts::to_string(rung.tile),
                              .reason = rung.reason,
                              .workspace_bytes = total(last)});
    first = last + 1;
  }
  summary.workspace_bytes = total(plan.options.max_tokens);
  const WorkspaceBooking largest = book_every_rung(plan, plan.options.max_tokens).back();
  summary.buffers = describe_buffers(plan.stages, largest.slices);
}

std::string travelling_text(const CudaPlan& plan) {
  const DType narrow = gathered_row(plan, DType::kBF16).dtype;
  const DType wide = gathered_row(plan, DType::kF32).dtype;
  if (travels_as_codes(plan)) return fmt::format("codes of {} with scales", to_string(narrow));
  return narrow == wide ? std::string(to_string(narrow)) : "the caller's type";
}

}  // namespace

void list_launches(CudaPlan& plan, const char* table, const Communicator& ranks) {
  const Support support = comm::one_launch_support(ranks);
  plan.summary.rows.push_back(
      {.table = table,
       .name = "one launch",
       .chosen = static_cast<bool>(support),
       .reason = support ? "ranks store into each other's memory" : support.reason()});
}

void list_exchange(CudaPlan& plan) {
  const int64_t least = gathered_row(plan, DType::kBF16).bytes;
  const int64_t most = most_gathered_row_bytes(plan);
  const std::string bytes =
      least == most ? std::to_string(least) : fmt::format("{} to {}", least, most);
  plan.summary.rows.push_back(
      {.table = "exchange",
       .name = "rows",
       .chosen = true,
       .reason = fmt::format("{} bytes of a token to each other rank: {}, ids and weights", bytes,
                             travelling_text(plan))});
  const DType sums = plan.part_dtype();
  const int64_t columns = padded_row(plan.routed.problem.hidden_size, sums);
  plan.summary.rows.push_back(
      {.table = "exchange",
       .name = "sums",
       .chosen = true,
       .reason = fmt::format("{} bytes of a token from each other rank: {}, added in rank order",
                             columns * byte_size(sums), to_string(sums))});
  list_launches(plan, "exchange", *plan.part.expert_communicator);
}

void summarise(CudaPlan& plan) {
  Plan& summary = plan.summary;
  const MoeSpec& spec = plan.spec;
  summary.arithmetic = arithmetic_text(plan);
  summary.determinism = determinism_text(plan);
  summary.router = spec.router.name;
  summary.stages = listed_stages(plan.stages.list);
  summary.part = describe_part(plan.part, spec, plan.parallel);
  summary.max_tokens = plan.options.max_tokens;
  summary.num_local_experts = static_cast<int64_t>(plan.part.local_experts.size());
  summary.packed_layout = "canonical.v1";
  summary.packed_bytes = weight_bytes(plan.routed.problem);
  for (const std::optional<CudaMlpPlan>* part : {&plan.shared, &plan.residual}) {
    if (*part) summary.packed_bytes += weight_bytes((*part)->problem);
  }
  summarise_workspace(plan);
  if (!plan.summary.ladder.empty()) summary.tile = plan.summary.ladder.back().tile;
}

}  // namespace conclave::inline v0
