#include "routing/score.h"

#include <algorithm>
#include <cmath>

namespace conclave::inline v0::routing {
namespace {

double score_alone(RouterScore score, double logit) {
  switch (score) {
    case RouterScore::kSigmoid:
      return sigmoid(logit);
    case RouterScore::kSqrtSoftplus:
      return sqrt_softplus(logit);
    case RouterScore::kSoftmax:
    case RouterScore::kNone:
      break;
  }
  return logit;
}

double score_present(const ScoreRule& rule, double logit) {
  if (!is_present(logit)) return kAbsent;
  return score_alone(rule.score, logit);
}

double softmax_present(const SoftmaxSum& sum, double logit) {
  return is_present(logit) ? sum.weight(logit) : kAbsent;
}

// Turns logits into scores in place. Each exponential is computed once.
void softmax_in_place(int64_t count, double* scores) {
  const double max = *std::max_element(scores, scores + count);
  if (max == kInfinity || !is_present(max)) {
    const SoftmaxSum sum = softmax_sum(scores, count);
    for (int64_t i = 0; i < count; ++i) scores[i] = softmax_present(sum, scores[i]);
    return;
  }
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!is_present(scores[i])) continue;
    scores[i] = std::exp(scores[i] - max);
    sum += scores[i];
  }
  for (int64_t i = 0; i < count; ++i) {
    if (is_present(scores[i])) scores[i] /= sum;
  }
}

}  // namespace

bool has_present(const float* logits, int64_t count) {
  return std::any_of(logits, logits + count, [](float logit) { return is_present(logit); });
}

double capped(float logit, double soft_cap) {
  if (!is_present(logit)) return kAbsent;
  const auto value = static_cast<double>(logit);
  return soft_cap > 0 ? soft_cap * std::tanh(value / soft_cap) : value;
}

double sigmoid(double logit) { return 1.0 / (1.0 + std::exp(-logit)); }

double log_sigmoid(double logit) {
  return std::min(logit, 0.0) - std::log1p(std::exp(-std::abs(logit)));
}

double sqrt_softplus(double logit) {
  return std::sqrt(std::max(logit, 0.0) + std::log1p(std::exp(-std::abs(logit))));
}

double SoftmaxSum::weight(double logit) const {
  if (infinite != 0) return logit == kInfinity ? 1.0 / static_cast<double>(infinite) : 0.0;
  return is_present(logit) ? std::exp(logit - max) / sum : 0.0;
}

SoftmaxSum softmax_sum(const float* logits, int64_t count, double soft_cap) {
  SoftmaxSum result;
  for (int64_t i = 0; i < count; ++i) {
    const double logit = capped(logits[i], soft_cap);
    result.max = std::max(result.max, logit);
    result.infinite += logit == kInfinity ? 1 : 0;
  }
  if (result.infinite != 0) return result;
  for (int64_t i = 0; i < count; ++i) {
    const double logit = capped(logits[i], soft_cap);
    if (is_present(logit)) result.sum += std::exp(logit - result.max);
  }
  return result;
}

SoftmaxSum softmax_sum(const double* logits, int64_t count) {
  SoftmaxSum result;
  for (int64_t i = 0; i < count; ++i) {
    result.max = std::max(result.max, logits[i]);
    result.infinite += logits[i] == kInfinity ? 1 : 0;
  }
  if (result.infinite != 0) return result;
  for (int64_t i = 0; i < count; ++i) {
    if (is_present(logits[i])) result.sum += std::exp(logits[i] - result.max);
  }
  return result;
}

ScoreRule ScoreRule::of(const RouterSpec& router) {
  return {.score = router.score, .order = router.order, .soft_cap = router.soft_cap};
}

void score_row(const ScoreRule& rule, const float* logits, int64_t count, double* scores) {
  for (int64_t i = 0; i < count; ++i) scores[i] = capped(logits[i], rule.soft_cap);
  if (rule.order == RouterOrder::kScoreThenTopk) score_chosen(rule, count, scores);
}

void score_ids(const ScoreRule& rule, const float* logits, int64_t count, const int32_t* ids,
               int64_t num_ids, double* scores) {
  for (int64_t j = 0; j < num_ids; ++j) {
    const bool valid = ids[j] >= 0 && ids[j] < count;
    scores[j] = valid ? capped(logits[ids[j]], rule.soft_cap) : kAbsent;
  }
  if (rule.order == RouterOrder::kTopkThenScore) return;
  if (rule.score == RouterScore::kSoftmax) {
    const SoftmaxSum sum = softmax_sum(logits, count, rule.soft_cap);
    for (int64_t j = 0; j < num_ids; ++j) scores[j] = softmax_present(sum, scores[j]);
    return;
  }
  for (int64_t j = 0; j < num_ids; ++j) scores[j] = score_present(rule, scores[j]);
}

void score_chosen(const ScoreRule& rule, int64_t count, double* chosen) {
  if (rule.score == RouterScore::kSoftmax) return softmax_in_place(count, chosen);
  for (int64_t j = 0; j < count; ++j) chosen[j] = score_present(rule, chosen[j]);
}

}  // namespace conclave::inline v0::routing
