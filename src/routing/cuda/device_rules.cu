#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "routing/cuda/device_rules.h"
#include "routing/cuda/score.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::routing {
namespace {

using device::kFullWarp;
using device::lane_id;

constexpr int32_t kWarps = 4;
constexpr int32_t kThreads = kWarps * 32;

__device__ bool counts(const DeviceRuleArgs& args, int64_t token) {
  return (args.live_tokens == nullptr || token < *args.live_tokens) &&
         (args.padding_mask == nullptr || args.padding_mask[token]);
}

__device__ void add_one(uint64_t* counter) {
  if (counter != nullptr) atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ULL);
}

// Reads NaN as -inf.
__device__ float load_logit(const DeviceRuleArgs& args, int64_t token, int64_t column) {
  const int64_t at = token * args.logits_stride + column;
  float logit = 0;
  switch (args.logits_dtype) {
    case DType::kF32:
      logit = static_cast<const float*>(args.logits)[at];
      break;
    case DType::kF16:
      logit = cuda::device::widen(static_cast<const __half*>(args.logits)[at]);
      break;
    default:
      logit = cuda::device::widen(static_cast<const __nv_bfloat16*>(args.logits)[at]);
  }
  return logit > -CUDART_INF_F ? logit : -CUDART_INF_F;
}

__device__ int64_t load_index(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kI64) return static_cast<const int64_t*>(data)[at];
  return static_cast<const int32_t*>(data)[at];
}

// Visits the tokens of the grid, one warp per token.
template <class Visit>
__device__ void for_each_token(int64_t num_tokens, const Visit& visit) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t step = int64_t{gridDim.x} * (blockDim.x / 32);
  const int64_t first = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  for (int64_t token = first; token < num_tokens; token += step) visit(token);
}

__global__ void __launch_bounds__(kThreads)
    look_up_kernel(const __grid_constant__ DeviceRuleArgs args, int32_t top_k, int64_t vocab) {
  for_each_token(args.num_tokens, [&](int64_t token) {
    const bool used = counts(args, token);
    const int64_t row = used ? load_index(args.token_ids, args.token_ids_dtype, token) : -1;
    const bool valid = row >= 0 && row < vocab;
    if (used && !valid && lane_id() == 0) add_one(args.skipped_ids);
    for (int32_t slot = lane_id(); slot < top_k; slot += 32) {
      args.ids[token * top_k + slot] = valid ? args.hash_table[row * top_k + slot] : -1;
    }
  });
}

// One choice of the sparse mixer by a whole warp; `excluded` is the column chosen before, -1 for
// none.
struct MixerRound {
  const DeviceRuleArgs& args;
  int64_t token;
  int32_t count;
  int32_t excluded;
  double epsilon;
  int32_t best = -1;
  double max = 0;

  __device__ double at(int32_t column) const {
    return static_cast<double>(load_logit(args, token, column));
  }
  // If all logits are absent this takes the first column in range, so that ids stay distinct.
  __device__ void find_best() {
    uint64_t key = 0;
    uint32_t column = 0xffffffffU;
    for (int32_t i = lane_id(); i < count; i += 32) {
      if (i == excluded) continue;
      const uint64_t own = device::ordered(at(i));
      if (own <= key) continue;
      key = own;
      column = static_cast<uint32_t>(i);
    }
    const uint64_t top = device::warp_max_key(key);
    best = static_cast<int32_t>(__reduce_min_sync(kFullWarp, key == top ? column : 0xffffffffU));
    max = at(best);
  }
  // Masks if (m - l) / max(|l|, m) > 2 epsilon. As in the published code, `>` keeps 0 / 0.
  __device__ bool is_masked(int32_t column) const {
    const double logit = at(column);
    if (column == excluded || !device::present(logit)) return true;
    return (max - logit) / fmax(fabs(logit), max) > 2 * epsilon;
  }
  // The weight of `id` in the softmax over the logits close enough to the maximum.
  __device__ double weight(int32_t id) const {
    double sum = 0;
    int32_t infinite = 0;
    for (int32_t first = 0; first < count; first += 32) {
      const int32_t i = first + lane_id();
      const bool inside = i < count && i != excluded;
      infinite += __popc(__ballot_sync(kFullWarp, inside && at(i) == CUDART_INF));
      if (inside && device::present(max) && max != CUDART_INF && !is_masked(i)) {
        sum += exp(at(i) - max);
      }
    }
    sum = device::warp_sum(sum);
    if (id < 0 || id >= count || !device::present(max) || is_masked(id)) return 0;
    if (max == CUDART_INF) return at(id) == CUDART_INF ? 1.0 / infinite : 0.0;
    return exp(at(id) - max) / sum;
  }
};

__global__ void __launch_bounds__(kThreads)
    sparse_mixer_kernel(const __grid_constant__ DeviceRuleArgs args, int32_t experts,
                        double epsilon) {
  for_each_token(args.num_tokens, [&](int64_t token) {
    const int32_t* given = args.given_ids != nullptr ? args.given_ids + token * 2 : nullptr;
    MixerRound first{args, token, experts, -1, epsilon};
    first.find_best();
    const int32_t id = given != nullptr ? given[0] : first.best;
    const double weight = first.weight(id);
    MixerRound second{args, token, experts, id, epsilon};
    second.find_best();
    const int32_t other = given != nullptr ? given[1] : second.best;
    const double other_weight = second.weight(other);
    if (lane_id() != 0) return;
    args.ids[token * 2] = id;
    args.ids[token * 2 + 1] = other;
    args.weights[token * 2] = static_cast<float>(weight);
    args.weights[token * 2 + 1] = static_cast<float>(other_weight);
    // Without an exclusion the maximum is absent only if all logits are.
    if (!device::present(first.max) && counts(args, token)) {
      add_one(args.tokens_without_finite_logit);
    }
  });
}

__device__ double log_sigmoid(double logit) { return fmin(logit, 0.0) - log1p(exp(-fabs(logit))); }

struct SinkRule {
  int32_t experts;
  int32_t top_k;
  int32_t sinks;
  double scale;
};

// Lane j holds choice j, lane k + s holds sink s.
__global__ void __launch_bounds__(kThreads)
    sink_kernel(const __grid_constant__ DeviceRuleArgs args, const SinkRule rule) {
  for_each_token(args.num_tokens, [&](int64_t token) {
    int32_t column = -1;
    if (lane_id() < rule.top_k) {
      const int32_t id = args.ids[token * rule.top_k + lane_id()];
      // An absent bias means that the id was chosen only because nothing better was left.
      const bool barred = args.selection_bias != nullptr && id >= 0 && id < rule.experts &&
                          args.given_ids == nullptr && !device::present(args.selection_bias[id]);
      column = id >= 0 && id < rule.experts && !barred ? id : -1;
    } else if (lane_id() < rule.top_k + rule.sinks) {
      column = rule.experts + lane_id() - rule.top_k;
    }
    double term = device::absent();
    if (column >= 0) {
      const float logit = load_logit(args, token, column);
      if (device::present(logit)) term = log_sigmoid(static_cast<double>(logit));
    }
    const double share = device::softmax_weight(term, 32);
    double scale = rule.scale;
    if (args.global_scale != nullptr) scale *= static_cast<double>(*args.global_scale);
    const float weight = device::present(share) ? static_cast<float>(share * scale) : 0.0F;
    if (lane_id() < rule.top_k) {
      args.weights[token * rule.top_k + lane_id()] = weight;
    } else if (lane_id() < rule.top_k + rule.sinks) {
      args.shared_weights[token * rule.sinks + lane_id() - rule.top_k] = weight;
    }
    if (args.given_ids == nullptr) return;
    // Without given ids, the choosing launch has counted rows without a finite logit.
    bool usable = false;
    for (int32_t i = lane_id(); i < rule.experts; i += 32) {
      usable = usable || device::present(load_logit(args, token, i));
    }
    usable = __any_sync(kFullWarp, usable);
    if (!usable && lane_id() == 0 && counts(args, token)) {
      add_one(args.tokens_without_finite_logit);
    }
  });
}

// Same as in routing/simulated/simulated.cc.
__device__ uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}
__device__ double unit(uint64_t word) { return (static_cast<double>(word >> 12) + 0.5) * 0x1p-52; }

struct SimulatedRule {
  SimulatedDistribution distribution;
  uint64_t seed;
  double zipf_exponent;
  int32_t experts;
  int32_t top_k;
  int64_t replay_rows;
};

__device__ double simulated_key(const SimulatedRule& rule, int32_t expert, uint64_t word) {
  const double u = unit(word);
  switch (rule.distribution) {
    case SimulatedDistribution::kNormal:
      return sqrt(-2 * log(u)) * cospi(2 * unit(mix(word)));
    case SimulatedDistribution::kZipf:
      return -rule.zipf_exponent * log(static_cast<double>(expert + 1)) - log(-log(u));
    default:
      return u;
  }
}

__device__ void replay(const DeviceRuleArgs& args, const SimulatedRule& rule, int64_t token) {
  const int64_t first = (args.first_token + token) % rule.replay_rows * rule.top_k;
  for (int32_t slot = lane_id(); slot < rule.top_k; slot += 32) {
    args.ids[token * rule.top_k + slot] = args.replay_ids[first + slot];
    if (args.replay_weights == nullptr) continue;
    args.weights[token * rule.top_k + slot] = args.replay_weights[first + slot];
  }
}

// Draws the k largest keys, ties to the lower expert.
__device__ void draw(const DeviceRuleArgs& args, const SimulatedRule& rule, int64_t token,
                     uint64_t* keys) {
  const auto number = static_cast<uint64_t>(args.first_token + token);
  const uint64_t word = mix(mix(rule.seed) ^ mix(number));
  for (int32_t i = lane_id(); i < rule.experts; i += 32) {
    keys[i] = device::ordered(simulated_key(rule, i, mix(word ^ static_cast<uint64_t>(i))));
  }
  for (int32_t slot = 0; slot < rule.top_k; ++slot) {
    uint64_t key = 0;
    uint32_t expert = 0xffffffffU;
    for (int32_t i = lane_id(); i < rule.experts; i += 32) {
      if (keys[i] <= key) continue;
      key = keys[i];
      expert = static_cast<uint32_t>(i);
    }
    const uint64_t top = device::warp_max_key(key);
    const uint32_t chosen = __reduce_min_sync(kFullWarp, key == top ? expert : 0xffffffffU);
    if (expert == chosen) {
      keys[chosen] = 0;
      args.ids[token * rule.top_k + slot] = static_cast<int32_t>(chosen);
    }
    __syncwarp();
  }
}

// One block is one warp.
__global__ void __launch_bounds__(32)
    simulate_kernel(const __grid_constant__ DeviceRuleArgs args, const SimulatedRule rule) {
  extern __shared__ uint64_t keys[];  // [experts]
  for_each_token(args.num_tokens, [&](int64_t token) {
    for (int32_t slot = lane_id(); slot < rule.top_k; slot += 32) {
      args.weights[token * rule.top_k + slot] = 1.0F / static_cast<float>(rule.top_k);
    }
    __syncwarp();
    if (args.given_ids != nullptr) {
      for (int32_t slot = lane_id(); slot < rule.top_k; slot += 32) {
        const int64_t at = token * rule.top_k + slot;
        args.ids[at] = args.given_ids[at];
      }
    } else if (rule.distribution == SimulatedDistribution::kReplay) {
      replay(args, rule, token);
    } else {
      draw(args, rule, token, keys);
    }
    __syncwarp();
  });
}

__device__ float given_weight(const DeviceFusedSlots& args, int64_t token, int32_t slot) {
  const int64_t at = token * args.weights_stride + slot;
  switch (args.weights_dtype) {
    case DType::kF32:
      return static_cast<const float*>(args.given_weights)[at];
    case DType::kF16:
      return cuda::device::widen(static_cast<const __half*>(args.given_weights)[at]);
    default:
      return cuda::device::widen(static_cast<const __nv_bfloat16*>(args.given_weights)[at]);
  }
}

__global__ void __launch_bounds__(kThreads)
    fused_slots_kernel(const __grid_constant__ DeviceFusedSlots args) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= args.num_tokens * args.num_shared) return;
  const int64_t token = item / args.num_shared;
  const auto shared = static_cast<int32_t>(item % args.num_shared);
  const int32_t slot = args.top_k + shared;
  const int32_t own_id = args.num_experts + shared;
  const bool live = args.live_tokens == nullptr || token < *args.live_tokens;
  const bool used = live && (args.padding_mask == nullptr || args.padding_mask[token]);
  float weight = args.slot_weight;
  if (args.given_weights != nullptr) weight = given_weight(args, token, slot);
  if (used && args.given_ids != nullptr) {
    const int64_t id = load_index(args.given_ids, args.ids_dtype, token * args.ids_stride + slot);
    if (id != own_id) weight = 0;
    if (id != own_id && id != -1) add_one(args.skipped_ids);
  }
  args.shared_weights[item] = weight;
  if (args.captured_ids != nullptr) {
    args.captured_ids[token * args.captured_ids_stride + slot] =
        used && weight != 0.0F ? own_id : -1;
  }
  if (args.captured_weights != nullptr) {
    args.captured_weights[token * args.captured_weights_stride + slot] = weight;
  }
}

cuda::LaunchShape warps_of(int64_t tokens, CUstream_st* stream) {
  constexpr int64_t kMaxBlocks = int64_t{1} << 30;
  return {.blocks = std::min(kMaxBlocks, ceil_div(tokens, int64_t{kWarps})),
          .threads = kThreads,
          .stream = stream};
}

}  // namespace

void device_look_up(const MoeSpec& spec, const DeviceRuleArgs& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  cuda::launch("routing.look_up", look_up_kernel, warps_of(args.num_tokens, stream), args,
               static_cast<int32_t>(spec.top_k), spec.router.vocab_size);
}

void device_sparse_mixer(const MoeSpec& spec, const DeviceRuleArgs& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  cuda::launch("routing.sparse_mixer", sparse_mixer_kernel, warps_of(args.num_tokens, stream), args,
               static_cast<int32_t>(spec.num_experts), spec.router.jitter_epsilon);
}

void device_weigh_with_sinks(const MoeSpec& spec, const DeviceRuleArgs& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  cuda::launch("routing.sinks", sink_kernel, warps_of(args.num_tokens, stream), args,
               SinkRule{.experts = static_cast<int32_t>(spec.num_experts),
                        .top_k = static_cast<int32_t>(spec.top_k),
                        .sinks = static_cast<int32_t>(spec.shared.count),
                        .scale = spec.router.scale});
}

void device_simulate(const MoeSpec& spec, const DeviceRuleArgs& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  const SimulatedRouting& simulated = spec.router.simulated;
  constexpr int64_t kMaxBlocks = 16'384;
  cuda::launch(
      "routing.simulate", simulate_kernel,
      {.blocks = std::min(kMaxBlocks, args.num_tokens),
       .threads = 32,
       .shared_bytes = static_cast<size_t>(spec.num_experts) * sizeof(uint64_t),
       .stream = stream},
      args,
      SimulatedRule{.distribution = simulated.distribution,
                    .seed = simulated.seed,
                    .zipf_exponent = simulated.zipf_exponent,
                    .experts = static_cast<int32_t>(spec.num_experts),
                    .top_k = static_cast<int32_t>(spec.top_k),
                    .replay_rows = static_cast<int64_t>(simulated.replay_ids.size()) / spec.top_k});
}

void device_fused_slots(const DeviceFusedSlots& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  cuda::launch("routing.fused_slots", fused_slots_kernel,
               {.blocks = ceil_div(args.num_tokens * args.num_shared, int64_t{kThreads}),
                .threads = kThreads,
                .stream = stream},
               args);
}

}  // namespace conclave::inline v0::routing
