#include "routing/cuda/bans.cuh"
#include "routing/cuda/rows.cuh"
#include "routing/simulated/simulated.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace conclave::inline v0::routing {
namespace {

using device::kFullWarp;
using device::lane_id;

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

__device__ void replay(const DeviceRouterArgs& args, const SimulatedRule& rule, int64_t token) {
  const auto* replay_ids = static_cast<const int32_t*>(args.tensors[0]);
  const auto* replay_weights = static_cast<const float*>(args.tensors[1]);
  const int32_t columns = args.table_columns != 0 ? args.table_columns : rule.top_k;
  const int64_t first = (args.first_token + token) % rule.replay_rows * columns;
  for (int32_t slot = lane_id(); slot < rule.top_k; slot += 32) {
    args.ids[token * rule.top_k + slot] = replay_ids[first + slot];
    if (replay_weights == nullptr) continue;
    args.weights[token * rule.top_k + slot] = replay_weights[first + slot];
  }
}

// Draws the k largest keys, ties to the lower expert.
__device__ void draw(const DeviceRouterArgs& args, const SimulatedRule& rule, int64_t token,
                     uint64_t* keys) {
  const auto number = static_cast<uint64_t>(args.first_token + token);
  const uint64_t word = mix(mix(rule.seed) ^ mix(number));
  for (int32_t i = lane_id(); i < rule.experts; i += 32) {
    const bool banned = device::is_banned(args.banned, token, i);
    const double key =
        banned ? device::absent() : simulated_key(rule, i, mix(word ^ static_cast<uint64_t>(i)));
    keys[i] = device::ordered(key);
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
    simulate_kernel(const __grid_constant__ DeviceRouterArgs args, const SimulatedRule rule) {
  extern __shared__ uint64_t keys[];  // [experts]
  device::for_each_token(args.num_tokens, [&](int64_t token) {
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

// Columns of a draw: their keys fit into shared memory.
constexpr int64_t kMaxSimulatedExperts = 4096;

class SimulatedOnDevice final : public DeviceRouter {
 public:
  explicit SimulatedOnDevice(const MoeSpec& spec)
      : rule_{.distribution = spec.router.simulated.distribution,
              .seed = spec.router.simulated.seed,
              .zipf_exponent = spec.router.simulated.zipf_exponent,
              .experts = static_cast<int32_t>(spec.num_experts),
              .top_k = static_cast<int32_t>(spec.top_k),
              .replay_rows =
                  static_cast<int64_t>(spec.router.simulated.replay_ids.size()) / spec.top_k} {}

  const int32_t* route(const DeviceRouterArgs& args, CUstream_st* stream) const override {
    if (args.num_tokens == 0) return args.ids;
    constexpr int64_t kMaxBlocks = 16'384;
    cuda::launch("routing.simulate", simulate_kernel,
                 {.blocks = std::min(kMaxBlocks, args.num_tokens),
                  .threads = 32,
                  .shared_bytes = static_cast<size_t>(rule_.experts) * sizeof(uint64_t),
                  .stream = stream},
                 args, rule_);
    return args.ids;
  }

 private:
  SimulatedRule rule_;
};

Support supports_simulated(const MoeSpec& spec) {
  if (Support support = simulated_supports(spec); !support) return support;
  return at_most("num_experts", spec.num_experts, kMaxSimulatedExperts);
}

Support runs_alone(const MoeSpec& spec) {
  const bool replays = spec.router.simulated.distribution == SimulatedDistribution::kReplay;
  return replays ? Support::no("recorded ids to replay lie in host memory") : Support::yes();
}

std::unique_ptr<DeviceRouter> make_simulated(const MoeSpec& spec) {
  return std::make_unique<SimulatedOnDevice>(spec);
}

}  // namespace

const DeviceRouterRow kSimulatedOnDevice{
    .supports = supports_simulated, .runs_alone = runs_alone, .make = make_simulated};

}  // namespace conclave::inline v0::routing
