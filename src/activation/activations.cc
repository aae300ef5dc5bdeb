#include "activation/activations.h"

#include "activation/formulas.h"
#include "activation/scalar.h"
#include "core/catalog.h"

#include <array>
#include <charconv>
#include <span>
#include <string>

namespace conclave::inline v0::activation {
namespace {

constexpr double kLeastParameter = 0.001;
constexpr double kMostParameter = 1e6;

enum class Use : uint8_t { kNone, kOptional, kNeeded };

struct ActivationRow {
  std::string_view name;
  ActivationId id;
  bool gated = true;
  FusedForm fused = FusedForm::kNone;
  Use limit = Use::kNone;
  Use alpha = Use::kNone;
  Use beta = Use::kNone;
  Use linear_beta = Use::kNone;
};

// Ordered as ActivationId.
constexpr std::array<ActivationRow, kNumActivations> kActivations = {{
    {.name = "silu", .id = ActivationId::kSilu, .fused = FusedForm::kSilu},
    {.name = "gelu", .id = ActivationId::kGelu},
    {.name = "gelu_tanh", .id = ActivationId::kGeluTanh},
    {.name = "swiglu_oai",
     .id = ActivationId::kSwigluOai,
     .fused = FusedForm::kSwigluOai,
     .limit = Use::kOptional,
     .alpha = Use::kNeeded,
     .beta = Use::kNeeded},
    {.name = "silu_clamp_before",
     .id = ActivationId::kSiluClampBefore,
     .fused = FusedForm::kSwigluOai,
     .limit = Use::kNeeded},
    {.name = "silu_clamp_after", .id = ActivationId::kSiluClampAfter, .limit = Use::kNeeded},
    {.name = "situ",
     .id = ActivationId::kSitu,
     .beta = Use::kNeeded,
     .linear_beta = Use::kOptional},
    {.name = "silu_no_mul", .id = ActivationId::kSiluNoMul, .gated = false},
    {.name = "gelu_no_mul", .id = ActivationId::kGeluNoMul, .gated = false},
    {.name = "gelu_tanh_no_mul", .id = ActivationId::kGeluTanhNoMul, .gated = false},
    {.name = "relu2_no_mul", .id = ActivationId::kRelu2NoMul, .gated = false},
}};

std::string number(double value) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value);
  return {text.data(), end.ptr};
}

// The value as float32; `row` says whether the formula has the field.
double read_parameter(const ActivationRow& row, const char* field, Use use, double value) {
  const bool in_range = value >= kLeastParameter && value <= kMostParameter;
  if (use == Use::kNone ? value == 0.0 : in_range || (use == Use::kOptional && value == 0.0)) {
    return double{static_cast<float>(value)};
  }
  std::string limit = "0: " + std::string(row.name) + " has no such parameter";
  if (use != Use::kNone) {
    limit = (use == Use::kOptional ? "0, or " : "") + number(kLeastParameter) + " to " +
            number(kMostParameter);
  }
  throw Error(ErrorCode::kInvalidArgument, {.what = std::string("ActivationSpec.") + field +
                                                    " does not fit " + std::string(row.name),
                                            .found = number(value),
                                            .limit = limit});
}

struct ApplyReference {
  double gate;
  double up;
  FormulaParameters parameters;

  template <class Formula>
  double visit() const {
    return Formula::apply_reference(gate, up, parameters);
  }
};

struct ApplyScalar {
  float gate;
  float up;
  FormulaParameters parameters;

  template <class Formula>
  float visit() const {
    return Formula::apply(ScalarFloat{gate}, ScalarFloat{up}, parameters).value;
  }
};

}  // namespace

std::string_view to_string(ActivationId id) noexcept {
  return kActivations[static_cast<size_t>(id)].name;
}

Activation parse_activation(const ActivationSpec& spec) {
  const ActivationRow& row = Catalog<ActivationRow>(std::span<const ActivationRow>(kActivations))
                                 .find(spec.name, "activation");
  return {.id = row.id,
          .gated = row.gated,
          .fused = row.fused,
          .limit = read_parameter(row, "limit", row.limit, spec.limit),
          .alpha = read_parameter(row, "alpha", row.alpha, spec.alpha),
          .beta = read_parameter(row, "beta", row.beta, spec.beta),
          .linear_beta = read_parameter(row, "linear_beta", row.linear_beta, spec.linear_beta)};
}

FormulaParameters formula_parameters(const Activation& activation) noexcept {
  FormulaParameters p;
  if (activation.limit > 0) p.limit = static_cast<float>(activation.limit);
  if (activation.alpha > 0) p.alpha = static_cast<float>(activation.alpha);
  if (activation.beta > 0) {
    p.beta = static_cast<float>(activation.beta);
    p.inverse_beta = static_cast<float>(1.0 / activation.beta);
  }
  if (activation.linear_beta > 0) {
    p.linear_beta = static_cast<float>(activation.linear_beta);
    p.inverse_linear_beta = static_cast<float>(1.0 / activation.linear_beta);
  }
  return p;
}

double apply_reference(const Activation& activation, double gate, double up) noexcept {
  return with_formula(activation, ApplyReference{gate, up, formula_parameters(activation)});
}

float apply_scalar(const Activation& activation, float gate, float up) noexcept {
  return with_formula(activation, ApplyScalar{gate, up, formula_parameters(activation)});
}

}  // namespace conclave::inline v0::activation
