// The gated formulas that most models use, as one: g' sigmoid(alpha g') (clamp(u, -L, L) + beta),
// g' = min(g, L). silu, swiglu_oai and silu_clamp_before differ only in their numbers, so a kernel
// needs one unrolled copy for them; the others run in a loop that is not unrolled.
#pragma once

#include "activation/device/formulas.cuh"

namespace conclave::inline v0::activation::device {

__device__ __forceinline__ bool is_swish(const DeviceActivation& activation) {
  return activation.id == ActivationId::kSilu || activation.id == ActivationId::kSwigluOai ||
         activation.id == ActivationId::kSiluClampBefore;
}

// Fields that a formula lacks do not change its value, except beta: formulas that do not add it get
// -0, which leaves even zeros unchanged.
__device__ __forceinline__ float swish_beta(const DeviceActivation& activation) {
  return activation.id == ActivationId::kSwigluOai ? activation.parameters.beta : -0.0F;
}

__device__ __forceinline__ float swish(float gate, float up, float limit, float alpha, float beta) {
  return swish_gate(at_most(gate, limit), alpha) * (within(up, limit) + beta);
}

}  // namespace conclave::inline v0::activation::device
