#include "conclave/spec.h"

#include "core/part_spec.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"

namespace conclave::inline v0 {

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

const ActivationSpec& activation_or_routed(const ActivationSpec& own, const MoeSpec& spec) {
  return own.name.empty() ? spec.activation : own;
}

}  // namespace conclave::inline v0
