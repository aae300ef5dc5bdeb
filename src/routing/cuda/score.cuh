// Scores in double, as in routing/score.cc: the same formulas with the device's exp, log1p and
// tanh. A score may differ from the host's in its last bit or two of 53.
#pragma once

#include "routing/cuda/exp.cuh"
#include "routing/cuda/warp.cuh"
#include "routing/score.h"

#include "conclave/dtype.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

namespace conclave::inline v0::routing::device {

__device__ __forceinline__ double absent() { return -CUDART_INF; }
__device__ __forceinline__ bool present(float logit) { return logit > -CUDART_INF_F; }
__device__ __forceinline__ bool present(double score) { return score > -CUDART_INF; }

static __device__ __noinline__ double soft_capped(double logit, double cap) {
  return cap * tanh(logit / cap);
}
// Same as routing::capped; `logit` must not be NaN.
__device__ __forceinline__ double capped(float logit, double soft_cap) {
  if (!present(logit)) return absent();
  const auto value = static_cast<double>(logit);
  return soft_cap > 0 ? soft_capped(value, soft_cap) : value;
}

static __device__ __noinline__ double sqrt_softplus(double logit) {
  return sqrt(fmax(logit, 0.0) + log1p(exp(-fabs(logit))));
}
// Score of a present logit.
__device__ __forceinline__ double score_alone(RouterScore score, double logit) {
  if (score == RouterScore::kSigmoid) return sigmoid(logit);
  if (score == RouterScore::kSqrtSoftplus) return sqrt_softplus(logit);
  return logit;
}

// The same score to the precision of a weight.
__device__ __forceinline__ double score_to_weigh(RouterScore score, double logit) {
  if (score != RouterScore::kSigmoid) return score_alone(score, logit);
  const double e = exp_to_weigh(-fabs(logit));
  return divided(logit < 0 ? e : 1.0, 1.0 + e);
}

// exp(logit - max), 0 for an absent logit; max is finite.
__device__ __forceinline__ double exp_of_difference(double logit, double max) {
  return exp_below_709(fmax(logit - max, -1000.0));
}

// Counterpart of routing::SoftmaxSum.
struct Softmax {
  double max;
  double sum;
  int32_t infinite;

  // An absent logit stays absent.
  __device__ __forceinline__ double of(double logit) const {
    if (!present(logit)) return absent();
    if (infinite != 0) return logit == CUDART_INF ? 1.0 / infinite : 0.0;
    return exp_of_difference(logit, max) / sum;
  }
  // The same to the precision of a weight.
  __device__ __forceinline__ double weight_of(double logit) const {
    if (infinite != 0 || !present(logit)) return of(logit);
    return divided(exp_to_weigh(logit - max), sum);
  }
};

// Softmax over the first `lanes` lanes, a power of two, one value each; the other lanes hold none.
__device__ __forceinline__ double softmax_weight(double value, int32_t lanes) {
  // Any number near the largest will do as the maximum.
  const float near = __double2float_rn(value);
  const auto max = static_cast<double>(value_of(warp_max_key(ordered(near))));
  const uint32_t infinite = __ballot_sync(kFullWarp, near == CUDART_INF_F);
  if (infinite != 0) {
    if (!present(value)) return absent();
    return near == CUDART_INF_F ? 1.0 / __popc(infinite) : 0.0;
  }
  const double part = present(value) ? exp_to_weigh(value - max) : 0.0;
  const double sum = warp_sum(part, lanes);
  return present(value) ? divided(part, sum) : absent();
}

// The largest logit of a row and the number of +Inf; the sum is not formed yet.
template <int kColumns>
__device__ __forceinline__ Softmax max_of_row(const float (&logits)[kColumns], double soft_cap) {
  Softmax softmax{absent(), 0, 0};
  float max = logits[0];
#pragma unroll
  for (int i = 1; i < kColumns; ++i) max = fmaxf(max, logits[i]);
  // Capping keeps the order.
  softmax.max = capped(value_of(warp_max_key(ordered(max))), soft_cap);
  if (softmax.max != CUDART_INF) return softmax;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    softmax.infinite += __popc(__ballot_sync(kFullWarp, logits[i] == CUDART_INF_F));
  }
  return softmax;
}

// The softmax over all columns of a row.
template <int kColumns>
__device__ __forceinline__ Softmax softmax_of_row(const float (&logits)[kColumns],
                                                  double soft_cap) {
  Softmax softmax = max_of_row(logits, soft_cap);
  if (!present(softmax.max) || softmax.infinite != 0) return softmax;
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    sum += exp_of_difference(capped(logits[i], soft_cap), softmax.max);
  }
  softmax.sum = warp_sum(sum);
  return softmax;
}

// Rounds to a 16-bit type as if directly: the float32 in between has a sticky last bit.
__device__ __forceinline__ double rounded(double score, DType dtype) {
  if (dtype == DType::kF32) return score;
  float odd = __double2float_rz(score);
  if (static_cast<double>(odd) != score) odd = __uint_as_float(__float_as_uint(odd) | 1U);
  const float nearest = dtype == DType::kBF16 ? __bfloat162float(__float2bfloat16_rn(odd))
                                              : __half2float(__float2half_rn(odd));
  return static_cast<double>(nearest);
}

// Scores the columns of a lane in place; absent stays absent. All lanes use one formula.
template <int kColumns>
__device__ __forceinline__ void score_columns(RouterScore score, const Softmax& softmax,
                                              double (&values)[kColumns]) {
  if (score == RouterScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      values[i] = present(values[i]) ? sigmoid(values[i]) : absent();
    }
  } else if (score == RouterScore::kSqrtSoftplus) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (present(values[i])) values[i] = sqrt_softplus(values[i]);
    }
  } else if (score == RouterScore::kSoftmax && softmax.infinite != 0) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = softmax.of(values[i]);
  } else if (score == RouterScore::kSoftmax) {
    const double share = 1.0 / softmax.sum;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const double weight = exp_of_difference(values[i], softmax.max) * share;
      values[i] = present(values[i]) ? weight : absent();
    }
  }
}

}  // namespace conclave::inline v0::routing::device
