// The list of activations. Each is written once, as a template over the value type: double for the
// reference, float and SIMD vectors for the CPU kernels.
#pragma once

#include "conclave/spec.h"

#include <cstdint>
#include <string_view>

namespace conclave::inline v0::activation {

enum class ActivationId : uint8_t { kSilu };

// A formula with its parameters, those of ActivationSpec.
struct Activation {
  ActivationId id = ActivationId::kSilu;
  bool gated = true;
  double limit = 0;
  double alpha = 0;
  double beta = 0;
  double linear_beta = 0;
};

std::string_view to_string(ActivationId id) noexcept;
// Throws Error(kUnknownName) listing the names, Error(kInvalidArgument) for a parameter that the
// formula lacks, needs or cannot take.
Activation parse_activation(const ActivationSpec& spec);

// float64: act(gate) combined with up; gate is ignored by formulas without one.
double apply_reference(const Activation& activation, double gate, double up) noexcept;
// float32, bit for bit what the SIMD kernels compute.
float apply_scalar(const Activation& activation, float gate, float up) noexcept;

}  // namespace conclave::inline v0::activation
