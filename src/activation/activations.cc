#include "activation/activations.h"

#include "activation/scalar.h"
#include "activation/silu.h"
#include "core/catalog.h"

#include <array>
#include <span>

namespace conclave::inline v0::activation {
namespace {

struct ActivationRow {
  std::string_view name;
  ActivationId id;
  double (*reference)(double gate, double up);
  float (*scalar)(float gate, float up);
};

template <class Formula>
float apply_float(float gate, float up) {
  return Formula::apply(ScalarFloat{gate}, ScalarFloat{up}).value;
}

// In the order of ActivationId.
constexpr std::array kActivations = {
    ActivationRow{"silu", ActivationId::kSilu, &Silu::apply_reference, &apply_float<Silu>},
};

const ActivationRow& row(ActivationId id) { return kActivations[static_cast<size_t>(id)]; }

}  // namespace

std::string_view to_string(ActivationId id) noexcept { return row(id).name; }

Activation parse_activation(const ActivationSpec& spec) {
  return {.id = Catalog<ActivationRow>(std::span<const ActivationRow>(kActivations))
                    .find(spec.name, "activation")
                    .id};
}

double apply_reference(const Activation& activation, double gate, double up) noexcept {
  return row(activation.id).reference(gate, up);
}

float apply_scalar(const Activation& activation, float gate, float up) noexcept {
  return row(activation.id).scalar(gate, up);
}

}  // namespace conclave::inline v0::activation
