#include "checks.h"

#include "choices.h"
#include "output/numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

namespace conclave::tool {
namespace {

// Accepts a matrix or a vector; an empty tensor stays empty.
Tensor gather_rows(const ConstTensorView& tensor, const std::vector<int64_t>& rows) {
  if (tensor.empty()) return {};
  const bool is_vector = tensor.shape.rank() == 1;
  const int64_t cols = is_vector ? 1 : tensor.shape[1];
  const auto count = static_cast<int64_t>(rows.size());
  Tensor gathered(tensor.dtype, is_vector ? Shape{count} : Shape{count, cols});
  const size_t row_bytes = static_cast<size_t>(cols * byte_size(tensor.dtype));
  const auto* from = static_cast<const std::byte*>(tensor.data);
  auto* to = gathered.as<std::byte>();
  for (const int64_t row : rows) {
    std::memcpy(to, from + static_cast<size_t>(row) * row_bytes, row_bytes);
    to += row_bytes;
  }
  return gathered;
}

// For each row, the largest |difference| over the largest |expected| value; returns the worst row.
double worst_relative_difference(const ConstTensorView& actual, const ConstTensorView& expected) {
  const std::vector<double> a = to_float64(actual);
  const std::vector<double> b = to_float64(expected);
  const size_t cols = static_cast<size_t>(actual.shape[1]);
  double worst_row = 0;
  for (size_t begin = 0; begin < a.size(); begin += cols) {
    double difference = 0;
    double scale = 0;
    for (size_t i = begin; i < begin + cols; ++i) {
      difference = std::max(difference, std::abs(a[i] - b[i]));
      scale = std::max(scale, std::abs(b[i]));
    }
    if (difference > 0) worst_row = std::max(worst_row, difference / std::max(scale, 1e-30));
  }
  return worst_row;
}

// Sets the output's part of the result. `tokens` maps rows of `errors` to tokens.
void judge_output(std::span<const double> errors, const std::vector<int64_t>& tokens,
                  CheckResult& result) {
  result.tokens = static_cast<int64_t>(errors.size());
  result.worst_error = worst(errors);
  const auto not_above = [&](double error) { return error < result.worst_error; };
  const auto at = std::find_if_not(errors.begin(), errors.end(), not_above);
  if (at != errors.end()) result.worst_token = tokens[static_cast<size_t>(at - errors.begin())];
  result.ok = result.worst_error <= result.tolerance;
  if (result.ok) return;
  result.reason = fmt::format("token {} is off by {}, tolerance {}", result.worst_token,
                              error_text(result.worst_error), error_text(result.tolerance));
}

void fail(CheckResult& result, const std::string& reason) {
  result.ok = false;
  result.reason += (result.reason.empty() ? "" : "; ") + reason;
}

// Says how the choices explain a failed output. Tokens that fail with the file's own experts are
// not explained by them.
std::string choice_reason(const MoeSpec& spec, const LayerRun& run, std::span<const double> errors,
                          double tolerance, const ChoiceDifferences& differences,
                          const Tensor* file_logits, const Tensor& file_ids) {
  const std::vector<int64_t>& others = differences.other_experts;
  int64_t failed = 0;
  bool all_near_ties = true;
  for (size_t token = 0; token < errors.size(); ++token) {
    if (errors[token] <= tolerance) continue;
    ++failed;
    const auto index = static_cast<int64_t>(token);
    all_near_ties = all_near_ties && std::binary_search(others.begin(), others.end(), index) &&
                    is_near_tie(spec, run, file_logits, file_ids, index);
  }
  if (all_near_ties) {
    return fmt::format(
        "; the gate's rounding explains it: {} outside tolerance chose other experts in a near tie "
        "(first at token {}); --routing file takes the file's choice",
        failed == 1 ? "the one token" : fmt::format("all {} tokens", failed), others.front());
  }
  return fmt::format(
      "; {} chose other experts than the file, first token {}; --routing file takes "
      "the file's choice",
      others.size() == 1 ? "1 token" : fmt::format("{} tokens", others.size()), others.front());
}

}  // namespace

std::vector<int64_t> sample_tokens(int64_t num_tokens, int64_t sample) {
  const int64_t count = std::min(num_tokens, sample);
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(count == 1 ? 0 : i * (num_tokens - 1) / (count - 1));
  }
  return tokens;
}

double logit_bar(const MoeSpec& spec) {
  const double accumulation = accuracy_bar(DType::kF32, DType::kF32);
  switch (spec.router.logits_dtype) {
    case DType::kBF16:
      return 0x1p-8 + accumulation;
    case DType::kF16:
      return 0x1p-11 + accumulation;
    default:
      return accumulation;
  }
}

CheckResult check_against_file(const LayerTensors& reference, int64_t layer, const MoeSpec& spec,
                               const LayerRun& run, double tolerance) {
  CheckResult result;
  result.tolerance = tolerance;
  const int64_t num_tokens = run.output.shape()[0];
  const std::vector<double> errors =
      token_errors(run.output.view(), reference.output(layer, spec, num_tokens));
  judge_output(errors, sample_tokens(num_tokens, num_tokens), result);
  if (const auto weights = reference.topk_weights(layer, spec, num_tokens)) {
    result.weight_error = worst_relative_difference(run.topk_weights.view(), weights->view());
  }
  std::optional<Tensor> logits;
  if (run.has_logits()) logits = reference.router_logits(layer, spec, num_tokens);
  if (logits) result.logit_error = worst_relative_difference(run.logits.view(), logits->view());
  const auto ids = reference.topk_ids(layer, spec, num_tokens);
  if (!ids) return result;
  const ChoiceDifferences differences = compare_choices(run.topk_ids, *ids);
  result.routing_mismatches = static_cast<int64_t>(differences.other_experts.size());
  result.order_mismatches = differences.reordered;
  if (!result.ok && !differences.other_experts.empty()) {
    result.reason +=
        choice_reason(spec, run, errors, tolerance, differences, logits ? &*logits : nullptr, *ids);
  }
  return result;
}

CheckResult check_against_float64(const Context& context, const MoeSpec& spec,
                                  const WeightSource& source, const LayerInput& input,
                                  const LayerRun& run, int64_t sample, double tolerance) {
  CheckResult result;
  result.tolerance = tolerance;
  const std::vector<int64_t> tokens = sample_tokens(input.num_tokens(), sample);
  if (tokens.empty()) {
    result.ok = true;
    return result;
  }
  const Tensor hidden = gather_rows(input.hidden, tokens);
  const Tensor ids = gather_rows(run.topk_ids.view(), tokens);
  const Tensor weights = gather_rows(run.topk_weights.view(), tokens);
  const Tensor output = gather_rows(run.output.view(), tokens);
  const Tensor router_input = gather_rows(input.router_input, tokens);
  const Tensor residual_input = gather_rows(input.residual_input, tokens);
  const Tensor token_ids = gather_rows(input.token_ids, tokens);
  // Logits that the caller gave are not a result of the layer.
  const bool own_logits = run.has_logits() && input.router_logits.empty();
  const Tensor logits = run.has_logits() ? gather_rows(run.logits.view(), tokens) : Tensor();
  // Experts that a budget leaves depend on tokens that are not in the sample.
  const bool judges_routing = run.has_logits() && input.expert_budget == 0;
  const Tensor first_adapter(DType::kI32, {static_cast<int64_t>(tokens.size())});
  const bool adapted = input.adapter != nullptr;
  const StageCheck check =
      check_against_reference(context, spec, source,
                              {.hidden = hidden.view(),
                               .logits = judges_routing ? logits.view() : ConstTensorView{},
                               .topk_ids = ids.view(),
                               .topk_weights = weights.view(),
                               .output = output.view(),
                               .router_input = router_input.view(),
                               .residual_input = residual_input.view(),
                               .token_ids = token_ids.view(),
                               .top_k = input.top_k,
                               .banned_experts = input.banned_experts,
                               .adapters = {input.adapter, adapted ? size_t{1} : size_t{0}},
                               .adapter_ids = adapted ? first_adapter.view() : ConstTensorView{},
                               .code_ambiguity = code_ambiguity(context),
                               .tp_size = run.tp_size});
  judge_output(check.token_errors, tokens, result);
  if (judges_routing) {
    result.routing_mismatches = check.mismatched_tokens;
    result.order_mismatches = check.reordered_tokens;
    result.weight_error = check.worst_weight_error;
    if (check.routing_mismatches > 0) {
      fail(result, fmt::format("{} expert choices differ from float64", check.routing_mismatches));
    }
    if (!(check.worst_weight_error <= tolerance)) {
      fail(result,
           fmt::format("routing weights are off by {}", error_text(check.worst_weight_error)));
    }
  }
  if (own_logits && judges_routing) {
    result.logit_error = check.worst_logit_error;
    if (!(check.worst_logit_error <= logit_bar(spec))) {
      fail(result, fmt::format("router logits are off by {}, bar {}",
                               error_text(check.worst_logit_error), error_text(logit_bar(spec))));
    }
  }
  return result;
}

}  // namespace conclave::tool
