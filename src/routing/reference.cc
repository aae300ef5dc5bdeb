#include "routing/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace conclave::inline v0::routing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Softmax of scores without NaN; +Inf weighs as the limit. `scores` holds one finite or +Inf value.
std::vector<double> softmax(const std::vector<double>& scores) {
  const double max = *std::max_element(scores.begin(), scores.end());
  std::vector<double> weights(scores.size());
  for (size_t i = 0; i < scores.size(); ++i) {
    if (max == kInfinity) {
      weights[i] = scores[i] == kInfinity ? 1.0 : 0.0;
    } else {
      weights[i] = std::exp(scores[i] - max);
    }
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) weight /= sum;
  return weights;
}

}  // namespace

bool route_reference(const MoeSpec& spec, const double* logits, int32_t* topk_ids,
                     double* topk_weights) {
  const auto top_k = static_cast<size_t>(spec.top_k);
  std::vector<double> scores(logits, logits + spec.num_experts);
  for (double& score : scores) score = std::isnan(score) ? -kInfinity : score;

  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  std::copy_n(order.begin(), top_k, topk_ids);
  std::fill_n(topk_weights, top_k, 0.0);
  if (scores[static_cast<size_t>(order[0])] == -kInfinity) return false;

  const std::vector<double> weights = softmax(scores);
  double kept = 0;
  for (size_t j = 0; j < top_k; ++j) {
    topk_weights[j] = weights[static_cast<size_t>(topk_ids[j])];
    kept += topk_weights[j];
  }
  if (spec.router.renormalize == Renormalize::kSum) {
    for (size_t j = 0; j < top_k; ++j) topk_weights[j] /= kept;
  }
  return true;
}

}  // namespace conclave::inline v0::routing
