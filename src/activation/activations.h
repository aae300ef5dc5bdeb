// The list of activations. Each has its formula for the CPU in formulas.h, a template over float
// and SIMD vectors beside one in float64 for the reference, and another for GPUs in
// device/formulas.cuh.
#pragma once

#include "activation/parameters.h"

#include "conclave/spec.h"

#include <cstdint>
#include <string_view>

namespace conclave::inline v0::activation {

enum class ActivationId : uint8_t {
  kSilu,
  kGelu,
  kGeluTanh,
  kSwigluOai,
  kSiluClampBefore,
  kSiluClampAfter,
  kSitu,
  kSiluNoMul,
  kGeluNoMul,
  kGeluTanhNoMul,
  kRelu2NoMul,
};
inline constexpr int kNumActivations = 11;

// The gated formulas that most models use differ only in their numbers, so a kernel needs one
// unrolled copy for them; the others run in a loop that is not unrolled.
enum class FusedForm : uint8_t {
  kNone,
  kSilu,
  kSwigluOai,  // its formula with the parameters that this one has
};

// A formula with its parameters: those of ActivationSpec rounded to float32, the precision in which
// published code uses them. 0 means that the formula has none, or that none was given.
struct Activation {
  ActivationId id = ActivationId::kSilu;
  bool gated = true;
  FusedForm fused = FusedForm::kSilu;
  double limit = 0;
  double alpha = 0;
  double beta = 0;
  double linear_beta = 0;
};

std::string_view to_string(ActivationId id) noexcept;
// Parameters lie in [0.001, 1e6], so that neither they nor their inverses leave float32's normal
// range in a product. The limit of swiglu_oai and the linear_beta of situ may be 0, meaning none.
// Throws Error(kUnknownName) listing the names, Error(kInvalidArgument) for a parameter that the
// formula lacks, needs or cannot take, naming the field, the value and the limit.
Activation parse_activation(const ActivationSpec& spec);
FormulaParameters formula_parameters(const Activation& activation) noexcept;

// Computes act(gate) combined with up in float64; formulas without a gate ignore `gate`.
double apply_reference(const Activation& activation, double gate, double up) noexcept;
// Computes the same in float32, bit for bit like the SIMD kernels.
float apply_scalar(const Activation& activation, float gate, float up) noexcept;

}  // namespace conclave::inline v0::activation
