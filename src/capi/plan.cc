#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/json_text.h"
#include "capi/options.h"
#include "capi/structs.h"
#include "capi/values.h"

namespace conclave::inline v0::capi {
namespace {

Json json_of_plan(const PlanRow& row) {
  return {{"table", row.table}, {"name", row.name}, {"chosen", row.chosen}, {"reason", row.reason}};
}

Json json_of_plan(const PlanRung& rung) {
  return {{"first_tokens", rung.first_tokens},
          {"last_tokens", rung.last_tokens},
          {"kernel", rung.kernel},
          {"tile", rung.tile},
          {"reason", rung.reason},
          {"workspace_bytes", rung.workspace_bytes}};
}

Json json_of_plan(const PlanBuffer& buffer) {
  return {{"name", buffer.name},
          {"bytes", buffer.bytes},
          {"first_stage", buffer.first_stage},
          {"last_stage", buffer.last_stage}};
}

template <class Entry>
Json list_of(const std::vector<Entry>& entries) {
  Json list = Json::array();
  for (const Entry& entry : entries) list.push_back(json_of_plan(entry));
  return list;
}

Json json_of_plan(const Plan& plan) {
  return {{"rows", list_of(plan.rows)},
          {"device", plan.device},
          {"ladder", list_of(plan.ladder)},
          {"isa", plan.isa},
          {"arithmetic", plan.arithmetic},
          {"determinism", plan.determinism},
          {"tile", plan.tile},
          {"router", plan.router},
          {"dispatcher", plan.dispatcher},
          {"stages", plan.stages},
          {"buffers", list_of(plan.buffers)},
          {"part", plan.part},
          {"max_tokens", plan.max_tokens},
          {"num_local_experts", plan.num_local_experts},
          {"workspace_bytes", plan.workspace_bytes},
          {"packed_bytes", plan.packed_bytes},
          {"in_place_bytes", plan.in_place_bytes},
          {"packed_layout", plan.packed_layout}};
}

Plan plan_of(const conclave_context* context, const conclave_spec* spec,
             const conclave_layer_options* options, const conclave_parallel* parallel,
             const conclave_source* source) {
  return make_plan(*required(context, "context").state->context, required(spec, "spec").spec,
                   options_of(options), parallel_of(parallel),
                   source == nullptr ? nullptr : source->source.get());
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_layer_explain(const conclave_layer* layer, char** text) noexcept {
  return capi::guarded([&] {
    const conclave::Plan& plan = capi::required(layer, "layer").layer.plan();
    char*& to = capi::required(text, "text");
    to = capi::copy_text(conclave::explain(plan));
  });
}

conclave_status conclave_layer_plan_json(const conclave_layer* layer, char** json) noexcept {
  return capi::guarded([&] {
    const conclave::Plan& plan = capi::required(layer, "layer").layer.plan();
    char*& to = capi::required(json, "json");
    to = capi::copy_json(capi::json_of_plan(plan));
  });
}

conclave_status conclave_plan_explain(const conclave_context* context, const conclave_spec* spec,
                                      const conclave_layer_options* options,
                                      const conclave_parallel* parallel,
                                      const conclave_source* source, char** text) noexcept {
  return capi::guarded([&] {
    char*& to = capi::required(text, "text");
    const conclave::Plan plan = capi::plan_of(context, spec, options, parallel, source);
    to = capi::copy_text(conclave::explain(plan));
  });
}

conclave_status conclave_plan_json(const conclave_context* context, const conclave_spec* spec,
                                   const conclave_layer_options* options,
                                   const conclave_parallel* parallel, const conclave_source* source,
                                   char** json) noexcept {
  return capi::guarded([&] {
    char*& to = capi::required(json, "json");
    const conclave::Plan plan = capi::plan_of(context, spec, options, parallel, source);
    to = capi::copy_json(capi::json_of_plan(plan));
  });
}
