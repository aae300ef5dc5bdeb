#include "core/part_spec.h"

#include "core/shared_facts.h"

#include "conclave/error.h"

#include <cmath>
#include <limits>
#include <string>

namespace conclave::inline v0 {
namespace {

[[noreturn]] void refuse(const std::string& field, const std::string& value,
                         const std::string& limit) {
  throw Error(
      ErrorCode::kInvalidArgument,
      {.what = "MoeSpec." + field + " has no meaning here", .found = value, .limit = limit});
}

void check_size(const char* field, int64_t value, int64_t low) {
  if (value >= low && value <= kMaxSpecSize) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = std::string("MoeSpec.") + field + " is out of range",
               .found = std::to_string(value),
               .limit = std::to_string(low) + " to " + std::to_string(kMaxSpecSize)});
}

// The factor is used as float32.
void check_factor(const char* field, double value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  if (std::isfinite(value) && std::abs(value) <= kLargest) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = std::string("MoeSpec.") + field + " is out of range",
               .found = std::to_string(value),
               .limit = "finite in float32"});
}

template <class Choice>
void check_choice(const char* field, Choice value, Choice last) {
  const auto number = static_cast<int64_t>(value);
  if (number >= 0 && number <= static_cast<int64_t>(last)) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = std::string("MoeSpec.") + field + " is out of range",
               .found = std::to_string(number),
               .limit = "0 to " + std::to_string(static_cast<int64_t>(last))});
}

void check_activation_default(const std::string& field, const ActivationSpec& activation) {
  if (activation.limit == 0 && activation.alpha == 0 && activation.beta == 0 &&
      activation.linear_beta == 0) {
    return;
  }
  refuse(field, "parameters", "none without a name: then it is the routed experts' activation");
}

void check_no_shared(const SharedExpertSpec& shared) {
  const std::string limit = "its default with SharedMode::kNone";
  if (shared.intermediate_size != 0) {
    refuse("shared.intermediate_size", std::to_string(shared.intermediate_size), limit);
  }
  if (shared.count != 1) refuse("shared.count", std::to_string(shared.count), limit);
  if (shared.has_bias) refuse("shared.has_bias", "true", limit);
  if (!shared.activation.name.empty()) {
    refuse("shared.activation", shared.activation.name, limit);
  }
}

void check_shared(const MoeSpec& spec) {
  const SharedExpertSpec& shared = spec.shared;
  const bool fused = shared_facts(shared).has_slots();
  if (shared.activation.name.empty()) {
    check_activation_default("shared.activation", shared.activation);
  }
  if (!fused && shared.slot_weight != 1) {
    refuse("shared.slot_weight", std::to_string(shared.slot_weight),
           "1 but for SharedMode::kFusedSlots");
  }
  if (!shared_facts(shared).is_there) return check_no_shared(shared);
  check_size("shared.intermediate_size", shared.intermediate_size, 1);
  check_size("shared.count", shared.count, 1);
  check_factor("shared.slot_weight", shared.slot_weight);
  if (shared.count != 1 && !shared_facts(shared).weighs_rows()) {
    refuse("shared.count", std::to_string(shared.count),
           "1 but for SharedMode::kRouterWeight and SharedMode::kFusedSlots");
  }
  if (fused && spec.num_zero_experts != 0) {
    refuse(
        "shared.mode",
        "SharedMode::kFusedSlots with " + std::to_string(spec.num_zero_experts) + " zero experts",
        "num_zero_experts 0: both would have the ids from num_experts on");
  }
}

void check_latent(const LatentSpec& latent) {
  check_size("latent.size", latent.size, 0);
  check_factor("latent.norm_epsilon", latent.norm_epsilon);
  if (latent.norm_epsilon < 0) {
    refuse("latent.norm_epsilon", std::to_string(latent.norm_epsilon), "at least 0");
  }
  if (latent.has_norm && latent.size == 0) {
    refuse("latent.has_norm", "true", "false where latent.size is 0");
  }
}

void check_residual(const ResidualMlpSpec& residual) {
  check_size("residual.intermediate_size", residual.intermediate_size, 0);
  if (residual.activation.name.empty()) {
    check_activation_default("residual.activation", residual.activation);
  } else if (residual.intermediate_size == 0) {
    refuse("residual.activation", residual.activation.name,
           "no name where residual.intermediate_size is 0");
  }
}

void check_weight_on(const MoeSpec& spec) {
  if (spec.weight_on == WeightOn::kInput && shared_facts(spec).has_slots()) {
    refuse("weight_on", "WeightOn::kInput with SharedMode::kFusedSlots",
           "WeightOn::kOutput: the weights of shared experts' slots multiply their output");
  }
}

}  // namespace

void validate_parts(const MoeSpec& spec) {
  check_choice("shared.mode", spec.shared.mode, SharedMode::kFusedSlots);
  check_choice("weight_on", spec.weight_on, WeightOn::kInput);
  check_shared(spec);
  check_latent(spec.latent);
  check_residual(spec.residual);
  check_weight_on(spec);
  check_factor("output_scale", spec.output_scale);
}

}  // namespace conclave::inline v0
