#include "layer/reference/float64_mlp.h"

#include "core/float8.h"
#include "layer/mlp_roles.h"
#include "layer/quant_scales.h"

#include <vector>

namespace conclave::inline v0 {
namespace {

double product(const Float64Matrix& matrix, const Float64Matrix& bias, int64_t row,
               const double* x) {
  if (matrix.values.empty()) return 0;
  const double value = dot(matrix.row(row), x, matrix.cols);
  return bias.values.empty() ? value : value + bias.row(0)[row];
}

const MlpRoles& roles_of(MlpPart part) {
  if (part == MlpPart::kShared) return kSharedRoles;
  return part == MlpPart::kResidual ? kResidualRoles : kRoutedRoles;
}

DType dtype_of(const MoeSpec& spec, MlpPart part) {
  if (part == MlpPart::kShared) return shared_weight_dtype(spec);
  if (part == MlpPart::kRouted) return spec.weight_dtype;
  return spec.residual.weight_dtype.value_or(spec.weight_dtype);
}

// The row as products of quantised matrices see it: codes times their steps, exactly.
std::vector<double> seen_row(const quant::ActivationRule& rule, const double* x, int64_t count) {
  std::vector<double> seen(x, x + count);
  if (rule.form == ActivationScale::kNone) return seen;
  const std::vector<float> rounded(seen.begin(), seen.end());
  std::vector<uint8_t> codes(rounded.size());
  std::vector<float> scales(static_cast<size_t>(quant::scales_per_row(rule.form, count)));
  quant::quantize_activations(rounded.data(), count, rule, codes.data(), scales.data());
  const auto width = static_cast<size_t>(quant::scale_width(rule.form, count));
  for (size_t i = 0; i < seen.size(); ++i) {
    seen[i] = static_cast<double>(e4m3_to_float(codes[i])) * static_cast<double>(scales[i / width]);
  }
  return seen;
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
  const MlpRoles& roles = roles_of(part);
  const bool gated = is_gated(own_activation(spec, part));
  const bool biased = has_bias(spec, part);
  const auto read = [&](WeightRole role, bool there) {
    return there ? read_float64(source, role, expert) : Float64Matrix{};
  };
  const bool quantised = dtype_of(spec, part) == DType::kF8E4M3;
  const auto matrix = [&](WeightRole role, bool there) {
    if (!there || !quantised) return read(role, there);
    return read_scaled(spec.quant, source, role, expert);
  };
  quant::ActivationRule rule;
  if (quantised) {
    rule.form = spec.quant.activations;
    rule.power_of_two_scales = spec.quant.power_of_two_scales;
  }
  const bool is_static = rule.form == ActivationScale::kTensorStatic;
  const StaticScales steps = is_static ? load_static_scales(source, roles) : StaticScales{};
  const auto rule_of = [&rule](float step) {
    quant::ActivationRule own = rule;
    own.static_scale = step;
    return own;
  };
  return {.gate = matrix(roles.gate, gated),
          .up = matrix(roles.up, true),
          .down = matrix(roles.down, true),
          .gate_bias = read(roles.gate_bias, gated && biased),
          .up_bias = read(roles.up_bias, biased),
          .down_bias = read(roles.down_bias, biased),
          .input_rule = rule_of(steps.input),
          .inner_rule = rule_of(steps.intermediate)};
}

void run_mlp(const Float64Mlp& mlp, const activation::Activation& activation, const double* x,
             double* out) {
  const std::vector<double> row = seen_row(mlp.input_rule, x, mlp.up.cols);
  std::vector<double> inner;
  for (int64_t i = 0; i < mlp.up.rows; ++i) {
    inner.push_back(activation::apply_reference(activation,
                                                product(mlp.gate, mlp.gate_bias, i, row.data()),
                                                product(mlp.up, mlp.up_bias, i, row.data())));
  }
  inner = seen_row(mlp.inner_rule, inner.data(), mlp.up.rows);
  for (int64_t h = 0; h < mlp.down.rows; ++h) {
    out[h] = product(mlp.down, mlp.down_bias, h, inner.data());
  }
}

}  // namespace conclave::inline v0
