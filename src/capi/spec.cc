#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/spec_json.h"
#include "capi/structs.h"
#include "capi/values.h"
#include "core/shared_facts.h"

#include "conclave/error.h"

namespace conclave::inline v0::capi {
namespace {

MoeSpec with_rows(const MoeSpec& spec, conclave_rows rows) {
  if (rows == CONCLAVE_ROWS_PLAIN) return with_plain_rows(spec);
  if (rows == CONCLAVE_ROWS_INT8) return with_int8_rows(spec);
  throw Error(ErrorCode::kInvalidArgument, {.what = "a field has no such value",
                                            .tensor = "rows",
                                            .expected = "a CONCLAVE_ROWS",
                                            .found = std::to_string(rows)});
}

conclave_spec_info info_of(const MoeSpec& spec) {
  // A spec for routing alone has no matrices, and so nothing to count.
  const bool is_routing = spec.num_experts > 0 && spec.top_k > 0 && spec.hidden_size == 0 &&
                          spec.intermediate_size == 0;
  const ParameterCount parameters = is_routing ? ParameterCount{} : count_parameters(spec);
  return {.struct_size = 0,
          .num_experts = spec.num_experts,
          .top_k = spec.top_k,
          .hidden_size = spec.hidden_size,
          .intermediate_size = spec.intermediate_size,
          .num_logits = num_logits(spec),
          .num_slots = num_slots(spec),
          .num_zero_experts = spec.num_zero_experts,
          .parameters = parameters.total,
          .active_parameters = parameters.active,
          .weight_dtype = to_c(spec.weight_dtype),
          .row_dtype = to_c(natural_row_dtype(spec)),
          .has_gate = spec.has_gate ? 1 : 0,
          .has_shared = shared_facts(spec).is_there ? 1 : 0};
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_spec_from_json(const char* json, conclave_spec** out) noexcept {
  return capi::guarded([&] {
    const char* const text = &capi::required(json, "json");
    capi::required(out, "out");
    capi::hand_out(out, capi::spec_of_json(text));
  });
}

conclave_status conclave_spec_to_json(const conclave_spec* spec, char** json) noexcept {
  return capi::guarded([&] {
    const conclave::MoeSpec& from = capi::required(spec, "spec").spec;
    char*& to = capi::required(json, "json");
    to = capi::copy_json(capi::json_of_spec(from));
  });
}

conclave_status conclave_spec_with_rows(const conclave_spec* spec, conclave_rows rows,
                                        conclave_spec** out) noexcept {
  return capi::guarded([&] {
    const conclave::MoeSpec& from = capi::required(spec, "spec").spec;
    capi::required(out, "out");
    capi::hand_out(out, capi::with_rows(from, rows));
  });
}

void conclave_spec_destroy(conclave_spec* spec) noexcept { delete spec; }

conclave_status conclave_spec_get_info(const conclave_spec* spec,
                                       conclave_spec_info* info) noexcept {
  return capi::guarded([&] {
    const conclave::MoeSpec& from = capi::required(spec, "spec").spec;
    capi::fill(capi::fillable(info, "info"), capi::info_of(from));
  });
}
