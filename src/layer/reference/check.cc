// Judging a layer's results per token and stage by stage.

#include "layer/reference/float64_matrix.h"
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

// |logit - x . w| / (|x| |w|): scale-free, and independent of cancellation in the product.
double worst_logit_error(const WeightSource& source, const Float64Matrix& hidden,
                         const Float64Matrix& logits) {
  const Float64Matrix gate = read_float64(source, WeightRole::kRouter, 0);
  double worst_error = 0;
  for (int64_t token = 0; token < hidden.rows; ++token) {
    const double x_norm = norm(hidden.row(token), hidden.cols);
    for (int64_t expert = 0; expert < gate.rows; ++expert) {
      const double exact = dot(gate.row(expert), hidden.row(token), gate.cols);
      const double scale = std::max(x_norm * norm(gate.row(expert), gate.cols), kNormFloor);
      const double error = std::abs(logits.row(token)[expert] - exact) / scale;
      if (!(error <= worst_error)) worst_error = error;
    }
  }
  return worst_error;
}

void check_routing(const MoeSpec& spec, const Float64Matrix& logits, const LayerResult& result,
                   StageCheck& check) {
  std::vector<int32_t> ids(static_cast<size_t>(spec.top_k));
  std::vector<double> weights(static_cast<size_t>(spec.top_k));
  const Float64Matrix actual_weights = to_float64(result.topk_weights);
  const auto* actual_ids = static_cast<const int32_t*>(result.topk_ids.data);
  for (int64_t token = 0; token < logits.rows; ++token) {
    routing::route_reference(spec, logits.row(token), ids.data(), weights.data());
    for (int64_t slot = 0; slot < spec.top_k; ++slot) {
      const auto index = static_cast<size_t>(slot);
      if (actual_ids[token * num_slots(spec) + slot] != ids[index]) {
        ++check.routing_mismatches;
        continue;
      }
      const double difference = std::abs(actual_weights.row(token)[slot] - weights[index]);
      const double error = difference / std::max(weights[index], kNormFloor);
      if (difference != 0 && !(error <= check.worst_weight_error)) check.worst_weight_error = error;
    }
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
  StageCheck check;
  if (!result.logits.empty()) {
    const Float64Matrix logits = to_float64(result.logits);
    if (spec.has_gate) {
      check.worst_logit_error = worst_logit_error(source, to_float64(result.hidden), logits);
    }
    check_routing(spec, logits, result, check);
  }
  const ReferenceResult reference = reference_forward(context, spec, source,
                                                      {.hidden = result.hidden,
                                                       .topk_ids = result.topk_ids,
                                                       .topk_weights = result.topk_weights,
                                                       .residual_input = result.residual_input});
  check.token_errors = token_errors(result.output, reference.output);
  check.worst_token_error = worst(check.token_errors);
  return check;
}

}  // namespace conclave::inline v0
