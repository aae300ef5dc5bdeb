#include "routing/weigh.h"

#include <algorithm>
#include <cmath>

namespace conclave::inline v0::routing {
namespace {

// The p-norm is computed from values divided by the largest, so that no power overflows double.
double p_norm(double p, int64_t count, const double* scores) {
  double largest = 0;
  for (int64_t j = 0; j < count; ++j) {
    if (is_present(scores[j])) largest = std::max(largest, std::abs(scores[j]));
  }
  if (largest == 0) return 0;
  double sum = 0;
  for (int64_t j = 0; j < count; ++j) {
    if (is_present(scores[j])) sum += std::pow(std::abs(scores[j]) / largest, p);
  }
  return largest * std::pow(sum, 1.0 / p);
}

double plain_sum(int64_t count, const double* scores) {
  double sum = 0;
  for (int64_t j = 0; j < count; ++j) sum += is_present(scores[j]) ? scores[j] : 0.0;
  return sum;
}

double divisor_of(const WeighRule& rule, double norm) {
  const double divisor =
      rule.epsilon_mode == EpsilonMode::kAdd ? norm + rule.epsilon : std::max(norm, rule.epsilon);
  return divisor == 0 ? 1.0 : divisor;
}

void divide_by_norm(const WeighRule& rule, int64_t count, double* scores) {
  const bool by_p_norm = rule.renormalize == Renormalize::kPNorm;
  const int64_t infinite = std::count(scores, scores + count, kInfinity);
  if (infinite != 0) {
    const double share = std::pow(static_cast<double>(infinite), by_p_norm ? -1.0 / rule.p : -1.0);
    for (int64_t j = 0; j < count; ++j) scores[j] = scores[j] == kInfinity ? share : 0.0;
    return;
  }
  const double norm = by_p_norm ? p_norm(rule.p, count, scores) : plain_sum(count, scores);
  const double divisor = divisor_of(rule, norm);
  for (int64_t j = 0; j < count; ++j) {
    if (is_present(scores[j])) scores[j] /= divisor;
  }
}

}  // namespace

WeighRule WeighRule::of(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  return {.renormalize = router.renormalize,
          .p = router.renormalize_p,
          .epsilon = router.epsilon,
          .epsilon_mode = router.epsilon_mode,
          .scale = router.scale,
          .num_experts = spec.num_experts};
}

void renormalize(const WeighRule& rule, int64_t count, double* scores) {
  switch (rule.renormalize) {
    case Renormalize::kNone:
      return;
    case Renormalize::kSum:
    case Renormalize::kPNorm:
      return divide_by_norm(rule, count, scores);
    case Renormalize::kSoftmax: {
      const SoftmaxSum sum = softmax_sum(scores, count);
      for (int64_t j = 0; j < count; ++j) scores[j] = sum.weight(scores[j]);
      return;
    }
  }
}

void weigh(const WeighRule& rule, const RouterWeights& weights, const int32_t* ids, int64_t top_k,
           double* scores, float* topk_weights) {
  renormalize(rule, top_k, scores);
  const double scale =
      weights.global_scale != nullptr ? rule.scale * weights.global_scale[0] : rule.scale;
  for (int64_t j = 0; j < top_k; ++j) {
    double weight = is_present(scores[j]) ? scores[j] * scale : 0.0;
    const bool own_scale =
        weights.expert_scale != nullptr && ids[j] >= 0 && ids[j] < rule.num_experts;
    if (own_scale) weight *= weights.expert_scale[ids[j]];
    topk_weights[j] = static_cast<float>(weight);
  }
}

void weigh_ids(const ScoreRule& score, const WeighRule& rule, const RouterWeights& weights,
               const float* logits, int64_t count, const int32_t* ids, int64_t top_k,
               double* scratch, float* topk_weights) {
  score_ids(score, logits, count, ids, top_k, scratch);
  if (score.order == RouterOrder::kTopkThenScore) score_chosen(score, top_k, scratch);
  weigh(rule, weights, ids, top_k, scratch, topk_weights);
}

}  // namespace conclave::inline v0::routing
