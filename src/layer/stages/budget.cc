#include "layer/stages/budget.h"

#include "layer/choice_limits.h"
#include "layer/stages/host_chunk.h"
#include "routing/expert_budget.h"

#include <algorithm>
#include <span>
#include <vector>

namespace conclave::inline v0 {
namespace {

// The call without anything that it writes but times: it runs once more.
ForwardArgs routed_only(const ForwardArgs& args) {
  ForwardArgs only = args;
  only.captured_logits = {};
  only.captured_ids = {};
  only.captured_weights = {};
  only.expert_load = {};
  return only;
}

// Adds the sums of all ranks up.
void share(routing::ExpertWeightSums& sums, Communicator& ranks) {
  const std::span<int64_t> words = sums.words();
  std::vector<int64_t> total(words.size());
  ranks.all_reduce(std::as_bytes(words), std::as_writable_bytes(std::span(total)), DType::kI64,
                   ReduceOp::kSum, "forward: share the budget of experts");
  std::ranges::copy(total, words.begin());
}

}  // namespace

std::optional<routing::ExpertBans> bans_of_budget(const HostCall& call,
                                                  Communicator* communicator) {
  const MoeSpec& spec = call.plan.spec;
  const ForwardArgs args = routed_only(call.args);
  const HostCall routed{.plan = call.plan,
                        .weights = call.weights,
                        .args = args,
                        .epoch = call.epoch,
                        .tokens = call.tokens,
                        .chunks = call.chunks,
                        .workspace = call.workspace,
                        .executor = call.executor};
  routing::ExpertWeightSums sums(spec.num_experts);
  for (int64_t index = 0; index < call.chunks; ++index) {
    sums.add(HostChunk(routed, index).route_only());
  }
  if (communicator != nullptr) share(sums, *communicator);
  if (sums.num_used() <= call.args.expert_budget) return std::nullopt;
  return routing::ExpertBans(sums.left_out(call.args.expert_budget, spec.num_zero_experts),
                             bans_of(call.args.banned_experts), call.tokens);
}

ConstTensorView view_of(const routing::ExpertBans& bans, const HostCall& call) {
  const MoeSpec& spec = call.plan.spec;
  const int64_t columns = spec.num_experts + spec.num_zero_experts;
  return {.data = bans.banned().rows,
          .dtype = DType::kBool,
          .shape = bans.by_token() ? Shape{call.tokens, columns} : Shape{columns}};
}

}  // namespace conclave::inline v0
