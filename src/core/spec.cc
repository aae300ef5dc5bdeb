#include "conclave/spec.h"

#include "core/checked.h"

#include "conclave/error.h"

#include <string>

namespace conclave::inline v0 {
namespace {

// Beyond any model there is, and small enough that products of three sizes and an element size stay
// inside 63 bits.
constexpr int64_t kMaxSize = int64_t{1} << 20;

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
  const bool sinks = spec.shared.mode == SharedMode::kRouterWeight;
  return spec.num_experts + spec.num_zero_experts + (sinks ? spec.shared.count : 0);
}

int64_t num_slots(const MoeSpec& spec) {
  return spec.top_k + (spec.shared.mode == SharedMode::kFusedSlots ? spec.shared.count : 0);
}

int64_t expert_width(const MoeSpec& spec) {
  return spec.latent.size != 0 ? spec.latent.size : spec.hidden_size;
}

void validate(const MoeSpec& spec) {
  check_range("num_experts", spec.num_experts, 1, kMaxSize);
  check_range("top_k", spec.top_k, 1, spec.num_experts);
  check_range("hidden_size", spec.hidden_size, 1, kMaxSize);
  check_range("intermediate_size", spec.intermediate_size, 1, kMaxSize);
  if (spec.shared.mode != SharedMode::kNone) {
    check_range("shared.intermediate_size", spec.shared.intermediate_size, 1, kMaxSize);
  }
  const DType dtype = spec.weight_dtype;
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    throw Error(ErrorCode::kDType, {.what = "MoeSpec.weight_dtype is not a weight type",
                                    .expected = "F32, F16 or BF16",
                                    .found = std::string(to_string(dtype))});
  }
  const DType rounding = spec.router.logits_dtype;
  if (rounding != DType::kF32 && rounding != DType::kF16 && rounding != DType::kBF16) {
    throw Error(ErrorCode::kDType, {.what = "RouterSpec.logits_dtype is not a rounding type",
                                    .expected = "F32, F16 or BF16",
                                    .found = std::string(to_string(rounding))});
  }
}

ParameterCount count_parameters(const MoeSpec& spec) {
  validate(spec);
  const int64_t expert = 3 * spec.hidden_size * spec.intermediate_size;
  int64_t always = spec.has_gate ? spec.num_experts * spec.hidden_size : 0;
  if (spec.shared.mode != SharedMode::kNone) {
    always += 3 * spec.hidden_size * spec.shared.intermediate_size;
  }
  if (spec.shared.mode == SharedMode::kSigmoidGate) always += spec.hidden_size;
  const auto experts = checked_mul(spec.num_experts, expert);
  if (!experts) {
    throw Error(ErrorCode::kSizeOverflow, "the parameter count of a layer does not fit 63 bits");
  }
  return {.total = *experts + always, .active = spec.top_k * expert + always};
}

}  // namespace conclave::inline v0
