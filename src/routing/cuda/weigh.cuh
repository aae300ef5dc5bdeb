// Turns scores into weights, one slot per lane, as routing/weigh.cc does.
#pragma once

#include "routing/cuda/route_rule.h"
#include "routing/cuda/score.cuh"

#include <cstdint>

namespace conclave::inline v0::routing::device {

static __device__ __noinline__ double power(double base, double exponent) {
  return pow(base, exponent);
}

static __device__ __noinline__ double p_norm(double p, double score, int32_t lanes) {
  const double magnitude = present(score) ? fabs(score) : 0.0;
  const double largest = warp_max(magnitude, lanes);
  // No lane leaves early, since all of them form the sum.
  const double share = present(score) && largest != 0 ? power(magnitude / largest, p) : 0.0;
  const double sum = warp_sum(share, lanes);
  return largest == 0 ? 0.0 : largest * power(sum, 1.0 / p);
}

__device__ __forceinline__ double divided_by_norm(const WeighRule& rule, double score,
                                                  int32_t lanes) {
  const bool by_p_norm = rule.renormalize == Renormalize::kPNorm;
  const uint32_t infinite = __ballot_sync(kFullWarp, score == CUDART_INF);
  if (infinite != 0) {
    const double count = __popc(infinite);
    const double share = power(count, by_p_norm ? -1.0 / rule.p : -1.0);
    return score == CUDART_INF ? share : 0.0;
  }
  const double norm =
      by_p_norm ? p_norm(rule.p, score, lanes) : warp_sum(present(score) ? score : 0.0, lanes);
  double divisor =
      rule.epsilon_mode == EpsilonMode::kAdd ? norm + rule.epsilon : fmax(norm, rule.epsilon);
  if (divisor == 0) divisor = 1;
  return divided(score, divisor);
}

// Lane j < k: score of slot j, absent() if there is none; other lanes: absent(). `lanes` is k
// rounded up to a power of two.
__device__ __forceinline__ double renormalized(const WeighRule& rule, double score, int32_t lanes) {
  switch (rule.renormalize) {
    case Renormalize::kSum:
    case Renormalize::kPNorm:
      return divided_by_norm(rule, score, lanes);
    case Renormalize::kSoftmax:
      return softmax_weight(score, lanes);
    default:
      return score;
  }
}

// Second half of RouterOrder::kTopkThenScore: turns the chosen logits into scores.
__device__ __forceinline__ double chosen_score(const DeviceRouteRule& rule, double logit) {
  if (rule.score.score == RouterScore::kSoftmax) {
    return softmax_weight(logit, rule.slot_lanes);
  }
  return present(logit) ? score_to_weigh(rule.score.score, logit) : absent();
}

}  // namespace conclave::inline v0::routing::device
