#include "conclave/reference.h"

#include "core/float_convert.h"
#include "layer/arguments.h"
#include "layer/packed_weights.h"
#include "layer/reference/float64_matrix.h"
#include "layer/reference/parts.h"
#include "routing/router.h"

#include "conclave/error.h"

#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

double round_logit(double logit, DType dtype) {
  if (dtype == DType::kBF16) return bf16_to_float(double_to_bf16(logit));
  if (dtype == DType::kF16) return f16_to_float(double_to_f16(logit));
  return static_cast<float>(logit);
}

void compute_logits(const MoeSpec& spec, const WeightSource& source, const ReferenceArgs& args,
                    const Float64Matrix& hidden, ReferenceResult& result) {
  if (!args.router_logits.empty()) {
    result.logits = to_float64(args.router_logits).values;
    return;
  }
  const Float64Matrix gate = read_float64(source, WeightRole::kRouter, 0);
  result.logits.reserve(static_cast<size_t>(hidden.rows * gate.rows));
  for (int64_t token = 0; token < hidden.rows; ++token) {
    for (int64_t expert = 0; expert < gate.rows; ++expert) {
      const double logit = dot(gate.row(expert), hidden.row(token), gate.cols);
      result.logits.push_back(round_logit(logit, spec.router.logits_dtype));
    }
  }
}

void copy_given_routing(const MoeSpec& spec, const ReferenceArgs& args, int64_t tokens,
                        ReferenceResult& result) {
  result.topk_weights = to_float64(args.topk_weights).values;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t slot = 0; slot < num_slots(spec); ++slot) {
      const int64_t id = load_id(args.topk_ids, token, slot);
      result.topk_ids.push_back(is_slot_id(spec, slot, id) ? static_cast<int32_t>(id) : -1);
    }
  }
}

// Shared experts that are slots, behind the k that the router chose.
void append_fused_slots(const MoeSpec& spec, int64_t tokens, ReferenceResult& result) {
  if (spec.shared.mode != SharedMode::kFusedSlots) return;
  const std::vector<int32_t> ids = std::move(result.topk_ids);
  const std::vector<double> weights = std::move(result.topk_weights);
  result.topk_ids.clear();
  result.topk_weights.clear();
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t slot = 0; slot < num_slots(spec); ++slot) {
      const bool routed = slot < spec.top_k;
      const auto at = static_cast<size_t>(token * spec.top_k + slot);
      const int64_t shared_id = spec.num_experts + slot - spec.top_k;
      result.topk_ids.push_back(routed ? ids[at] : static_cast<int32_t>(shared_id));
      result.topk_weights.push_back(routed ? weights[at] : spec.shared.slot_weight);
    }
  }
}

void route(const MoeSpec& spec, const WeightSource& source, const ReferenceArgs& args,
           const Float64Matrix& hidden, ReferenceResult& result) {
  if (!args.topk_ids.empty()) return copy_given_routing(spec, args, hidden.rows, result);
  compute_logits(spec, source, args, hidden, result);
  const auto slots = static_cast<size_t>(hidden.rows * spec.top_k);
  result.topk_ids.resize(slots);
  result.topk_weights.resize(slots);
  for (int64_t token = 0; token < hidden.rows; ++token) {
    routing::route_reference(spec, result.logits.data() + token * spec.num_experts,
                             result.topk_ids.data() + token * spec.top_k,
                             result.topk_weights.data() + token * spec.top_k);
  }
  append_fused_slots(spec, hidden.rows, result);
}

// `rows` are [T, H] like `sum`, or empty.
void add_rows(const std::vector<double>& rows, std::vector<double>& sum) {
  for (size_t index = 0; index < rows.size(); ++index) sum[index] += rows[index];
}

}  // namespace

ReferenceResult reference_forward(const Context& context, const MoeSpec& spec,
                                  const WeightSource& source, const ReferenceArgs& args) {
  validate(spec);
  check_source(spec, source);
  if (args.hidden.shape.rank() != 2 || args.hidden.shape[1] != spec.hidden_size) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = "hidden",
                                    .expected = "[T, " + std::to_string(spec.hidden_size) + "]",
                                    .found = args.hidden.shape.to_string()});
  }
  const Float64Matrix hidden = to_float64(args.hidden);
  ReferenceResult result;
  route(spec, source, args, hidden, result);
  run_routed(context, spec, source, hidden, result);
  run_shared(context, spec, source, hidden, result);
  mix_parts(spec, source, hidden, result);
  run_residual(context, spec, source,
               args.residual_input.empty() ? hidden : to_float64(args.residual_input), result);
  result.output = result.routed;
  add_rows(result.shared, result.output);
  add_rows(result.residual, result.output);
  return result;
}

}  // namespace conclave::inline v0
