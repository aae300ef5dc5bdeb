// The roles of each kind of MLP in a layer: routed experts, shared experts, residual MLP.
#pragma once

#include "conclave/weights.h"

namespace conclave::inline v0 {

struct MlpRoles {
  WeightRole gate;
  WeightRole up;
  WeightRole down;
  WeightRole gate_bias;
  WeightRole up_bias;
  WeightRole down_bias;
};
inline constexpr MlpRoles kRoutedRoles = {
    .gate = WeightRole::kGate,
    .up = WeightRole::kUp,
    .down = WeightRole::kDown,
    .gate_bias = WeightRole::kGateBias,
    .up_bias = WeightRole::kUpBias,
    .down_bias = WeightRole::kDownBias,
};
inline constexpr MlpRoles kSharedRoles = {
    .gate = WeightRole::kSharedGate,
    .up = WeightRole::kSharedUp,
    .down = WeightRole::kSharedDown,
    .gate_bias = WeightRole::kSharedGateBias,
    .up_bias = WeightRole::kSharedUpBias,
    .down_bias = WeightRole::kSharedDownBias,
};
// The residual MLP has no biases: these roles are never asked for.
inline constexpr MlpRoles kResidualRoles = {
    .gate = WeightRole::kResidualGate,
    .up = WeightRole::kResidualUp,
    .down = WeightRole::kResidualDown,
    .gate_bias = WeightRole::kGateBias,
    .up_bias = WeightRole::kUpBias,
    .down_bias = WeightRole::kDownBias,
};

}  // namespace conclave::inline v0
