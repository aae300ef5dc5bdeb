#include "routing/cuda/route.h"
#include "routing/cuda/rows.cuh"
#include "routing/cuda/terms.cuh"
#include "routing/sink_softmax/sink_softmax.h"

#include <cstdint>
#include <memory>
#include <string>

namespace conclave::inline v0::routing {
namespace {

using device::kFullWarp;
using device::lane_id;

__device__ double log_sigmoid(double logit) { return fmin(logit, 0.0) - log1p(exp(-fabs(logit))); }

struct SinkRule {
  int32_t experts;
  int32_t top_k;
  int32_t sinks;
  double scale;
};

// What term j < k + S of a token's softmax weighs: choice j, or sink j - k; absent() without one.
__device__ __forceinline__ double sink_term(const DeviceRouterArgs& args, const SinkRule& rule,
                                            int64_t token, int32_t term) {
  int32_t column = -1;
  if (term < rule.top_k) {
    const int32_t id = args.ids[token * rule.top_k + term];
    // An absent bias means that the id was chosen only because nothing better was left.
    const bool barred = args.selection_bias != nullptr && id >= 0 && id < rule.experts &&
                        args.given_ids == nullptr && !device::present(args.selection_bias[id]);
    column = id >= 0 && id < rule.experts && !barred ? id : -1;
  } else if (term < rule.top_k + rule.sinks) {
    column = rule.experts + term - rule.top_k;
  }
  if (column < 0) return device::absent();
  const float logit = device::load_logit(args, token, column);
  return device::present(logit) ? log_sigmoid(static_cast<double>(logit)) : device::absent();
}

__device__ __forceinline__ double scale_of(const DeviceRouterArgs& args, const SinkRule& rule) {
  if (args.global_scale == nullptr) return rule.scale;
  return rule.scale * static_cast<double>(*args.global_scale);
}

__device__ __forceinline__ void store_share(const DeviceRouterArgs& args, const SinkRule& rule,
                                            int64_t token, int32_t term, double share,
                                            double scale) {
  const float weight = device::present(share) ? static_cast<float>(share * scale) : 0.0F;
  if (term < rule.top_k) {
    args.weights[token * rule.top_k + term] = weight;
  } else if (term < rule.top_k + rule.sinks) {
    args.shared_weights[token * rule.sinks + term - rule.top_k] = weight;
  }
}

// Counts a row of given ids; the choosing launch has counted the others.
__device__ __forceinline__ void count_given(const DeviceRouterArgs& args, const SinkRule& rule,
                                            int64_t token) {
  if (args.given_ids == nullptr) return;
  bool usable = false;
  for (int32_t i = lane_id(); i < rule.experts; i += 32) {
    usable = usable || device::present(device::load_logit(args, token, i));
  }
  usable = __any_sync(kFullWarp, usable);
  if (!usable && lane_id() == 0 && device::counts(args, token)) {
    device::add_one(args.tokens_without_finite_logit);
  }
}

// Lane j holds term j.
__global__ void __launch_bounds__(device::kRowThreads)
    sink_kernel(const __grid_constant__ DeviceRouterArgs args, const SinkRule rule) {
  device::for_each_token(args.num_tokens, [&](int64_t token) {
    const double term = sink_term(args, rule, token, lane_id());
    const double share = device::softmax_weight(term, 32);
    store_share(args, rule, token, lane_id(), share, scale_of(args, rule));
    count_given(args, rule, token);
  });
}

// The same for more terms than lanes: lane j visits terms j, j + 32 and so on.
__global__ void __launch_bounds__(device::kRowThreads)
    wide_sink_kernel(const __grid_constant__ DeviceRouterArgs args, const SinkRule rule) {
  device::for_each_token(args.num_tokens, [&](int64_t token) {
    const int32_t count = rule.top_k + rule.sinks;
    const auto term = [&](int32_t i) { return sink_term(args, rule, token, i); };
    const device::Softmax softmax = device::softmax_of_terms(count, term);
    const double scale = scale_of(args, rule);
    for (int32_t i = lane_id(); i < count; i += 32) {
      store_share(args, rule, token, i, softmax.weight_of(term(i)), scale);
    }
    count_given(args, rule, token);
  });
}

// The choosing half: the k best by sigmoid, with the selection bias.
MoeSpec choice_of(const MoeSpec& spec) {
  MoeSpec choice = spec;
  choice.router.score = RouterScore::kSigmoid;
  choice.router.order = RouterOrder::kScoreThenTopk;
  choice.router.renormalize = Renormalize::kNone;
  return choice;
}

class SinkSoftmaxOnDevice final : public DeviceRouter {
 public:
  explicit SinkSoftmaxOnDevice(const MoeSpec& spec)
      : choice_(plan_device_route(choice_of(spec))),
        rule_{.experts = static_cast<int32_t>(spec.num_experts),
              .top_k = static_cast<int32_t>(spec.top_k),
              .sinks = static_cast<int32_t>(spec.shared.count),
              .scale = spec.router.scale} {}

  const int32_t* route(const DeviceRouterArgs& args, CUstream_st* stream) const override {
    DeviceRouterArgs sinks = args;
    if (args.given_ids == nullptr) {
      choose_by_route(choice_, args, stream);
    } else {
      sinks.ids = const_cast<int32_t*>(args.given_ids);
    }
    if (args.num_tokens == 0) return sinks.ids;
    const auto kernel = rule_.top_k + rule_.sinks > kLaneSlots ? wide_sink_kernel : sink_kernel;
    cuda::launch("routing.sinks", kernel, device::warps_of(args.num_tokens, stream), sinks, rule_);
    return sinks.ids;
  }

 private:
  DeviceRoutePlan choice_;
  SinkRule rule_;
};

Support supports_sink_softmax(const MoeSpec& spec) {
  if (Support support = sink_softmax_supports(spec); !support) return support;
  return device_route_supports(spec);
}

std::unique_ptr<DeviceRouter> make_sink_softmax(const MoeSpec& spec) {
  return std::make_unique<SinkSoftmaxOnDevice>(spec);
}

}  // namespace

const DeviceRouterRow kSinkSoftmaxOnDevice{.supports = supports_sink_softmax,
                                           .make = make_sink_softmax};

}  // namespace conclave::inline v0::routing
