#include "routing/cuda/route.h"
#include "routing/cuda/rows.cuh"
#include "routing/cuda/terms.cuh"
#include "routing/softmax_threshold/softmax_threshold.h"

#include <cstdint>
#include <memory>

namespace conclave::inline v0::routing {
namespace {

using device::kFullWarp;
using device::lane_id;

struct ThresholdRule {
  int32_t experts;
  int32_t top_k;
  double threshold;
};

// The best logit of a row, by a whole warp.
__device__ float best_logit(const DeviceRouterArgs& args, const ThresholdRule& rule,
                            int64_t token) {
  uint32_t best = device::ordered(-CUDART_INF_F);
  for (int32_t i = lane_id(); i < rule.experts; i += 32) {
    best = max(best, device::ordered(device::load_logit(args, token, i)));
  }
  return device::value_of(device::warp_max_key(best));
}

// The logit that a choice is weighed by, absent() below the threshold or without an expert.
__device__ __forceinline__ double kept_logit(const DeviceRouterArgs& args,
                                             const ThresholdRule& rule, int64_t token, int32_t id,
                                             float best) {
  if (id < 0 || id >= rule.experts) return device::absent();
  const float logit = device::load_logit(args, token, id);
  const double distance = static_cast<double>(logit) - static_cast<double>(best);
  const bool keeps = logit == best || distance >= rule.threshold;
  return keeps && device::present(logit) ? static_cast<double>(logit) : device::absent();
}

// Counts a row of given ids; the choosing launch has counted the others.
__device__ __forceinline__ void count_given(const DeviceRouterArgs& args, int64_t token,
                                            float best) {
  if (args.given_ids == nullptr) return;
  if (!device::present(best) && lane_id() == 0 && device::counts(args, token)) {
    device::add_one(args.tokens_without_finite_logit);
  }
}

// Lane j weighs choice j. `ids` are written only if they are this router's own.
__global__ void __launch_bounds__(device::kRowThreads)
    threshold_kernel(const __grid_constant__ DeviceRouterArgs args, const ThresholdRule rule) {
  device::for_each_token(args.num_tokens, [&](int64_t token) {
    const int64_t at = token * rule.top_k + lane_id();
    const int32_t* ids = args.given_ids != nullptr ? args.given_ids : args.ids;
    const int32_t id = lane_id() < rule.top_k ? ids[at] : -1;
    const float best = best_logit(args, rule, token);
    const double term = kept_logit(args, rule, token, id, best);
    const double share = device::softmax_weight(term, 32);
    if (lane_id() < rule.top_k) {
      args.weights[at] = device::present(share) ? static_cast<float>(share) : 0.0F;
    }
    if (args.given_ids == nullptr) {
      // A row without a finite logit keeps the first ids, as the choosing launch gave them.
      const bool drops = device::present(best) && !device::present(term);
      if (lane_id() < rule.top_k && drops) args.ids[at] = -1;
    }
    count_given(args, token, best);
  });
}

// The same for more choices than lanes: lane j weighs choices j, j + 32 and so on.
__global__ void __launch_bounds__(device::kRowThreads)
    wide_threshold_kernel(const __grid_constant__ DeviceRouterArgs args, const ThresholdRule rule) {
  device::for_each_token(args.num_tokens, [&](int64_t token) {
    const int64_t first = token * rule.top_k;
    const int32_t* ids = (args.given_ids != nullptr ? args.given_ids : args.ids) + first;
    const float best = best_logit(args, rule, token);
    const auto term = [&](int32_t slot) { return kept_logit(args, rule, token, ids[slot], best); };
    const device::Softmax softmax = device::softmax_of_terms(rule.top_k, term);
    for (int32_t slot = lane_id(); slot < rule.top_k; slot += 32) {
      const double logit = term(slot);
      const double share = softmax.weight_of(logit);
      args.weights[first + slot] = device::present(share) ? static_cast<float>(share) : 0.0F;
      const bool drops = device::present(best) && !device::present(logit);
      if (args.given_ids == nullptr && drops) args.ids[first + slot] = -1;
    }
    count_given(args, token, best);
  });
}

class SoftmaxThresholdOnDevice final : public DeviceRouter {
 public:
  explicit SoftmaxThresholdOnDevice(const MoeSpec& spec)
      : choice_(plan_device_route(spec)),
        rule_{.experts = static_cast<int32_t>(spec.num_experts),
              .top_k = static_cast<int32_t>(spec.top_k),
              .threshold = softmax_threshold(spec)} {}

  const int32_t* route(const DeviceRouterArgs& args, CUstream_st* stream) const override {
    if (args.num_tokens == 0) return args.ids;
    if (args.given_ids == nullptr) choose_by_route(choice_, args, stream);
    const auto kernel = rule_.top_k > kLaneSlots ? wide_threshold_kernel : threshold_kernel;
    cuda::launch("routing.threshold", kernel, device::warps_of(args.num_tokens, stream), args,
                 rule_);
    return args.given_ids != nullptr ? args.given_ids : args.ids;
  }

 private:
  DeviceRoutePlan choice_;
  ThresholdRule rule_;
};

Support supports_softmax_threshold(const MoeSpec& spec) {
  if (Support support = softmax_threshold_supports(spec); !support) return support;
  return device_route_supports(spec);
}

std::unique_ptr<DeviceRouter> make_softmax_threshold(const MoeSpec& spec) {
  return std::make_unique<SoftmaxThresholdOnDevice>(spec);
}

}  // namespace

const DeviceRouterRow kSoftmaxThresholdOnDevice{.supports = supports_softmax_threshold,
                                                .make = make_softmax_threshold};

}  // namespace conclave::inline v0::routing
