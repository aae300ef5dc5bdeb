#include "routing/cuda/route.h"
#include "routing/cuda/rows.cuh"
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

// Lane j holds choice j, lane k + s holds sink s.
__global__ void __launch_bounds__(device::kRowThreads)
    sink_kernel(const __grid_constant__ DeviceRouterArgs args, const SinkRule rule) {
  device::for_each_token(args.num_tokens, [&](int64_t token) {
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
      const float logit = device::load_logit(args, token, column);
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
      usable = usable || device::present(device::load_logit(args, token, i));
    }
    usable = __any_sync(kFullWarp, usable);
    if (!usable && lane_id() == 0 && device::counts(args, token)) {
      device::add_one(args.tokens_without_finite_logit);
    }
  });
}

// Choices plus sinks of one softmax: a lane each.
constexpr int64_t kMaxSinkTerms = 32;

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
    cuda::launch("routing.sinks", sink_kernel, device::warps_of(args.num_tokens, stream), sinks,
                 rule_);
    return sinks.ids;
  }

 private:
  DeviceRoutePlan choice_;
  SinkRule rule_;
};

Support supports(const MoeSpec& spec) {
  if (Support support = sink_softmax_supports(spec); !support) return support;
  const Support terms =
      at_most("top_k with shared experts", spec.top_k + spec.shared.count, kMaxSinkTerms);
  return terms ? device_route_supports(spec) : terms;
}

std::unique_ptr<DeviceRouter> make(const MoeSpec& spec) {
  return std::make_unique<SinkSoftmaxOnDevice>(spec);
}

}  // namespace

const DeviceRouterRow kSinkSoftmaxOnDevice{.supports = supports, .make = make};

}  // namespace conclave::inline v0::routing
