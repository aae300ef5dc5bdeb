// Routes one token with one warp: each lane holds some adjacent columns, then lane j slot j. The
// reference is the host's router "topk" (routing/topk/topk.cc).
#pragma once

#include "cuda/device/shared_slot.cuh"
#include "cuda/device/vector16.cuh"
#include "routing/cuda/choose_fast.cuh"
#include "routing/cuda/groups.cuh"
#include "routing/cuda/route.h"
#include "routing/cuda/weigh.cuh"

#include <cstdint>

namespace conclave::inline v0::routing::device {

struct RouteParams {
  DeviceRouteRule rule;
  DeviceRouteArgs args;
  bool whole_logits = false;  // a lane can load its columns of a row at once
  bool whole_bias = false;
};

inline RouteParams route_params(const DeviceRoutePlan& plan, const DeviceRouteArgs& args) {
  RouteParams params{plan.rule_for(args), args};
  const int32_t columns = columns_a_lane(params.rule);
  const bool full = params.rule.num_columns == 32 * columns;
  const auto aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0;
  };
  const int64_t stride_bytes = args.logits_stride * byte_size(args.logits_dtype);
  params.whole_logits =
      full && aligned(args.logits) && stride_bytes % static_cast<int64_t>(sizeof(uint4)) == 0;
  params.whole_bias = full && aligned(args.selection_bias);
  return params;
}

// `whole` loads all columns at once. Elements beyond `count` are not read.
template <class T, int kColumns>
__device__ __forceinline__ void load_columns(const T* row, int32_t count, bool whole, float beyond,
                                             float (&values)[kColumns]) {
  constexpr size_t kBytes = kColumns * sizeof(T);
  struct alignas(kBytes < sizeof(uint4) ? kBytes : sizeof(uint4)) Run {
    T of[kColumns];
  };
  Run run;
  if (whole) {
    run = *reinterpret_cast<const Run*>(row + column_of<kColumns>(0));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = cuda::device::widen(run.of[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int32_t column = column_of<kColumns>(i);
    values[i] = column < count ? cuda::device::widen(row[column]) : beyond;
  }
}

template <class T, int kColumns>
__device__ __forceinline__ void load_logits_as(const RouteParams& params, int64_t token,
                                               float (&logits)[kColumns]) {
  const T* row = static_cast<const T*>(params.args.logits) + token * params.args.logits_stride;
  load_columns(row, params.rule.num_columns, params.whole_logits, -CUDART_INF_F, logits);
}
// NaN and columns beyond the row are read as -inf.
template <int kColumns>
__device__ __forceinline__ void load_logits(const RouteParams& params, int64_t token,
                                            float (&logits)[kColumns]) {
  if (params.args.logits_dtype == DType::kF32) {
    load_logits_as<float>(params, token, logits);
  } else if (params.args.logits_dtype == DType::kF16) {
    load_logits_as<__half>(params, token, logits);
  } else {
    load_logits_as<__nv_bfloat16>(params, token, logits);
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) logits[i] = fmaxf(logits[i], -CUDART_INF_F);
}
// 0 without a bias. It is loaded along with the logits, so that scoring need not wait for it.
template <int kColumns>
__device__ __forceinline__ void load_bias(const RouteParams& params, float (&bias)[kColumns]) {
  if (params.args.selection_bias == nullptr) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) bias[i] = 0;
    return;
  }
  load_columns(params.args.selection_bias, params.rule.num_columns, params.whole_bias, 0.0F, bias);
}

// Loads the logit of a column in range.
__device__ __forceinline__ float load_logit(const RouteParams& params, int64_t token,
                                            int32_t column) {
  const int64_t at = token * params.args.logits_stride + column;
  switch (params.args.logits_dtype) {
    case DType::kF32:
      return static_cast<const float*>(params.args.logits)[at];
    case DType::kF16:
      return cuda::device::widen(static_cast<const __half*>(params.args.logits)[at]);
    default:
      return cuda::device::widen(static_cast<const __nv_bfloat16*>(params.args.logits)[at]);
  }
}

// Forms the keys to compare: the logit, or the rounded score plus the selection bias.
template <int kColumns>
__device__ __forceinline__ void form_keys(const RouteParams& params, const Softmax& softmax,
                                          const float (&logits)[kColumns],
                                          double (&keys)[kColumns]) {
  const DeviceRouteRule& rule = params.rule;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    keys[i] = rule.choose.by_logit ? static_cast<double>(logits[i])
                                   : capped(logits[i], rule.score.soft_cap);
  }
  if (rule.choose.by_logit) return;
  // Two bits per column replace its logit, which saves registers.
  uint32_t absents = 0;
  uint32_t infinite = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    absents |= present(logits[i]) ? 0U : 1U << i;
    infinite |= logits[i] == CUDART_INF_F ? 1U << i : 0U;
  }
  if (rule.score.order == RouterOrder::kScoreThenTopk) {
    score_columns(rule.score.score, softmax, keys);
  }
  if (rule.choose.score_dtype != DType::kF32) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) keys[i] = rounded(keys[i], rule.choose.score_dtype);
  }
  float bias[kColumns];
  load_bias(params, bias);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    // Absent plus a bias is absent, unless the bias is +Inf or NaN.
    const double key = keys[i] + static_cast<double>(bias[i]);
    keys[i] = key == key ? key : absent();
    if (((absents >> i) & 1U) != 0) keys[i] = absent();
    if (((infinite >> i) & 1U) != 0) keys[i] = CUDART_INF;
  }
}

// A slot of the token in its lane; column -1 beyond k or without an expert.
struct Slot {
  int32_t column;
  bool present;
  float logit = 0;  // valid if `knows_logit`
  bool knows_logit = false;
};

template <int kColumns>
__device__ __forceinline__ void order_keys(int32_t num_columns, const float (&values)[kColumns],
                                           ExactKeys<kColumns>& keys) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    keys.of[i] = column_of<kColumns>(i) < num_columns ? ordered(values[i]) : 0U;
  }
}

template <int kColumns>
__device__ __forceinline__ Slot choose_by_logit(const RouteParams& params,
                                                const float (&logits)[kColumns]) {
  const DeviceRouteRule& rule = params.rule;
  ExactKeys<kColumns> keys;
  order_keys(rule.num_columns, logits, keys);
  // One candidate more than k shows whether shortened keys tie at the k-th.
  const int32_t count = min(min(rule.top_k + 1, rule.num_columns), 32);
  const Chosen<uint32_t> chosen = select_candidates(keys, rule.top_k, count, rule.num_columns);
  const bool used = lane_id() < rule.top_k;
  return {used ? chosen.column : -1, used && chosen.key > kOrderedAbsent32, value_of(chosen.key),
          true};
}

// Chooses without any float32 score. It is out of line and loads its own data: it is rare, and
// without it the code of the main path, which often runs uncached, is shorter.
template <int kColumns>
__device__ __noinline__ Slot choose_by_score(const RouteParams& params, int64_t token,
                                             double* scratch) {
  float logits[kColumns];
  load_logits(params, token, logits);
  Softmax softmax{absent(), 0, 0};
  if (params.rule.softmax_all) softmax = softmax_of_row(logits, params.rule.score.soft_cap);
  double scores[kColumns];
  form_keys(params, softmax, logits, scores);
  if (params.rule.group_size != 0) mask_groups(params.rule, scratch, scores);
  uint64_t keys[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    keys[i] = column_of<kColumns>(i) < params.rule.num_columns ? ordered(scores[i]) : 0U;
  }
  const Chosen<uint64_t> chosen = select_best(keys, params.rule.top_k);
  return {chosen.column, chosen.key > kOrderedAbsent64};
}

// The key in double of a present candidate, without a softmax.
static __device__ __noinline__ double key_of_candidate(const RouteParams& params, int64_t token,
                                                       int32_t column) {
  const DeviceRouteRule& rule = params.rule;
  const float logit = load_logit(params, token, column);
  if (rule.choose.by_logit || !present(logit) || logit == CUDART_INF_F) {
    return static_cast<double>(logit);
  }
  double score = capped(logit, rule.score.soft_cap);
  if (rule.score.order == RouterOrder::kScoreThenTopk) {
    score = score_alone(rule.score.score, score);
  }
  const float* bias = params.args.selection_bias;
  return bias == nullptr ? score : score + static_cast<double>(bias[column]);
}

struct FastChoice {
  Slot slot;
  bool known;
};

template <int kColumns>
__device__ __forceinline__ FastChoice choose_fast(const RouteParams& params, int64_t token,
                                                  const Softmax& softmax,
                                                  const float (&logits)[kColumns],
                                                  const float (&bias)[kColumns], double* scratch) {
  const DeviceRouteRule& rule = params.rule;
  constexpr FastChoice kUnknown{{-1, false}, false};
  if (!rule.float_keys || softmax.infinite != 0) return kUnknown;
  float keys[kColumns];
  const float certain = form_float_keys(rule, softmax, logits, bias, keys);
  if (rule.group_size != 0 &&
      !mask_float_groups(rule, certain, reinterpret_cast<float*>(scratch), keys)) {
    return kUnknown;
  }
  ExactKeys<kColumns> ordered_keys;
  order_keys(rule.num_columns, keys, ordered_keys);
  const Chosen<uint32_t> chosen =
      select_candidates(ordered_keys, rule.top_k, rule.num_candidates, rule.num_columns);
  const Order order = order_of(rule, chosen.key, rule.num_candidates, certain);
  int32_t column = chosen.column;
  if (order == Order::kUnknown || (order == Order::kClose && !rule.resolves_close)) {
    return kUnknown;
  }
  if (order == Order::kClose) {
    // A masked expert stays last.
    const bool candidate = lane_id() < rule.num_candidates && chosen.key > kOrderedAbsent32;
    const double key = candidate ? key_of_candidate(params, token, column) : absent();
    column = reordered(column, key, rule.num_candidates);
  }
  const bool used = lane_id() < rule.top_k;
  return {{used ? column : -1, used}, true};
}

// The given choice of this lane; -1 for an id that is no column.
__device__ __forceinline__ Slot given_slot(const RouteParams& params, int64_t token) {
  if (lane_id() >= params.rule.top_k) return {-1, false};
  const int32_t id = params.args.given_ids[token * params.rule.top_k + lane_id()];
  const bool valid = id >= 0 && id < params.rule.num_columns;
  return {valid ? id : -1, valid};
}

__device__ __forceinline__ float weigh_slot(const RouteParams& params, const Softmax& softmax,
                                            int64_t token, const Slot& slot) {
  const DeviceRouteRule& rule = params.rule;
  double score = absent();
  if (slot.present) {
    const float logit = slot.knows_logit ? slot.logit : load_logit(params, token, slot.column);
    score = present(logit) ? capped(logit, rule.score.soft_cap) : absent();
  }
  if (rule.score.order == RouterOrder::kTopkThenScore) {
    score = chosen_score(rule, score);
  } else if (rule.softmax_all) {
    score = softmax.weight_of(score);
  } else if (present(score)) {
    score = score_to_weigh(rule.score.score, score);
  }
  score = renormalized(rule.weigh, score, rule.slot_lanes);
  // A softmax turns an absent score into 0: lanes without a slot must not look up column -1.
  if (!slot.present || !present(score)) return 0;
  double scale = rule.weigh.scale;
  if (params.args.global_scale != nullptr) scale *= static_cast<double>(*params.args.global_scale);
  double weight = score * scale;
  if (params.args.expert_scale != nullptr && slot.column < rule.num_experts) {
    weight *= static_cast<double>(params.args.expert_scale[slot.column]);
  }
  return static_cast<float>(weight);
}

// Adds up the weights of zero experts in slot order.
__device__ __forceinline__ float identity_weight(const RouteParams& params, int32_t column,
                                                 float weight) {
  uint32_t slots = __ballot_sync(kFullWarp, column >= params.rule.num_experts);
  float sum = 0;
  while (slots != 0) {
    sum += __shfl_sync(kFullWarp, weight, __ffs(static_cast<int>(slots)) - 1);
    slots &= slots - 1;
  }
  return sum;
}

// Lane j stores slot j; a column of -1 is no choice. Lanes from the k-th on store shared slots.
__device__ __forceinline__ void store_token(const RouteParams& params, int64_t token,
                                            int32_t column, float weight, bool counts) {
  const DeviceRouteArgs& args = params.args;
  const int32_t top_k = params.rule.top_k;
  const int64_t at = token * (top_k + args.shared.count) + lane_id();
  if (args.identity != nullptr) {
    const float identity = identity_weight(params, column, weight);
    if (lane_id() == 0) args.identity[token] = identity;
  }
  if (lane_id() >= top_k + args.shared.count) return;
  if (lane_id() >= top_k) {
    cuda::device::SharedSlot slot{-1, 0};
    if (counts) slot = cuda::device::shared_slot(args.shared, token, lane_id() - top_k);
    args.topk_ids[at] = slot.id;
    args.topk_weights[at] = slot.weight;
    return;
  }
  args.topk_ids[at] = column < params.rule.num_experts ? column : -1;
  args.topk_weights[at] = weight;
  const auto capture_at = [&](int64_t stride) {
    return token * (stride == 0 ? top_k : stride) + lane_id();
  };
  if (args.captured_ids != nullptr)
    args.captured_ids[capture_at(args.captured_ids_stride)] = column;
  if (args.captured_weights != nullptr) {
    args.captured_weights[capture_at(args.captured_weights_stride)] = weight;
  }
}

// Reads the parameters that routing needs, so that routing does not wait for the constant cache.
// Runs before the kernel waits for an earlier one.
__device__ __forceinline__ void touch_parameters(const RouteParams& params) {
  asm volatile("" ::"d"(params.rule.score.soft_cap), "d"(params.rule.weigh.scale),
               "r"(params.rule.num_columns), "r"(params.rule.group_lanes),
               "l"(params.rule.choose.num_groups), "l"(params.args.logits),
               "l"(params.args.selection_bias), "l"(params.args.topk_ids),
               "l"(params.args.captured_weights));
}

// A token's choices, not yet weighed: slot j in lane j. If `weighs` is false all weights are 0.
struct TokenChoice {
  Slot slot = {-1, false};
  Softmax softmax = {absent(), 0, 0};
  bool weighs = false;
  bool counts = false;  // false for padding
};

// Runs on one whole warp. `scratch`: route_scratch_doubles() of shared memory for this warp.
template <int kColumns>
__device__ __forceinline__ TokenChoice choose_token(const RouteParams& params, int64_t token,
                                                    double* scratch) {
  const DeviceRouteRule& rule = params.rule;
  const DeviceRouteArgs& args = params.args;
  TokenChoice choice;
  const bool counts = (args.live_tokens == nullptr || token < *args.live_tokens) &&
                      (args.padding_mask == nullptr || args.padding_mask[token]);
  if (!counts) return choice;
  choice.counts = true;

  float logits[kColumns];
  load_logits(params, token, logits);
  float bias[kColumns];
  if (!rule.by_logit) load_bias(params, bias);
  bool usable = false;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) usable = usable || present(logits[i]);
  usable = __any_sync(kFullWarp, usable);
  if (!usable && args.tokens_without_finite_logit != nullptr && lane_id() == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(args.tokens_without_finite_logit), 1ULL);
  }
  if (!usable && args.given_ids == nullptr) {
    choice.slot.column = lane_id() < rule.top_k ? lane_id() : -1;
    return choice;
  }

  choice.weighs = true;
  if (rule.softmax_all) choice.softmax = float_softmax_of_row(logits, rule.score.soft_cap);
  if (args.given_ids != nullptr) {
    choice.slot = given_slot(params, token);
  } else if (rule.by_logit) {
    choice.slot = choose_by_logit(params, logits);
  } else {
    const FastChoice fast = choose_fast(params, token, choice.softmax, logits, bias, scratch);
    choice.slot = fast.known ? fast.slot : choose_by_score<kColumns>(params, token, scratch);
  }
  return choice;
}

// The id that topk_ids stores for the lane's slot; -1 also beyond the shared slots.
__device__ __forceinline__ int32_t slot_id(const RouteParams& params, const TokenChoice& choice) {
  const int32_t shared = lane_id() - params.rule.top_k;
  if (shared < 0) return choice.slot.column < params.rule.num_experts ? choice.slot.column : -1;
  return choice.counts && shared < params.args.shared.count ? params.args.shared.first_id + shared
                                                            : -1;
}

// Must run on the warp that chose.
__device__ __forceinline__ void weigh_token(const RouteParams& params, int64_t token,
                                            const TokenChoice& choice) {
  const float weight =
      choice.weighs ? weigh_slot(params, choice.softmax, token, choice.slot) : 0.0F;
  store_token(params, token, choice.slot.column, weight, choice.counts);
}

}  // namespace conclave::inline v0::routing::device
