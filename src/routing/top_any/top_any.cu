#include "routing/cuda/route.h"
#include "routing/cuda/rows.cuh"
#include "routing/top_any/top_any.h"

#include <cstdint>
#include <memory>

namespace conclave::inline v0::routing {
namespace {

using device::kFullWarp;
using device::lane_id;

struct TopAnyRule {
  int32_t experts;
  int32_t top_k;
};

// The row has a logit that is neither NaN nor -inf.
__device__ bool has_present(const DeviceRouterArgs& args, const TopAnyRule& rule, int64_t token) {
  bool any = false;
  for (int32_t i = lane_id(); i < rule.experts; i += 32) {
    any |= device::present(device::load_logit(args, token, i));
  }
  return __any_sync(kFullWarp, any) != 0;
}

// Lane j weighs choices j, j + 32 and so on. `ids` are written only if they are this router's own.
__global__ void __launch_bounds__(device::kRowThreads)
    top_any_kernel(const __grid_constant__ DeviceRouterArgs args, const TopAnyRule rule) {
  const auto* thresholds = static_cast<const float*>(args.tensors[0]);
  device::for_each_token(args.num_tokens, [&](int64_t token) {
    const int64_t first = token * rule.top_k;
    const int32_t* ids = (args.given_ids != nullptr ? args.given_ids : args.ids) + first;
    const auto logit_of = [&](int32_t slot) {
      const int32_t id = ids[slot];
      const bool named = id >= 0 && id < rule.experts;
      const float logit = named ? device::load_logit(args, token, id) : -CUDART_INF_F;
      return device::present(logit) ? logit : -CUDART_INF_F;
    };
    const auto passes = [&](int32_t slot, float logit) {
      return device::present(logit) && logit > thresholds[ids[slot]];
    };
    int32_t above = 0;
    uint32_t best = device::ordered(-CUDART_INF_F);
    for (int32_t slot = lane_id(); slot < rule.top_k; slot += 32) {
      const float logit = logit_of(slot);
      above += passes(slot, logit) ? 1 : 0;
      best = max(best, device::ordered(logit));
    }
    above = __reduce_add_sync(kFullWarp, above);
    best = device::warp_max_key(best);
    const bool any = device::present(device::value_of(best));
    int32_t alone = rule.top_k;  // the slot that is kept if no logit is above its threshold
    for (int32_t slot = lane_id(); above == 0 && any && slot < rule.top_k; slot += 32) {
      if (device::ordered(logit_of(slot)) == best) alone = min(alone, slot);
    }
    alone = __reduce_min_sync(kFullWarp, alone);
    for (int32_t slot = lane_id(); slot < rule.top_k; slot += 32) {
      const bool keeps = above == 0 ? slot == alone : passes(slot, logit_of(slot));
      args.weights[first + slot] = keeps ? static_cast<float>(1.0 / max(above, 1)) : 0.0F;
      // A row without a finite logit keeps the first ids, as the choosing launch gave them.
      if (args.given_ids == nullptr && any && !keeps) args.ids[first + slot] = -1;
    }
    if (args.given_ids != nullptr && !has_present(args, rule, token) && lane_id() == 0 &&
        device::counts(args, token)) {
      device::add_one(args.tokens_without_finite_logit);
    }
  });
}

class TopAnyOnDevice final : public DeviceRouter {
 public:
  explicit TopAnyOnDevice(const MoeSpec& spec)
      : choice_(plan_device_route(spec)),
        rule_{.experts = static_cast<int32_t>(spec.num_experts),
              .top_k = static_cast<int32_t>(spec.top_k)} {}

  const int32_t* route(const DeviceRouterArgs& args, CUstream_st* stream) const override {
    if (args.num_tokens == 0) return args.ids;
    if (args.given_ids == nullptr) choose_by_route(choice_, args, stream);
    cuda::launch("routing.top_any", top_any_kernel, device::warps_of(args.num_tokens, stream), args,
                 rule_);
    return args.given_ids != nullptr ? args.given_ids : args.ids;
  }

 private:
  DeviceRoutePlan choice_;
  TopAnyRule rule_;
};

Support supports_top_any(const MoeSpec& spec) {
  if (Support support = top_any_supports(spec); !support) return support;
  return device_route_supports(spec);
}

std::unique_ptr<DeviceRouter> make_top_any(const MoeSpec& spec) {
  return std::make_unique<TopAnyOnDevice>(spec);
}

}  // namespace

const DeviceRouterRow kTopAnyOnDevice{.supports = supports_top_any, .make = make_top_any};

}  // namespace conclave::inline v0::routing
