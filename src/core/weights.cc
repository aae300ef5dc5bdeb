#include "conclave/weights.h"

#include <array>
#include <string>

namespace conclave::inline v0 {
namespace {

constexpr std::array kRoleNames = {"gate",
                                   "up",
                                   "down",
                                   "router",
                                   "shared_gate",
                                   "shared_up",
                                   "shared_down",
                                   "shared_expert_gate",
                                   "gate_bias",
                                   "up_bias",
                                   "down_bias",
                                   "shared_gate_bias",
                                   "shared_up_bias",
                                   "shared_down_bias",
                                   "router_bias",
                                   "selection_bias",
                                   "expert_scale",
                                   "global_scale",
                                   "router_input_scale",
                                   "hash_table",
                                   "mix_gate",
                                   "mix_gate_bias",
                                   "latent_down",
                                   "latent_norm",
                                   "latent_up",
                                   "output_bias",
                                   "residual_gate",
                                   "residual_up",
                                   "residual_down",
                                   "gate_scale",
                                   "up_scale",
                                   "down_scale",
                                   "gate_input_scale",
                                   "up_input_scale",
                                   "down_input_scale",
                                   "shared_gate_scale",
                                   "shared_up_scale",
                                   "shared_down_scale",
                                   "shared_gate_input_scale",
                                   "shared_up_input_scale",
                                   "shared_down_input_scale"};
static_assert(kRoleNames.size() == kNumWeightRoles);

}  // namespace

std::string_view to_string(WeightRole role) noexcept {
  const auto index = static_cast<size_t>(role);
  return index < kRoleNames.size() ? kRoleNames[index] : "unknown";
}

ConstTensorView WeightSource::view(WeightRole, int64_t) const { return {}; }

MemoryKind WeightSource::memory() const { return MemoryKind::kHost; }

std::string WeightSource::locate(WeightRole role, int64_t expert) const {
  return std::string(to_string(role)) + " of expert " + std::to_string(expert);
}

}  // namespace conclave::inline v0
