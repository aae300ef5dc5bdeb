// Routes one token with one warp if it has more slots than the warp has lanes: slots lie in shared
// memory, and lane j visits slots j, j + 32 and so on. Few models choose so many experts, so that
// everything is in double from the start. The reference is routing/topk/topk.cc.
#pragma once

#include "routing/cuda/route_row.cuh"
#include "routing/cuda/terms.cuh"

#include <cstdint>

namespace conclave::inline v0::routing::device {

// A token's slots. `scores` [columns] first holds the keys of columns, then the keys of slots, then
// their scores; `columns` [k] is -1 where there is no expert.
struct WideSlots {
  double* scores;
  int32_t* columns;
  int32_t count;  // k

  __device__ __forceinline__ WideSlots(const DeviceRouteRule& rule, double* scratch)
      : scores(scratch),
        columns(reinterpret_cast<int32_t*>(scratch + rule.num_columns)),
        count(rule.top_k) {}

  // Calls visit(slot, score) for the slots of this lane.
  template <class Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    for (int32_t slot = lane_id(); slot < count; slot += 32) visit(slot, scores[slot]);
  }
};

// Puts the best columns into the slots, ties to the lower one. The slot of a column is the number
// of columns that come before it, so that none waits for another to be chosen.
template <int kColumns>
__device__ __forceinline__ void choose_wide(int32_t num_columns, const double (&keys)[kColumns],
                                            const WideSlots& slots) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int32_t column = column_of<kColumns>(i);
    if (column < num_columns) slots.scores[column] = keys[i];
  }
  __syncwarp();
  int32_t before[kColumns] = {};
  for (int32_t other = 0; other < num_columns; ++other) {
    const double key = slots.scores[other];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const bool precedes = other < column_of<kColumns>(i);
      before[i] += key > keys[i] || (key == keys[i] && precedes) ? 1 : 0;
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int32_t column = column_of<kColumns>(i);
    if (column >= num_columns || before[i] >= slots.count) continue;
    slots.columns[before[i]] = column;
    slots.scores[before[i]] = keys[i];
  }
  __syncwarp();
}

// Takes the given choices; an id that is no column is no choice.
__device__ __forceinline__ void take_given(const RouteParams& params, int64_t token,
                                           const WideSlots& slots) {
  for (int32_t slot = lane_id(); slot < slots.count; slot += 32) {
    const int32_t id = params.args.given_ids[token * slots.count + slot];
    const bool valid = id >= 0 && id < params.rule.num_columns;
    slots.columns[slot] = valid ? id : -1;
    slots.scores[slot] = valid ? 0.0 : absent();
  }
}

// The first ids without a weight, for a row of which nothing is finite; -1 for padding.
__device__ __forceinline__ void take_none(const WideSlots& slots, bool counts) {
  for (int32_t slot = lane_id(); slot < slots.count; slot += 32) {
    slots.columns[slot] = counts ? slot : -1;
    slots.scores[slot] = absent();
  }
}

__device__ __forceinline__ void softmax_slots(const WideSlots& slots) {
  const Softmax softmax =
      softmax_of_terms(slots.count, [&](int32_t slot) { return slots.scores[slot]; });
  slots.for_each(
      [&](int32_t slot, double score) { slots.scores[slot] = softmax.weight_of(score); });
}

// Turns the keys of the slots into their scores.
__device__ __forceinline__ void score_slots(const RouteParams& params, const Softmax& softmax,
                                            int64_t token, const WideSlots& slots) {
  const DeviceRouteRule& rule = params.rule;
  const bool softmax_chosen =
      rule.score.order == RouterOrder::kTopkThenScore && rule.score.score == RouterScore::kSoftmax;
  slots.for_each([&](int32_t slot, double key) {
    double score = absent();
    if (present(key)) {
      const float logit = load_logit(params, token, slots.columns[slot]);
      score = present(logit) ? capped(logit, rule.score.soft_cap) : absent();
    }
    if (rule.softmax_all) {
      score = softmax.weight_of(score);
    } else if (present(score) && !softmax_chosen) {
      score = score_to_weigh(rule.score.score, score);
    }
    slots.scores[slot] = score;
  });
  if (softmax_chosen) softmax_slots(slots);
}

// Counterpart of p_norm.
__device__ __forceinline__ double p_norm_of_slots(double p, const WideSlots& slots) {
  double largest = 0;
  slots.for_each([&](int32_t, double score) {
    if (present(score)) largest = fmax(largest, fabs(score));
  });
  largest = warp_max(largest);
  if (largest == 0) return 0;
  double sum = 0;
  slots.for_each([&](int32_t, double score) {
    if (present(score)) sum += power(fabs(score) / largest, p);
  });
  return largest * power(warp_sum(sum), 1.0 / p);
}

// Counterpart of divided_by_norm.
__device__ __forceinline__ void divide_by_norm(const WeighRule& rule, const WideSlots& slots) {
  const bool by_p_norm = rule.renormalize == Renormalize::kPNorm;
  int32_t infinite = 0;
  double sum = 0;
  slots.for_each([&](int32_t, double score) {
    infinite += score == CUDART_INF ? 1 : 0;
    sum += present(score) ? score : 0.0;
  });
  infinite = __reduce_add_sync(kFullWarp, infinite);
  if (infinite != 0) {
    const double share = power(static_cast<double>(infinite), by_p_norm ? -1.0 / rule.p : -1.0);
    slots.for_each([&](int32_t slot, double score) {
      slots.scores[slot] = score == CUDART_INF ? share : 0.0;
    });
    return;
  }
  const double norm = by_p_norm ? p_norm_of_slots(rule.p, slots) : warp_sum(sum);
  double divisor =
      rule.epsilon_mode == EpsilonMode::kAdd ? norm + rule.epsilon : fmax(norm, rule.epsilon);
  if (divisor == 0) divisor = 1;
  slots.for_each([&](int32_t slot, double score) {
    if (present(score)) slots.scores[slot] = divided(score, divisor);
  });
}

__device__ __forceinline__ void renormalize_slots(const WeighRule& rule, const WideSlots& slots) {
  switch (rule.renormalize) {
    case Renormalize::kSum:
    case Renormalize::kPNorm:
      return divide_by_norm(rule, slots);
    case Renormalize::kSoftmax:
      return softmax_slots(slots);
    default:
      return;
  }
}

__device__ __forceinline__ float wide_weight(const RouteParams& params, double score,
                                             int32_t column) {
  if (column < 0 || !present(score)) return 0;
  double scale = params.rule.weigh.scale;
  if (params.args.global_scale != nullptr) scale *= static_cast<double>(*params.args.global_scale);
  double weight = score * scale;
  if (params.args.expert_scale != nullptr && column < params.rule.num_experts) {
    weight *= static_cast<double>(params.args.expert_scale[column]);
  }
  return static_cast<float>(weight);
}

// Stores 32 slots; returns `identity` plus the weights of zero experts in slot order.
__device__ __forceinline__ float store_slots(const RouteParams& params, int64_t token, int32_t slot,
                                             int32_t column, float weight, float identity) {
  const DeviceRouteArgs& args = params.args;
  const int32_t top_k = params.rule.top_k;
  uint32_t zeros = __ballot_sync(kFullWarp, column >= params.rule.num_experts);
  for (; zeros != 0; zeros &= zeros - 1) {
    identity += __shfl_sync(kFullWarp, weight, __ffs(static_cast<int>(zeros)) - 1);
  }
  if (slot >= top_k) return identity;
  const int64_t at = token * (top_k + args.shared.count) + slot;
  args.topk_ids[at] = column < params.rule.num_experts ? column : -1;
  args.topk_weights[at] = weight;
  const auto capture_at = [&](int64_t stride) {
    return token * (stride == 0 ? top_k : stride) + slot;
  };
  if (args.captured_ids != nullptr) {
    args.captured_ids[capture_at(args.captured_ids_stride)] = column;
  }
  if (args.captured_weights != nullptr) {
    args.captured_weights[capture_at(args.captured_weights_stride)] = weight;
  }
  return identity;
}

__device__ __forceinline__ void store_wide_shared(const DeviceRouteArgs& args, int64_t token,
                                                  int32_t top_k, bool counts) {
  for (int32_t i = lane_id(); i < args.shared.count; i += 32) {
    cuda::device::SharedSlot slot{-1, 0};
    if (counts) slot = cuda::device::shared_slot(args.shared, token, i);
    const int64_t at = token * (top_k + args.shared.count) + top_k + i;
    args.topk_ids[at] = slot.id;
    args.topk_weights[at] = slot.weight;
  }
}

__device__ __forceinline__ void store_wide(const RouteParams& params, int64_t token,
                                           const WideSlots& slots, bool counts) {
  float identity = 0;
  for (int32_t first = 0; first < slots.count; first += 32) {
    const int32_t slot = first + lane_id();
    int32_t column = -1;
    float weight = 0;
    if (slot < slots.count) {
      column = slots.columns[slot];
      weight = wide_weight(params, slots.scores[slot], column);
    }
    identity = store_slots(params, token, slot, column, weight, identity);
  }
  if (params.args.identity != nullptr && lane_id() == 0) params.args.identity[token] = identity;
  store_wide_shared(params.args, token, slots.count, counts);
}

// Fills the slots with choices and their scores; without a choice or a finite logit all are absent.
template <int kColumns>
__device__ __forceinline__ void choose_and_score_wide(const RouteParams& params, int64_t token,
                                                      double* scratch, const WideSlots& slots) {
  const DeviceRouteRule& rule = params.rule;
  const DeviceRouteArgs& args = params.args;
  float logits[kColumns];
  load_logits(params, token, logits);
  bool usable = false;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) usable = usable || present(logits[i]);
  usable = __any_sync(kFullWarp, usable);
  if (!usable && args.tokens_without_finite_logit != nullptr && lane_id() == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(args.tokens_without_finite_logit), 1ULL);
  }
  if (!usable && args.given_ids == nullptr) return take_none(slots, true);
  Softmax softmax{absent(), 0, 0};
  if (rule.softmax_all) softmax = softmax_of_row(logits, rule.score.soft_cap);
  if (args.given_ids != nullptr) {
    take_given(params, token, slots);
  } else {
    double keys[kColumns];
    form_keys(params, softmax, logits, keys);
    if (rule.group_size != 0) mask_groups(rule, scratch, keys);
    choose_wide(rule.num_columns, keys, slots);
  }
  score_slots(params, softmax, token, slots);
  renormalize_slots(rule.weigh, slots);
}

// Runs on one whole warp. `scratch`: wide_scratch_doubles() of shared memory for this warp.
template <int kColumns>
__device__ __forceinline__ void route_wide(const RouteParams& params, int64_t token,
                                           double* scratch) {
  const DeviceRouteArgs& args = params.args;
  const WideSlots slots(params.rule, scratch);
  const bool counts = (args.live_tokens == nullptr || token < *args.live_tokens) &&
                      (args.padding_mask == nullptr || args.padding_mask[token]);
  if (counts) {
    choose_and_score_wide<kColumns>(params, token, scratch, slots);
  } else {
    take_none(slots, false);
  }
  store_wide(params, token, slots, counts);
  // The next token's keys overwrite the slots.
  __syncwarp();
}

}  // namespace conclave::inline v0::routing::device
