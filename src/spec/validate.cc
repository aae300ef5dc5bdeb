#include "core/part_spec.h"
#include "quant/check_spec.h"
#include "routing/check_router.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"
#include "conclave/spec.h"

#include <string>

namespace conclave::inline v0 {
namespace {

void check_range(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = std::string("MoeSpec.") + field + " is out of range",
               .found = std::to_string(value),
               .limit = std::to_string(low) + " to " + std::to_string(high)});
}

}  // namespace

void validate(const MoeSpec& spec) {
  check_range("num_experts", spec.num_experts, 1, kMaxSpecSize);
  check_range("num_zero_experts", spec.num_zero_experts, 0, kMaxSpecSize);
  check_range("top_k", spec.top_k, 1, spec.num_experts + spec.num_zero_experts);
  check_range("hidden_size", spec.hidden_size, 1, kMaxSpecSize);
  check_range("intermediate_size", spec.intermediate_size, 1, kMaxSpecSize);
  validate_parts(spec);
  quant::check_quant(spec);
  routing::check_router(spec);
}

ParameterCount count_parameters(const MoeSpec& spec) {
  validate(spec);
  return count_weights(spec);
}

}  // namespace conclave::inline v0
