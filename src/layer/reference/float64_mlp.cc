#include "layer/reference/float64_mlp.h"

#include <vector>

namespace conclave::inline v0 {
namespace {

double product(const Float64Matrix& matrix, const Float64Matrix& bias, int64_t row,
               const double* x) {
  if (matrix.values.empty()) return 0;
  const double value = dot(matrix.row(row), x, matrix.cols);
  return bias.values.empty() ? value : value + bias.row(0)[row];
}

struct Roles {
  WeightRole gate, up, down;
  WeightRole gate_bias, up_bias, down_bias;
};

Roles roles_of(MlpPart part) {
  if (part == MlpPart::kShared) {
    return {WeightRole::kSharedGate,     WeightRole::kSharedUp,     WeightRole::kSharedDown,
            WeightRole::kSharedGateBias, WeightRole::kSharedUpBias, WeightRole::kSharedDownBias};
  }
  if (part == MlpPart::kResidual) {
    return {WeightRole::kResidualGate, WeightRole::kResidualUp, WeightRole::kResidualDown,
            WeightRole::kGateBias,     WeightRole::kUpBias,     WeightRole::kDownBias};
  }
  return {WeightRole::kGate,     WeightRole::kUp,     WeightRole::kDown,
          WeightRole::kGateBias, WeightRole::kUpBias, WeightRole::kDownBias};
}

bool has_bias(const MoeSpec& spec, MlpPart part) {
  if (part == MlpPart::kShared) return spec.shared.has_bias;
  return part == MlpPart::kRouted && spec.has_bias;
}

const ActivationSpec& own_activation(const MoeSpec& spec, MlpPart part) {
  const ActivationSpec& own =
      part == MlpPart::kShared ? spec.shared.activation : spec.residual.activation;
  return part == MlpPart::kRouted || own.name.empty() ? spec.activation : own;
}

}  // namespace

activation::Activation activation_of(const MoeSpec& spec, MlpPart part) {
  return activation::parse_activation(own_activation(spec, part));
}

Float64Mlp read_mlp(const MoeSpec& spec, const WeightSource& source, MlpPart part, int64_t expert) {
  const Roles roles = roles_of(part);
  const bool gated = is_gated(own_activation(spec, part));
  const bool biased = has_bias(spec, part);
  const auto read = [&](WeightRole role, bool there) {
    return there ? read_float64(source, role, expert) : Float64Matrix{};
  };
  return {.gate = read(roles.gate, gated),
          .up = read(roles.up, true),
          .down = read(roles.down, true),
          .gate_bias = read(roles.gate_bias, gated && biased),
          .up_bias = read(roles.up_bias, biased),
          .down_bias = read(roles.down_bias, biased)};
}

void run_mlp(const Float64Mlp& mlp, const activation::Activation& activation, const double* x,
             double* out) {
  std::vector<double> inner;
  for (int64_t i = 0; i < mlp.up.rows; ++i) {
    inner.push_back(activation::apply_reference(activation, product(mlp.gate, mlp.gate_bias, i, x),
                                                product(mlp.up, mlp.up_bias, i, x)));
  }
  for (int64_t h = 0; h < mlp.down.rows; ++h) {
    out[h] = product(mlp.down, mlp.down_bias, h, inner.data());
  }
}

}  // namespace conclave::inline v0
