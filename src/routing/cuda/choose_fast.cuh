// Chooses by float32 scores if these tell the experts apart. If not, a few more than k candidates
// are compared in double; if doubt remains, the caller chooses by scores in double. The choice is
// always that of double, at the cost of float32 for nearly every token.
#pragma once

#include "cuda/device/math.cuh"
#include "routing/cuda/candidates.cuh"
#include "routing/cuda/groups.cuh"
#include "routing/cuda/route_rule.h"
#include "routing/cuda/score.cuh"

#include <cstdint>

namespace conclave::inline v0::routing::device {

// Keys that differ by more than this, times the largest of scores and keys, are in the right order:
// twice the error of a float32 key (4 units in the last place for the score, 1 each for cap and
// bias).
inline constexpr float kResolution = 1.5e-6F;

template <int kColumns>
__device__ __forceinline__ void cap_floats(float soft_cap, float (&values)[kColumns]) {
#pragma unroll 1
  for (int turn = 0; turn < kColumns; ++turn) {
    // The values rotate, so that the long formula is compiled only once.
    const float value = values[0];
#pragma unroll
    for (int i = 0; i + 1 < kColumns; ++i) values[i] = values[i + 1];
    values[kColumns - 1] = present(value) ? soft_cap * tanhf(value / soft_cap) : value;
  }
}

// Works as softmax_of_row with float32 exponentials: the sum errs by less than 2^-23 of itself.
// With a cap it uses double, since the cap's error would go into the exponent.
template <int kColumns>
__device__ __forceinline__ Softmax float_softmax_of_row(const float (&logits)[kColumns],
                                                        double soft_cap) {
  if (soft_cap > 0) return softmax_of_row(logits, soft_cap);
  Softmax softmax = max_of_row(logits, soft_cap);
  if (!present(softmax.max) || softmax.infinite != 0) return softmax;
  const auto max = static_cast<float>(softmax.max);
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    sum += static_cast<double>(expf(logits[i] - max));
  }
  softmax.sum = warp_sum(sum);
  return softmax;
}

// Scores in place; an absent logit gives an arbitrary number.
template <int kColumns>
__device__ __forceinline__ void score_floats(RouterScore score, const Softmax& softmax,
                                             float (&values)[kColumns]) {
  if (score == RouterScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      values[i] = cuda::device::rcp(1.0F + __expf(-values[i]));
    }
  } else if (score == RouterScore::kSqrtSoftplus) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      values[i] = sqrtf(fmaxf(values[i], 0.0F) + log1pf(__expf(-fabsf(values[i]))));
    }
  } else if (score == RouterScore::kSoftmax) {
    const auto max = static_cast<float>(softmax.max);
    const auto share = static_cast<float>(1.0 / softmax.sum);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = expf(values[i] - max) * share;
  }
}

// Forms the keys of a lane's columns; returns the difference above which their order is certain.
template <int kColumns>
__device__ __forceinline__ float form_float_keys(const DeviceRouteRule& rule,
                                                 const Softmax& softmax,
                                                 const float (&logits)[kColumns],
                                                 const float (&bias)[kColumns],
                                                 float (&keys)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) keys[i] = logits[i];
  if (!rule.choose.by_logit) {
    if (rule.score.soft_cap > 0) cap_floats(static_cast<float>(rule.score.soft_cap), keys);
    if (rule.score.order == RouterOrder::kScoreThenTopk) {
      score_floats(rule.score.score, softmax, keys);
    }
  }
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    // A NaN bias makes its key absent.
    const float key = fmaxf(keys[i] + bias[i], -CUDART_INF_F);
    const bool ordinary = fabsf(logits[i]) < CUDART_INF_F;
    if (ordinary) largest = fmaxf(largest, fabsf(keys[i]) + fabsf(key));
    keys[i] = ordinary ? key : logits[i];
  }
  return kResolution * __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(largest)));
}

// The value of a group held by `lanes` adjacent lanes, returned in each of them.
template <int kColumns>
__device__ __forceinline__ float group_value_of_lanes(const DeviceRouteRule& rule, int32_t lanes,
                                                      const float (&keys)[kColumns]) {
  float first = keys[0];
  float second = -CUDART_INF_F;
#pragma unroll
  for (int i = 1; i < kColumns; ++i) {
    second = fmaxf(second, fminf(first, keys[i]));
    first = fmaxf(first, keys[i]);
  }
  for (int32_t step = 1; step < lanes; step *= 2) {
    const float other = __shfl_xor_sync(kFullWarp, first, step);
    const float other_second = __shfl_xor_sync(kFullWarp, second, step);
    second = fmaxf(fmaxf(second, other_second), fminf(first, other));
    first = fmaxf(first, other);
  }
  const bool sums = rule.choose.group_score == GroupScore::kTop2Sum && present(second);
  return sums ? first + second : first;
}

// The value of group lane / lanes_a_group, returned in each of the group's lanes.
__device__ __forceinline__ float float_group_value(const DeviceRouteRule& rule,
                                                   const float* scratch) {
  const int32_t lanes = rule.lanes_a_group;
  const int32_t group = run_of_lanes(lanes);
  float first = -CUDART_INF_F;
  float second = -CUDART_INF_F;
  if (group < rule.choose.num_groups) {
#pragma unroll 4
    for (int32_t i = lane_id() & (lanes - 1); i < rule.group_size; i += lanes) {
      const float key = scratch[group * rule.group_stride + i];
      second = fmaxf(second, fminf(first, key));
      first = fmaxf(first, key);
    }
  }
  for (int32_t step = 1; step < lanes; step *= 2) {
    const float other = __shfl_xor_sync(kFullWarp, first, step);
    const float other_second = __shfl_xor_sync(kFullWarp, second, step);
    second = fmaxf(fmaxf(second, other_second), fminf(first, other));
    first = fmaxf(first, other);
  }
  const bool sums = rule.choose.group_score == GroupScore::kTop2Sum && present(second);
  return sums ? first + second : first;
}

// Computes the same through shared memory.
template <int kColumns>
__device__ __forceinline__ float scattered_group_value(const DeviceRouteRule& rule, float* scratch,
                                                       const float (&keys)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int32_t column = column_of<kColumns>(i);
    if (column < rule.num_columns) {
      scratch[column + group_of(rule, column) * (rule.group_stride - rule.group_size)] = keys[i];
    }
  }
  __syncwarp();
  const float value = float_group_value(rule, scratch);
  __syncwarp();
  return value;
}

// Masks the keys of groups that are not kept; at most 32 groups. Returns false if a kept and a
// dropped group are too close to tell apart.
template <int kColumns>
__device__ __forceinline__ bool mask_float_groups(const DeviceRouteRule& rule, float certain,
                                                  float* scratch, float (&keys)[kColumns]) {
  const auto groups = static_cast<int32_t>(rule.choose.num_groups);
  const bool by_lanes = rule.group_lanes != 0;
  const int32_t lanes = by_lanes ? rule.group_lanes : rule.lanes_a_group;
  const float own = by_lanes ? group_value_of_lanes(rule, lanes, keys)
                             : scattered_group_value(rule, scratch, keys);
  const int32_t group = run_of_lanes(lanes);
  const uint32_t own_key = ordered(own);
  int32_t before = 0;
#pragma unroll 4
  for (int32_t other = 0; other < groups; ++other) {
    // Among equal groups the lower comes first.
    const uint32_t key = __shfl_sync(kFullWarp, own_key, other * lanes);
    before += key + (other < group ? 1U : 0U) > own_key ? 1 : 0;
  }
  const bool kept = group < groups && before < rule.choose.topk_groups;
  const uint32_t lanes_kept = __ballot_sync(kFullWarp, kept);
  const uint32_t lowest = __reduce_min_sync(kFullWarp, kept ? own_key : 0xffffffffU);
  const bool left_out = group < groups && !kept;
  const uint32_t highest = __reduce_max_sync(kFullWarp, left_out ? own_key : 0U);
  const float masked = rule.choose.group_mask == GroupMask::kZero ? 0.0F : -CUDART_INF_F;
  if (by_lanes) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (!kept && present(keys[i])) keys[i] = masked;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int32_t column = column_of<kColumns>(i);
      const bool keeps =
          column < rule.num_columns && ((lanes_kept >> (group_of(rule, column) * lanes)) & 1U) != 0;
      if (!keeps && present(keys[i])) keys[i] = masked;
    }
  }
  return highest == 0 || value_of(lowest) - value_of(highest) > 2 * certain;
}

// Reorders candidates by their keys in double: lane j < count holds one and receives the j-th.
__device__ __forceinline__ int32_t reordered(int32_t column, double key, int32_t count) {
  int32_t rank = 0;
  for (int32_t i = 0; i < count; ++i) {
    const double other = __shfl_sync(kFullWarp, key, i);
    const int32_t other_column = __shfl_sync(kFullWarp, column, i);
    rank += other > key || (other == key && other_column < column) ? 1 : 0;
  }
  int32_t result = -1;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t place = __shfl_sync(kFullWarp, rank, i);
    const int32_t other_column = __shfl_sync(kFullWarp, column, i);
    if (lane_id() == place) result = other_column;
  }
  return lane_id() < count ? result : -1;
}

// Certainty of the candidates' order.
enum class Order : uint8_t { kCertain, kClose, kUnknown };

// Lane j < count holds the j-th candidate's key.
__device__ __forceinline__ Order order_of(const DeviceRouteRule& rule, uint32_t key, int32_t count,
                                          float certain) {
  const float value = value_of(key);
  const bool chosen = lane_id() < rule.top_k;
  if (__any_sync(kFullWarp, chosen && key <= kOrderedAbsent32)) return Order::kUnknown;
  if (count < rule.num_columns) {
    const float last_chosen = __shfl_sync(kFullWarp, value, rule.top_k - 1);
    const float last = __shfl_sync(kFullWarp, value, count - 1);
    if (count == rule.top_k || !(last_chosen - last > certain)) return Order::kUnknown;
  }
  const float next = __shfl_down_sync(kFullWarp, value, 1);
  const bool compared = chosen && lane_id() + 1 < count;
  const bool close = compared && !(value - next > certain);
  return __any_sync(kFullWarp, close) ? Order::kClose : Order::kCertain;
}

}  // namespace conclave::inline v0::routing::device
