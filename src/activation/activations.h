// The list of activations. Each is written once, as a template over the value type: double for the
// reference, float and SIMD vectors for the CPU kernels.
#pragma once

#include <cstdint>
#include <string_view>

namespace conclave::inline v0::activation {

enum class ActivationId : uint8_t { kSilu };

std::string_view to_string(ActivationId id) noexcept;
// Throws Error(kUnknownName) listing the names.
ActivationId parse_activation(std::string_view name);

// float64: act(gate) combined with up.
double apply_reference(ActivationId id, double gate, double up) noexcept;
// float32, bit for bit what the SIMD kernels compute.
float apply_scalar(ActivationId id, float gate, float up) noexcept;

}  // namespace conclave::inline v0::activation
