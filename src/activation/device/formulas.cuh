// The formulas of activation/formulas.h in float32 for kernels: within 1e-5 of the float64 ones if
// the result is normal. Infinities give the limits and NaN stays NaN, as there.
#pragma once

#include "activation/device/device_activation.h"
#include "cuda/device/math.cuh"

namespace conclave::inline v0::activation::device {

// Clamps that let NaN through.
__device__ __forceinline__ float at_most(float x, float limit) {
  return cuda::device::min_or_nan(x, limit);
}
__device__ __forceinline__ float at_least(float x, float limit) {
  return cuda::device::max_or_nan(x, limit);
}
__device__ __forceinline__ float within(float x, float limit) {
  return at_least(at_most(x, limit), -limit);
}

// factor * sigmoid(x). A divisor above 2^126 gives 0: x is then below -87.
__device__ __forceinline__ float times_sigmoid(float factor, float x) {
  constexpr float kMinusLog2E = -1.44269504F;
  return factor * cuda::device::rcp(1.0F + cuda::device::ex2(x * kMinusLog2E));
}

// The gate of swiglu_oai: g * sigmoid(alpha * g). The floor keeps -inf * 0 out.
__device__ __forceinline__ float swish_gate(float g, float alpha) {
  return times_sigmoid(at_least(g, -0x1p127F), alpha * g);
}

__device__ __forceinline__ float silu(float x) {
  // The floor keeps -inf * 0 out.
  return times_sigmoid(at_least(x, -110.0F), x);
}

__device__ __forceinline__ float gelu(float x) {
  const float factor = at_least(x, -15.0F);
  return 0.5F * factor * erfcf(factor * -0.70710678F);
}

__device__ __forceinline__ float gelu_tanh(float x) {
  const float factor = at_least(x, -11.0F);
  return times_sigmoid(factor, factor * fmaf(0.0713548163F * factor, factor, 1.59576912F));
}

// scale * tanh(x / scale); below 2^-12 the bend is less than a rounding.
__device__ __forceinline__ float scaled_tanh(float x, float scale, float inverse_scale) {
  const float z = x * inverse_scale;
  return fabsf(z) < 0x1p-12F ? x : scale * tanhf(z);
}

struct Silu {
  static __device__ __forceinline__ float apply(float gate, float up,
                                                const FormulaParameters& /*p*/) {
    return silu(gate) * up;
  }
};
struct Gelu {
  static __device__ __forceinline__ float apply(float gate, float up,
                                                const FormulaParameters& /*p*/) {
    return gelu(gate) * up;
  }
};
struct GeluTanh {
  static __device__ __forceinline__ float apply(float gate, float up,
                                                const FormulaParameters& /*p*/) {
    return gelu_tanh(gate) * up;
  }
};
struct SwigluOai {
  static __device__ __forceinline__ float apply(float gate, float up, const FormulaParameters& p) {
    return swish_gate(at_most(gate, p.limit), p.alpha) * (within(up, p.limit) + p.beta);
  }
};
struct SiluClampBefore {
  static __device__ __forceinline__ float apply(float gate, float up, const FormulaParameters& p) {
    return silu(at_most(gate, p.limit)) * within(up, p.limit);
  }
};
struct SiluClampAfter {
  static __device__ __forceinline__ float apply(float gate, float up, const FormulaParameters& p) {
    return at_most(silu(gate), p.limit) * within(up, p.limit);
  }
};
template <bool kBendsUp>
struct Situ {
  static __device__ __forceinline__ float apply(float gate, float up, const FormulaParameters& p) {
    const float weighed = times_sigmoid(scaled_tanh(gate, p.beta, p.inverse_beta), gate);
    return weighed * (kBendsUp ? scaled_tanh(up, p.linear_beta, p.inverse_linear_beta) : up);
  }
};
struct SiluNoMul {
  static __device__ __forceinline__ float apply(float /*gate*/, float up,
                                                const FormulaParameters& /*p*/) {
    return silu(up);
  }
};
struct GeluNoMul {
  static __device__ __forceinline__ float apply(float /*gate*/, float up,
                                                const FormulaParameters& /*p*/) {
    return gelu(up);
  }
};
struct GeluTanhNoMul {
  static __device__ __forceinline__ float apply(float /*gate*/, float up,
                                                const FormulaParameters& /*p*/) {
    return gelu_tanh(up);
  }
};
struct Relu2NoMul {
  static __device__ __forceinline__ float apply(float /*gate*/, float up,
                                                const FormulaParameters& /*p*/) {
    const float positive = at_least(up, 0.0F);
    return positive * positive;
  }
};

// Calls visitor.visit<Formula>() with the activation's formula. The switch is the same for all
// threads: put the loop over elements inside the visitor.
template <class Visitor>
__device__ __forceinline__ auto with_formula(const DeviceActivation& activation,
                                             const Visitor& visitor) {
  switch (activation.id) {
    case ActivationId::kGelu:
      return visitor.template visit<Gelu>();
    case ActivationId::kGeluTanh:
      return visitor.template visit<GeluTanh>();
    case ActivationId::kSwigluOai:
      return visitor.template visit<SwigluOai>();
    case ActivationId::kSiluClampBefore:
      return visitor.template visit<SiluClampBefore>();
    case ActivationId::kSiluClampAfter:
      return visitor.template visit<SiluClampAfter>();
    case ActivationId::kSitu:
      return activation.bends_up ? visitor.template visit<Situ<true>>()
                                 : visitor.template visit<Situ<false>>();
    case ActivationId::kSiluNoMul:
      return visitor.template visit<SiluNoMul>();
    case ActivationId::kGeluNoMul:
      return visitor.template visit<GeluNoMul>();
    case ActivationId::kGeluTanhNoMul:
      return visitor.template visit<GeluTanhNoMul>();
    case ActivationId::kRelu2NoMul:
      return visitor.template visit<Relu2NoMul>();
    case ActivationId::kSilu:
      break;
  }
  return visitor.template visit<Silu>();
}

// Applies a formula chosen at run time to one element, for loops that are not unrolled.
struct ApplyOnce {
  float gate;
  float up;
  const FormulaParameters& parameters;

  template <class Formula>
  __device__ __forceinline__ float visit() const {
    return Formula::apply(gate, up, parameters);
  }
};
__device__ __forceinline__ float apply(const DeviceActivation& activation, float gate, float up) {
  return with_formula(activation, ApplyOnce{gate, up, activation.parameters});
}

}  // namespace conclave::inline v0::activation::device
