// Judges a layer's results per token and stage by stage.

#include "core/shared_facts.h"
#include "layer/arguments.h"
#include "layer/reference/arguments.h"
#include "layer/reference/float64_matrix.h"
#include "layer/reference/routing.h"
#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace conclave::inline v0 {
namespace {

// Keeps an all-zero reference row from dividing by zero without hiding a wrong value.
constexpr double kNormFloor = 1e-30;

double norm(const double* values, int64_t count) { return std::sqrt(dot(values, values, count)); }

// |logit - (x . w + b)| / (|x| |w| + |b|), with x as the gate reads it: scale-free, and independent
// of cancellation in the product.
double worst_logit_error(const MoeSpec& spec, const WeightSource& source, const LayerResult& result,
                         const Float64Matrix& logits) {
  const Float64Matrix input =
      reference_gate_input(spec, source, result.hidden, result.router_input);
  const Float64Matrix gate = read_float64(source, weights::kRouter, 0);
  const Float64Matrix bias = reference_logit_bias(spec, source);
  double worst_error = 0;
  for (int64_t token = 0; token < input.rows; ++token) {
    const double x_norm = norm(input.row(token), input.cols);
    for (int64_t expert = 0; expert < gate.rows; ++expert) {
      const double addend = bias.row(0)[expert];
      const double exact = dot(gate.row(expert), input.row(token), gate.cols) + addend;
      const double product_scale = x_norm * norm(gate.row(expert), gate.cols);
      const double scale = std::max(product_scale + std::abs(addend), kNormFloor);
      const double error = std::abs(logits.row(token)[expert] - exact) / scale;
      if (!(error <= worst_error)) worst_error = error;
    }
  }
  return worst_error;
}

void count_token(std::vector<int64_t>& actual, std::vector<int64_t>& expected, StageCheck& check) {
  if (actual == expected) return;
  std::sort(actual.begin(), actual.end());
  std::sort(expected.begin(), expected.end());
  ++(actual == expected ? check.reordered_tokens : check.mismatched_tokens);
}

// Compares the k slots that the router fills. An expert that differs is not compared by weight.
void check_routing(const MoeSpec& spec, const LayerResult& result, const ReferenceResult& expected,
                   StageCheck& check) {
  const Float64Matrix actual_weights = to_float64(result.topk_weights);
  std::vector<int64_t> actual_ids;
  std::vector<int64_t> expected_ids;
  for (int64_t token = 0; token < actual_weights.rows; ++token) {
    actual_ids.clear();
    expected_ids.clear();
    for (int64_t slot = 0; slot < spec.top_k; ++slot) {
      const auto index = static_cast<size_t>(token * num_slots(spec) + slot);
      actual_ids.push_back(load_id(result.topk_ids, token, slot));
      expected_ids.push_back(expected.topk_ids[index]);
      if (actual_ids.back() != expected_ids.back()) {
        ++check.routing_mismatches;
        continue;
      }
      const double weight = expected.topk_weights[index];
      const double difference = std::abs(actual_weights.row(token)[slot] - weight);
      const double error = difference / std::max(std::abs(weight), kNormFloor);
      if (difference != 0 && !(error <= check.worst_weight_error)) check.worst_weight_error = error;
    }
    count_token(actual_ids, expected_ids, check);
  }
}

// Skips an application's router: there is no rule to compare it with.
void check_routing(const MoeSpec& spec, const WeightSource& source, const LayerResult& result,
                   StageCheck& check) {
  if (routing::find_router(spec.router.name) == nullptr) return;
  ReferenceResult expected;
  reference_routing(spec, source,
                    {.hidden = result.hidden,
                     .router_logits = result.logits,
                     .token_ids = result.token_ids,
                     .top_k = result.top_k,
                     .banned_experts = result.banned_experts},
                    expected);
  check_routing(spec, result, expected, check);
}

// Subtracts each token's allowance from its error. NaN stays, since it is not below 0.
void take_off_allowances(const ReferenceResult& reference, StageCheck& check) {
  const size_t tokens = check.token_errors.size();
  if (tokens == 0) return;
  const auto cols = static_cast<int64_t>(reference.output.size() / tokens);
  for (size_t token = 0; token < tokens; ++token) {
    const double allowance = reference.allowance[token];
    if (allowance == 0) continue;
    ++check.ambiguous_tokens;
    const double* row = reference.output.data() + static_cast<int64_t>(token) * cols;
    double& error = check.token_errors[token];
    error -= allowance / std::max(norm(row, cols), kNormFloor);
    if (error < 0) error = 0;
  }
}

}  // namespace

std::vector<double> token_errors(const ConstTensorView& actual, std::span<const double> expected) {
  const Float64Matrix rows = to_float64(actual);
  if (static_cast<int64_t>(expected.size()) != rows.rows * rows.cols) {
    throw Error(ErrorCode::kShape, {.what = "actual and expected differ in size",
                                    .expected = std::to_string(expected.size()) + " elements",
                                    .found = actual.shape.to_string()});
  }
  std::vector<double> errors;
  errors.reserve(static_cast<size_t>(rows.rows));
  for (int64_t token = 0; token < rows.rows; ++token) {
    const double* reference = expected.data() + token * rows.cols;
    double squared = 0;
    for (int64_t h = 0; h < rows.cols; ++h) {
      const double difference = rows.row(token)[h] - reference[h];
      squared += difference * difference;
    }
    errors.push_back(std::sqrt(squared) / std::max(norm(reference, rows.cols), kNormFloor));
  }
  return errors;
}

double worst(std::span<const double> errors) {
  double largest = 0;
  for (const double error : errors) {
    if (std::isnan(error)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, error);
  }
  return largest;
}

double accuracy_bar(DType weight_dtype, DType out_dtype) {
  const bool all_float32 = weight_dtype == DType::kF32 && out_dtype == DType::kF32;
  return all_float32 ? 5e-6 : 6e-3;
}

StageCheck check_against_reference(const Context& context, const MoeSpec& spec,
                                   const WeightSource& source, const LayerResult& result) {
  // The logits serve two checks below, beside the oracle itself.
  ReferenceArgs given{.hidden = result.hidden,
                      .router_logits = result.logits,
                      .topk_ids = result.topk_ids,
                      .topk_weights = result.topk_weights,
                      .router_input = result.router_input,
                      .residual_input = result.residual_input,
                      .token_ids = result.token_ids,
                      .top_k = result.top_k,
                      .banned_experts = result.banned_experts,
                      .adapters = result.adapters,
                      .adapter_ids = result.adapter_ids,
                      .code_ambiguity = result.code_ambiguity,
                      .tp_size = result.tp_size};
  check_reference_arguments(given, spec);
  StageCheck check;
  if (!result.logits.empty()) {
    if (spec.has_gate) {
      check.worst_logit_error = worst_logit_error(spec, source, result, to_float64(result.logits));
    }
    check_routing(spec, source, result, check);
  }
  // A result holds no weights of shared experts: the oracle takes them from the logits.
  const bool router_weighs_shared = shared_facts(spec).by_router();
  if (!router_weighs_shared) given.router_logits = {};
  const ReferenceResult reference = reference_forward(context, spec, source, given);
  check.token_errors = token_errors(result.output, reference.output);
  take_off_allowances(reference, check);
  check.worst_token_error = worst(check.token_errors);
  return check;
}

}  // namespace conclave::inline v0
