// Every weight matrix that a layer of a given spec has: one list for all who need it.
#pragma once

#include "conclave/weights.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

enum class RoleDType : uint8_t {
  kWeight,    // MoeSpec::weight_dtype: packed by a kernel
  kAnyFloat,  // f32, f16 or bf16
  kIndex,     // int32 or int64
};

struct LayerRole {
  WeightRole role = WeightRole::kGate;
  int64_t count = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  RoleDType dtype = RoleDType::kAnyFloat;
  bool optional = false;
};

// Whether a role holds a matrix for each routed expert.
constexpr bool is_per_expert(WeightRole role) {
  return role <= WeightRole::kDown ||
         (role >= WeightRole::kGateBias && role <= WeightRole::kDownBias);
}

// In the order of WeightRole.
std::vector<LayerRole> layer_roles(const MoeSpec& spec);

// The activation of the shared experts and of the residual MLP: `own`, or where it has no name the
// routed experts'.
const ActivationSpec& activation_or_routed(const ActivationSpec& own, const MoeSpec& spec);

}  // namespace conclave::inline v0
