#include "layer/cuda/place_shared.h"

#include "core/part_spec.h"
#include "core/quant_spec.h"
#include "core/shared_facts.h"
#include "layer/problems.h"

#include <fmt/format.h>

#include <string>

namespace conclave::inline v0 {
namespace {

bool same_formula(const ActivationSpec& a, const ActivationSpec& b) {
  return a.name == b.name && a.limit == b.limit && a.alpha == b.alpha && a.beta == b.beta &&
         a.linear_beta == b.linear_beta;
}

// True if a shared expert's intermediate rows may be cut every `columns` columns; scales over whole
// rows forbid it.
bool can_slice(const QuantSpec& quant, int64_t columns) {
  if (quant.weights == WeightScale::kNone) return true;
  const bool whole_blocks = quant.weights != WeightScale::kBlock ||
                            (columns % quant.block_rows == 0 && columns % quant.block_cols == 0);
  const bool whole_scales =
      quant.activations == ActivationScale::kNone ||
      (quant.activations == ActivationScale::kGroup && columns % quant.activation_group == 0);
  return whole_blocks && whole_scales;
}

// Yes if shared experts can run as further experts of the routed ones' launches.
Support fused_support(const CudaPlan& plan, const experts::ExpertsProblem& shared) {
  // The router has one lane per slot; sums of more rows cost more than separate launches.
  constexpr int64_t kMaxSlots = 32;
  constexpr int64_t kMaxShared = 8;
  constexpr int64_t kMaxExperts = 1024;
  const MoeSpec& spec = plan.spec;
  const experts::ExpertsProblem& routed = plan.routed.problem;
  if (plan.shared_form == SharedForm::kSeparate) {
    return Support::no("the weights are used where they lie");
  }
  if (plan.gathers_rows()) return Support::no("tokens of other ranks have theirs there");
  if (routed.num_local_experts == 0) return Support::no("no routed experts are here");
  if (shared.weight_dtype != routed.weight_dtype) return Support::no("weights of another type");
  if (!same_formula(activation_or_routed(spec.shared.activation, spec), spec.activation)) {
    return Support::no("another activation");
  }
  if (shared.has_bias && !routed.has_bias) return Support::no("biases of their own");
  if (shared.hidden_size != routed.hidden_size) return Support::no("another width of rows");
  if (plan.part.has_replicas()) return Support::no("the layer has redundant experts");
  if (plan.routed.has_own_rows()) return Support::no("every slot reads a row of its expert's own");
  if (has_input_scale(spec.quant)) {
    return Support::no("static scales of their own");
  }
  if (spec.weight_on == WeightOn::kInput &&
      (shared_facts(spec).factor != SharedFactor::kNone || plan.weighs_rows)) {
    return Support::no("routed weights are on the input");
  }
  const int64_t width = shared.intermediate_size;
  const int64_t slices = width / routed.intermediate_size;
  if (slices * routed.intermediate_size != width) {
    return Support::no("their width is no multiple of the routed experts'");
  }
  if (slices > 1 && !can_slice(spec.quant, routed.intermediate_size)) {
    return Support::no("scales of whole rows");
  }
  if (shared.skipped_columns != routed.skipped_columns ||
      shared.skipped_rows != routed.skipped_rows) {
    return Support::no("their slice begins at another place of a block of scales");
  }
  const int64_t slots = spec.shared.count * slices;
  if (slots > kMaxShared || routed.top_k + slots > kMaxSlots ||
      routed.num_local_experts + slots > kMaxExperts) {
    return Support::no(fmt::format("{} more slots per token", slots));
  }
  return Support::yes();
}

}  // namespace

void place_shared(CudaPlan& plan, const experts::ExpertsProblem& shared) {
  const Support fused = fused_support(plan, shared);
  plan.summary.rows.push_back({.table = "shared experts",
                               .name = "cuda.same_launches",
                               .chosen = static_cast<bool>(fused),
                               .reason = fused ? "as further experts" : fused.reason()});
  plan.summary.rows.push_back({.table = "shared experts",
                               .name = "cuda.own_launches",
                               .chosen = !fused,
                               .reason = fused ? "the row before fits" : "fits always"});
  if (!fused) {
    plan.shared = mlp_plan(shared);
    return;
  }
  experts::ExpertsProblem& routed = plan.routed.problem;
  const int64_t slices = shared.intermediate_size / routed.intermediate_size;
  plan.fused = {.count = static_cast<int32_t>(plan.spec.shared.count),
                .slices = static_cast<int32_t>(slices)};
  for (int64_t slice = 0; slice < slices; ++slice) {
    const int64_t begin = plan.part.shared_inner.begin + slice * routed.intermediate_size;
    routed.quant =
        quant_of_slice(routed.quant, {.begin = begin, .end = begin + routed.intermediate_size});
  }
  routed.num_local_experts += plan.fused.slots();
  routed.top_k += plan.fused.slots();
}

}  // namespace conclave::inline v0
