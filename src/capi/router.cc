#include "capi/guard.h"
#include "capi/sources.h"
#include "capi/structs.h"
#include "capi/tensors.h"

namespace conclave::inline v0::capi {
namespace {

RouteArgs args_of(const conclave_route_args& given) {
  RouteArgs args{.logits = view_of(given.logits, "logits"),
                 .token_ids = view_of(given.token_ids, "token_ids"),
                 .selection_bias = view_of(given.selection_bias, "selection_bias"),
                 .expert_scale = view_of(given.expert_scale, "expert_scale"),
                 .global_scale = view_of(given.global_scale, "global_scale"),
                 .top_k = given.top_k,
                 .banned_experts = view_of(given.banned_experts, "banned_experts"),
                 .expert_budget = given.expert_budget,
                 .topk_ids = needed_view(given.topk_ids, "topk_ids"),
                 .topk_weights = needed_view(given.topk_weights, "topk_weights"),
                 .shared_weights = view_of(given.shared_weights, "shared_weights"),
                 .stream = {given.stream}};
  args.tensors = named_views(given.tensors, given.num_tensors);
  return args;
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_router_create(const conclave_context* context, const conclave_spec* spec,
                                       conclave_router** out) noexcept {
  return capi::guarded([&] {
    const auto& state = capi::required(context, "context").state;
    const conclave::MoeSpec& of = capi::required(spec, "spec").spec;
    capi::required(out, "out");
    capi::hand_out(out, state, conclave::TokenRouter(*state->context, of));
  });
}

void conclave_router_destroy(conclave_router* router) noexcept { delete router; }

conclave_status conclave_router_route(const conclave_router* router,
                                      const conclave_route_args* args) noexcept {
  return capi::guarded([&] {
    const conclave::TokenRouter& of = capi::required(router, "router").router;
    of.route(capi::args_of(capi::take(args, "args")));
  });
}
