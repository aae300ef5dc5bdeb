#include "conclave/spec.h"

#include "core/part_spec.h"
#include "core/quant_spec.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"

#include "conclave/error.h"

#include <algorithm>
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

bool is_gated(const ActivationSpec& activation) { return !activation.name.ends_with("_no_mul"); }

int64_t num_logits(const MoeSpec& spec) {
  return spec.num_experts + spec.num_zero_experts + num_shared_logits(spec);
}

int64_t num_slots(const MoeSpec& spec) { return spec.top_k + num_shared_slots(spec); }

DType shared_weight_dtype(const MoeSpec& spec) {
  return spec.shared.weight_dtype.value_or(spec.weight_dtype);
}

DType natural_row_dtype(const MoeSpec& spec) {
  return is_plain(spec.weight_dtype) ? spec.weight_dtype : DType::kBF16;
}

int64_t expert_width(const MoeSpec& spec) {
  return spec.latent.size != 0 ? spec.latent.size : spec.hidden_size;
}

void validate_all_but_router(const MoeSpec& spec) {
  check_range("num_experts", spec.num_experts, 1, kMaxSpecSize);
  check_range("num_zero_experts", spec.num_zero_experts, 0, kMaxSpecSize);
  check_range("top_k", spec.top_k, 1, spec.num_experts + spec.num_zero_experts);
  check_range("hidden_size", spec.hidden_size, 1, kMaxSpecSize);
  check_range("intermediate_size", spec.intermediate_size, 1, kMaxSpecSize);
  validate_parts(spec);
  validate_quant(spec);
}

const ActivationSpec& activation_or_routed(const ActivationSpec& own, const MoeSpec& spec) {
  return own.name.empty() ? spec.activation : own;
}

}  // namespace conclave::inline v0
