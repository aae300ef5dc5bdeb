#include "routing/cuda/rows.cuh"
#include "routing/sparse_mixer/sparse_mixer.h"

#include <cstdint>
#include <memory>

namespace conclave::inline v0::routing {
namespace {

using device::kFullWarp;
using device::lane_id;

// One choice of the sparse mixer by a whole warp; `excluded` is the column chosen before, -1 for
// none.
struct MixerRound {
  const DeviceRouterArgs& args;
  int64_t token;
  int32_t count;
  int32_t excluded;
  double epsilon;
  int32_t best = -1;
  double max = 0;

  __device__ double at(int32_t column) const {
    return static_cast<double>(device::load_logit(args, token, column));
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

__global__ void __launch_bounds__(device::kRowThreads)
    sparse_mixer_kernel(const __grid_constant__ DeviceRouterArgs args, int32_t experts,
                        int32_t top_k, double epsilon) {
  device::for_each_token(args.num_tokens, [&](int64_t token) {
    const int32_t* given = args.given_ids != nullptr ? args.given_ids + token * top_k : nullptr;
    MixerRound first{args, token, experts, -1, epsilon};
    first.find_best();
    const int32_t id = given != nullptr ? given[0] : first.best;
    const double weight = first.weight(id);
    if (lane_id() == 0) {
      args.ids[token * top_k] = id;
      args.weights[token * top_k] = static_cast<float>(weight);
    }
    if (top_k > 1) {
      MixerRound second{args, token, experts, id, epsilon};
      second.find_best();
      const int32_t other = given != nullptr ? given[1] : second.best;
      const double other_weight = second.weight(other);
      if (lane_id() == 0) {
        args.ids[token * top_k + 1] = other;
        args.weights[token * top_k + 1] = static_cast<float>(other_weight);
      }
    }
    if (lane_id() != 0) return;
    // Without an exclusion the maximum is absent only if all logits are.
    if (!device::present(first.max) && device::counts(args, token)) {
      device::add_one(args.tokens_without_finite_logit);
    }
  });
}

class SparseMixerOnDevice final : public DeviceRouter {
 public:
  explicit SparseMixerOnDevice(const MoeSpec& spec)
      : num_experts_(static_cast<int32_t>(spec.num_experts)),
        top_k_(static_cast<int32_t>(spec.top_k)),
        epsilon_(spec.router.jitter_epsilon) {}

  const int32_t* route(const DeviceRouterArgs& args, CUstream_st* stream) const override {
    if (args.num_tokens == 0) return args.ids;
    cuda::launch("routing.sparse_mixer", sparse_mixer_kernel,
                 device::warps_of(args.num_tokens, stream), args, num_experts_, top_k_, epsilon_);
    return args.ids;
  }

 private:
  int32_t num_experts_;
  int32_t top_k_;
  double epsilon_;
};

std::unique_ptr<DeviceRouter> make_sparse_mixer(const MoeSpec& spec) {
  return std::make_unique<SparseMixerOnDevice>(spec);
}

}  // namespace

const DeviceRouterRow kSparseMixerOnDevice{.supports = sparse_mixer_supports,
                                           .make = make_sparse_mixer};

}  // namespace conclave::inline v0::routing
