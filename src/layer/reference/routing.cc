#include "layer/reference/routing.h"

#include "core/float_convert.h"
#include "core/shared_facts.h"
#include "layer/arguments.h"
#include "layer/choice_limits.h"
#include "layer/router_vectors.h"
#include "routing/limits.h"
#include "routing/router.h"

#include "conclave/error.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace {

double round_logit(double logit, DType dtype) {
  if (dtype == DType::kBF16) return double{bf16_to_float(double_to_bf16(logit))};
  if (dtype == DType::kF16) return double{f16_to_float(double_to_f16(logit))};
  return double{static_cast<float>(logit)};
}

void compute_logits(const MoeSpec& spec, const WeightSource& source, const ReferenceArgs& args,
                    ReferenceResult& result) {
  if (!args.router_logits.empty()) {
    result.logits = to_float64(args.router_logits).values;
    return;
  }
  if (!spec.has_gate) return;
  const Float64Matrix input = reference_gate_input(spec, source, args.hidden, args.router_input);
  const Float64Matrix gate = read_float64(source, weights::kRouter, 0);
  const Float64Matrix bias = reference_logit_bias(spec, source);
  result.logits.reserve(static_cast<size_t>(input.rows * gate.rows));
  for (int64_t token = 0; token < input.rows; ++token) {
    for (int64_t expert = 0; expert < gate.rows; ++expert) {
      const double logit = dot(gate.row(expert), input.row(token), gate.cols) + bias.row(0)[expert];
      result.logits.push_back(round_logit(logit, spec.router.logits_dtype));
    }
  }
}

// All ids of a token, -1 for an id that its slot may not hold.
std::vector<int32_t> given_ids(const MoeSpec& spec, const ReferenceArgs& args, int64_t token) {
  std::vector<int32_t> ids;
  for (int64_t slot = 0; slot < num_slots(spec); ++slot) {
    const int64_t id = load_id(args.topk_ids, token, slot);
    ids.push_back(is_slot_id(spec, slot, id) ? static_cast<int32_t>(id) : -1);
  }
  return ids;
}

// A token's row of bans; null if nothing is banned.
const uint8_t* bans_at(const ReferenceArgs& args, int64_t token) {
  const routing::Banned banned = bans_of(args.banned_experts);
  return banned.any() ? banned.rows + token * banned.stride : nullptr;
}

// Those of them that the limits of a call leave.
std::vector<int32_t> limited_ids(const MoeSpec& spec, const ReferenceArgs& args, int64_t token) {
  std::vector<int32_t> ids = given_ids(spec, args, token);
  const uint8_t* const banned = bans_at(args, token);
  const int64_t choices = args.top_k != 0 ? args.top_k : spec.top_k;
  for (int64_t slot = 0; slot < spec.top_k; ++slot) {
    int32_t& id = ids[static_cast<size_t>(slot)];
    const bool is_banned = banned != nullptr && id >= 0 && banned[id] != 0;
    if (slot >= choices || is_banned) id = -1;
  }
  return ids;
}

// Fills up to k slots: those that the call asked for, without banned experts and, of what a router
// chose, without those of groups that it did not keep.
void apply_limits(const MoeSpec& spec, const uint8_t* banned, bool chosen,
                  routing::ReferenceChoice& choice) {
  const bool drops_weightless = chosen && routing::bans_leave_groups(spec);
  for (size_t slot = 0; banned != nullptr && slot < choice.ids.size(); ++slot) {
    const int32_t id = choice.ids[slot];
    const bool weightless = drops_weightless && static_cast<float>(choice.weights[slot]) == 0;
    if (!weightless && (id < 0 || banned[id] == 0)) continue;
    choice.ids[slot] = -1;
    choice.weights[slot] = 0;
  }
  choice.ids.resize(static_cast<size_t>(spec.top_k), -1);
  choice.weights.resize(static_cast<size_t>(spec.top_k), 0);
}

// Routes one token by the rule, choosing or at the given ids.
routing::ReferenceChoice route_token(const MoeSpec& spec, const RouterVectors& vectors,
                                     const ReferenceArgs& args, int64_t token,
                                     const ReferenceResult& result) {
  std::vector<int32_t> ids;
  if (!args.topk_ids.empty()) ids = given_ids(spec, args, token);
  std::vector<double> logits;
  if (!result.logits.empty()) {
    const auto first = result.logits.begin() + token * num_logits(spec);
    logits.assign(first, first + num_logits(spec));
  }
  const uint8_t* const banned = bans_at(args, token);
  for (int64_t column = 0;
       banned != nullptr && !logits.empty() && column < spec.num_experts + spec.num_zero_experts;
       ++column) {
    if (banned[column] != 0) {
      logits[static_cast<size_t>(column)] = -std::numeric_limits<double>::infinity();
    }
  }
  const bool fewer = args.top_k != 0 && args.top_k < spec.top_k;
  routing::ReferenceChoice choice = routing::route_reference(
      fewer ? routing::with_fewer_choices(spec, args.top_k) : spec,
      {.logits = logits.empty() ? nullptr : logits.data(),
       .given_ids = ids.empty() ? nullptr : ids.data(),
       .token_id = args.token_ids.empty() ? 0 : load_token_id(args.token_ids, token),
       .number = token,
       .banned = banned,
       .table_columns = spec.top_k,
       .weights = vectors.view()});
  apply_limits(spec, banned, ids.empty(), choice);
  // Shared experts that are slots follow the router's k; a replay may leave some out.
  for (int64_t slot = spec.top_k; slot < num_slots(spec); ++slot) {
    const bool used = ids.empty() || ids[static_cast<size_t>(slot)] >= 0;
    const int64_t id = spec.num_experts + slot - spec.top_k;
    choice.ids.push_back(used ? static_cast<int32_t>(id) : -1);
    choice.weights.push_back(spec.shared.slot_weight);
  }
  return choice;
}

void append(std::vector<double>& to, const std::vector<double>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

void check_token_ids(const MoeSpec& spec, const ReferenceArgs& args, int64_t tokens) {
  const int64_t num_ids = routing::router_traits(spec).num_token_ids;
  if (num_ids == 0 || !args.topk_ids.empty()) return;
  if (args.token_ids.shape != Shape{tokens}) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = "token_ids",
                                    .expected = Shape{tokens}.to_string(),
                                    .found = args.token_ids.shape.to_string()});
  }
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t id = load_token_id(args.token_ids, token);
    if (id >= 0 && id < num_ids) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a token id is out of range at token " + std::to_string(token),
                 .tensor = "token_ids",
                 .found = std::to_string(id),
                 .limit = "0 to " + std::to_string(num_ids - 1)});
  }
}

}  // namespace

Float64Matrix reference_gate_input(const MoeSpec& spec, const WeightSource& source,
                                   const ConstTensorView& hidden,
                                   const ConstTensorView& router_input) {
  Float64Matrix input = to_float64(router_input.empty() ? hidden : router_input);
  if (!spec.router.input_norm.enabled) return input;
  const Float64Matrix scale = read_float64(source, weights::kRouterInputScale, 0);
  const auto width = static_cast<double>(input.cols);
  for (int64_t token = 0; token < input.rows; ++token) {
    double* row = input.row(token);
    const double mean = dot(row, row, input.cols) / width;
    for (int64_t h = 0; h < input.cols; ++h) {
      row[h] = row[h] / std::sqrt(mean + spec.router.input_norm.epsilon) * scale.row(0)[h] *
               std::pow(width, -0.5);
    }
  }
  return input;
}

Float64Matrix reference_logit_bias(const MoeSpec& spec, const WeightSource& source) {
  if (spec.router.has_logit_bias) return read_float64(source, weights::kRouterBias, 0);
  const int64_t logits = num_logits(spec);
  return {.rows = 1, .cols = logits, .values = std::vector<double>(static_cast<size_t>(logits))};
}

void reference_routing(const MoeSpec& spec, const WeightSource& source, const ReferenceArgs& args,
                       ReferenceResult& result) {
  const int64_t tokens = args.hidden.shape[0];
  const bool has_weights = !args.topk_weights.empty();
  if (has_weights) {
    result.topk_weights = to_float64(args.topk_weights).values;
    for (int64_t token = 0; token < tokens; ++token) {
      const std::vector<int32_t> ids = limited_ids(spec, args, token);
      result.topk_ids.insert(result.topk_ids.end(), ids.begin(), ids.end());
    }
    if (!shared_facts(spec).by_router()) return;
  }
  compute_logits(spec, source, args, result);
  const RouterVectors vectors = read_router_vectors(spec, source);
  check_token_ids(spec, args, tokens);
  for (int64_t token = 0; token < tokens; ++token) {
    const routing::ReferenceChoice choice = route_token(spec, vectors, args, token, result);
    append(result.shared_weights, choice.shared_weights);
    if (has_weights) continue;
    append(result.topk_weights, choice.weights);
    result.topk_ids.insert(result.topk_ids.end(), choice.ids.begin(), choice.ids.end());
  }
}

}  // namespace conclave::inline v0
