#include "conclave/balancer.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/structs.h"
#include "capi/values.h"

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0::capi {
namespace {

BalancerOptions balancer_options_of(const conclave_balancer_options& given) {
  constexpr unsigned kFlags = CONCLAVE_BALANCER_LOG | CONCLAVE_BALANCER_BETWEEN_FORWARDS;
  check_flags("options.flags", given.flags, kFlags);
  BalancerOptions options;
  options.communicator = required(given.communicator, "options.communicator").communicator.get();
  options.log_balancedness = (given.flags & CONCLAVE_BALANCER_LOG) != 0;
  options.use_async = (given.flags & CONCLAVE_BALANCER_BETWEEN_FORWARDS) == 0;
  const auto set = [](auto& to, const auto& value) {
    if (value != 0) to = value;
  };
  if (given.rule != nullptr) options.rule = given.rule;
  set(options.num_nodes, given.num_nodes);
  set(options.window_size, given.window_size);
  set(options.step_interval, given.step_interval);
  set(options.log_balancedness_interval, given.log_balancedness_interval);
  set(options.least_gain, given.least_gain);
  set(options.processor_share, given.processor_share);
  set(options.piece_bytes, given.piece_bytes);
  return options;
}

// A layer of the caller's, and what it reads.
struct BalancedLayer {
  std::shared_ptr<ContextState> context;
  std::shared_ptr<KeptSources> kept;
  MoeLayer layer;  // shares weights and places with the caller's, which may be ended
};

std::vector<BalancedLayer> layers_of(conclave_layer* const* layers, size_t num_layers) {
  constexpr size_t kMostLayers = 65536;
  const auto given = array_of(layers, num_layers, "layers", "num_layers", kMostLayers);
  std::vector<const conclave_layer*> handles;
  for (size_t i = 0; i < given.size(); ++i) {
    const std::string place = "layers[" + std::to_string(i) + "]";
    handles.push_back(&required(given[i], place.c_str()));
  }
  std::vector<BalancedLayer> shared;
  for (const conclave_layer* handle : handles) {
    const MoeLayer& layer = handle->layer;
    shared.push_back(
        {handle->context, handle->kept, layer.with_max_tokens(layer.plan().max_tokens)});
  }
  return shared;
}

std::vector<MoeLayer*> pointers_to(std::vector<BalancedLayer>& layers) {
  std::vector<MoeLayer*> pointers;
  for (BalancedLayer& one : layers) pointers.push_back(&one.layer);
  return pointers;
}

}  // namespace
}  // namespace conclave::inline v0::capi

// Members are ended from the last to the first: the balancer before what it uses.
struct conclave_balancer {
  std::shared_ptr<conclave::capi::ContextState> context;
  std::shared_ptr<conclave::Communicator> communicator;
  std::vector<conclave::capi::BalancedLayer> layers;
  conclave::Balancer balancer;

  conclave_balancer(const conclave_context& log, std::vector<conclave::capi::BalancedLayer> of,
                    const conclave_balancer_options& given)
      : context(log.state),
        communicator(given.communicator->communicator),
        layers(std::move(of)),
        balancer(*context->context, conclave::capi::pointers_to(layers),
                 conclave::capi::balancer_options_of(given)) {}
};

namespace capi = conclave::capi;

conclave_status conclave_balancer_create(const conclave_context* context,
                                         conclave_layer* const* layers, size_t num_layers,
                                         const conclave_balancer_options* options,
                                         conclave_balancer** out) noexcept {
  return capi::guarded([&] {
    const conclave_context& log = capi::required(context, "context");
    capi::required(out, "out");
    const conclave_balancer_options given = capi::take(options, "options");
    static_cast<void>(capi::balancer_options_of(given));
    *out = new conclave_balancer(log, capi::layers_of(layers, num_layers), given);
  });
}

void conclave_balancer_destroy(conclave_balancer* balancer) noexcept { delete balancer; }

conclave_status conclave_balancer_load(conclave_balancer* balancer, size_t layer, int64_t** load,
                                       size_t* num_experts) noexcept {
  return capi::guarded([&] {
    conclave::Balancer& of = capi::required(balancer, "balancer").balancer;
    int64_t*& to = capi::required(load, "load");
    size_t& count = capi::required(num_experts, "num_experts");
    const std::span<int64_t> rows = of.load(layer);
    to = rows.data();
    count = rows.size();
  });
}

conclave_status conclave_balancer_step(conclave_balancer* balancer) noexcept {
  return capi::guarded([&] { capi::required(balancer, "balancer").balancer.step(); });
}

conclave_status conclave_balancer_rebalance(conclave_balancer* balancer) noexcept {
  return capi::guarded([&] { capi::required(balancer, "balancer").balancer.rebalance(); });
}

conclave_status conclave_balancer_get_status(const conclave_balancer* balancer,
                                             conclave_balancer_status* status) noexcept {
  return capi::guarded([&] {
    const conclave::BalancerStatus now = capi::required(balancer, "balancer").balancer.status();
    capi::fill(capi::fillable(status, "status"), {.struct_size = 0,
                                                  .steps = now.steps,
                                                  .rebalances = now.rebalances,
                                                  .experts_moved = now.experts_moved,
                                                  .balancedness = now.balancedness,
                                                  .is_moving = now.is_moving ? 1 : 0,
                                                  .reserved = 0});
  });
}
