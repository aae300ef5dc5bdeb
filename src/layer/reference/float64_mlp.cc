#include "layer/reference/float64_mlp.h"

#include "core/quant_spec.h"
#include "core/weight_types.h"
#include "quant/code_meaning.h"

#include "conclave/placement.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

double biased(double value, const Float64Matrix& bias, int64_t row) {
  return bias.values.empty() ? value : value + bias.row(0)[row];
}

DType dtype_of(const MoeSpec& spec, WeightMlp part) {
  if (part == WeightMlp::kShared) return shared_weight_dtype(spec);
  if (part == WeightMlp::kRouted) return spec.weight_dtype;
  return spec.residual.weight_dtype.value_or(spec.weight_dtype);
}

// A row times the factors of its columns. Rows that become codes are float32 before, so that the
// codes are those of the kernels.
std::vector<double> times(const double* x, int64_t count, const Float64Matrix& factors,
                          const quant::ActivationRule& rule) {
  std::vector<double> row(x, x + count);
  if (factors.values.empty()) return row;
  if (rule.form != ActivationScale::kNone) {
    for (double& value : row) value = static_cast<float>(value);
  }
  std::ranges::transform(row, factors.values, row.begin(), std::multiplies<>());
  return row;
}

// The row as products of quantised matrices read it: codes times their steps, exactly.
std::vector<double> seen_row(const quant::ActivationRule& rule, std::vector<double> seen) {
  if (rule.form == ActivationScale::kNone) return seen;
  const auto count = static_cast<int64_t>(seen.size());
  const std::vector<float> rounded(seen.begin(), seen.end());
  std::vector<uint8_t> codes(rounded.size());
  std::vector<float> scales(static_cast<size_t>(quant::scales_per_row(rule, count)));
  quant::quantize_activations(rounded.data(), count, rule, codes.data(), scales.data());
  const auto width = static_cast<size_t>(quant::scale_width(rule, count));
  for (size_t i = 0; i < seen.size(); ++i) {
    seen[i] =
        static_cast<double>(rule.codes->decode(codes[i])) * static_cast<double>(scales[i / width]);
  }
  return seen;
}

double code_value(const quant::CodeBook& codes, double quotient) {
  return codes.decode(codes.encode(static_cast<float>(quotient)));
}

// How far one value may move: to the other side of a rounding boundary, or, if the group's largest
// value decides between two powers of two as the step, to a code of the other step.
double move_of(const quant::CodeBook& codes, double value, float step, float other_step,
               double ambiguity) {
  const double quotient = value / static_cast<double>(step);
  const double own = (code_value(codes, quotient * (1 + ambiguity)) -
                      code_value(codes, quotient * (1 - ambiguity))) *
                     static_cast<double>(step);
  const double other = static_cast<double>(other_step);
  const double changed = code_value(codes, value / other) * other -
                         code_value(codes, quotient) * static_cast<double>(step);
  return std::max(std::abs(own), std::abs(changed));
}

// The step that a group would have if its largest value were off by `ambiguity`.
float other_step(const quant::ActivationRule& rule, float largest, double ambiguity) {
  const float step = quant::scale_of(&largest, 1, rule);
  if (!rule.has_sparse_scales()) return step;
  for (const double factor : {1 - ambiguity, 1 + ambiguity}) {
    const auto moved = static_cast<float>(static_cast<double>(largest) * factor);
    const float other = quant::scale_of(&moved, 1, rule);
    if (other != step) return other;
  }
  return step;
}

// `squares_of_down` has the squares of the columns of down that the row's values are multiplied by.
double allowed_square(const quant::ActivationRule& rule, std::span<const double> inner,
                      std::span<const double> squares_of_down, double ambiguity) {
  if (ambiguity <= 0) return 0;
  const auto count = static_cast<int64_t>(inner.size());
  const int64_t width = quant::scale_width(rule, count);
  double squares = 0;
  for (int64_t begin = 0; begin < count; begin += width) {
    const auto first = static_cast<size_t>(begin);
    const auto last = static_cast<size_t>(std::min(count, begin + width));
    float largest = 0;
    for (size_t i = first; i < last; ++i) {
      largest = std::max(largest, std::abs(static_cast<float>(inner[i])));
    }
    const float step = quant::scale_of(&largest, 1, rule);
    const float other = other_step(rule, largest, ambiguity);
    for (size_t i = first; i < last; ++i) {
      const double move = move_of(*rule.codes, inner[i], step, other, ambiguity);
      if (std::isfinite(move)) squares += move * move * squares_of_down[i];
    }
  }
  return squares;
}

// Makes codes of an activated row, slice by slice. Returns how far the result may move as
// Float64Row::allowed.
double make_codes(const Float64Mlp& mlp, const RowCodes& codes, std::vector<double>& inner) {
  const quant::ActivationRule& rule = mlp.inner_rule;
  if (rule.form == ActivationScale::kNone) return 0;
  const std::span row(inner);
  double allowed = 0;
  for (int32_t rank = 0; rank < codes.slices; ++rank) {
    const TensorSlice cut = tensor_slice(std::ssize(inner), rank, codes.slices);
    const auto first = static_cast<size_t>(cut.begin);
    const auto count = static_cast<size_t>(cut.size());
    if (count == 0) continue;
    const std::span<double> part = row.subspan(first, count);
    allowed += allowed_square(rule, part, std::span(mlp.down_squares).subspan(first, count),
                              codes.ambiguity);
    std::ranges::copy(seen_row(rule, {part.begin(), part.end()}), part.begin());
  }
  return allowed;
}

std::vector<double> column_squares(const WeightRows& matrix) {
  std::vector<double> squares(static_cast<size_t>(matrix.cols()));
  std::vector<double> row;
  for (int64_t index = 0; index < matrix.rows(); ++index) {
    matrix.widen(index, row);
    for (size_t col = 0; col < row.size(); ++col) squares[col] += row[col] * row[col];
  }
  return squares;
}

bool has_bias(const MoeSpec& spec, WeightMlp part) {
  if (part == WeightMlp::kShared) return spec.shared.has_bias;
  return part == WeightMlp::kRouted && spec.has_bias;
}

const ActivationSpec& own_activation(const MoeSpec& spec, WeightMlp part) {
  const ActivationSpec& own =
      part == WeightMlp::kShared ? spec.shared.activation : spec.residual.activation;
  return part == WeightMlp::kRouted || own.name.empty() ? spec.activation : own;
}

}  // namespace

activation::Activation activation_of(const MoeSpec& spec, WeightMlp part) {
  return activation::parse_activation(own_activation(spec, part));
}

Float64Mlp read_mlp(const MoeSpec& spec, const WeightSource& source, WeightMlp part,
                    int64_t expert) {
  const bool gated = is_gated(own_activation(spec, part));
  const bool biased = has_bias(spec, part);
  const auto read = [&](WeightMatrix matrix, WeightPlane plane, bool there) {
    return there ? read_float64(source, {part, matrix, plane}, expert) : Float64Matrix{};
  };
  const DType dtype = dtype_of(spec, part);
  const bool quantised = !is_plain(dtype);
  const auto matrix = [&](WeightMatrix name, bool there) {
    if (!there) return WeightRows();
    if (!quantised) return WeightRows(source, {part, name}, expert);
    return WeightRows(spec.quant, source, {part, name}, expert);
  };
  quant::ActivationRule rule;
  if (quantised) rule = quant::activation_rule(dtype, spec.quant);
  const auto factors = [&](WeightMatrix name) {
    const WeightId id{part, name, WeightPlane::kColumnFactor};
    const bool there = quantised && spec.quant.has_column_factors && source.describe(id).count > 0;
    return read(name, WeightPlane::kColumnFactor, there);
  };
  const bool is_static = quantised && has_input_scale(spec.quant);
  const StaticScales steps = is_static ? load_static_scales(source, part) : StaticScales{};
  const auto rule_of = [&rule](float step) {
    quant::ActivationRule own = rule;
    own.static_scale = step;
    return own;
  };
  Float64Mlp mlp{.gate = matrix(WeightMatrix::kGate, gated),
                 .up = matrix(WeightMatrix::kUp, true),
                 .down = matrix(WeightMatrix::kDown, true),
                 .gate_bias = read(WeightMatrix::kGate, WeightPlane::kBias, gated && biased),
                 .up_bias = read(WeightMatrix::kUp, WeightPlane::kBias, biased),
                 .down_bias = read(WeightMatrix::kDown, WeightPlane::kBias, biased),
                 .input_factors = factors(WeightMatrix::kUp),
                 .inner_factors = factors(WeightMatrix::kDown),
                 .input_rule = rule_of(steps.input),
                 .inner_rule = rule_of(steps.intermediate),
                 .down_squares = {}};
  if (rule.form != ActivationScale::kNone) mlp.down_squares = column_squares(mlp.down);
  return mlp;
}

void run_mlp(const Float64Mlp& mlp, const activation::Activation& activation,
             std::span<Float64Row> rows, const RowCodes& codes) {
  struct Working {
    std::vector<double> seen;
    std::vector<double> inner;
    std::vector<double> gate_terms;
    std::vector<double> up_terms;
    std::vector<double> down_terms;
  };
  static const Float64Adapter kNone;
  const auto adapter_of = [](const Float64Row& row) -> const Float64Adapter& {
    return row.adapter != nullptr ? *row.adapter : kNone;
  };
  std::vector<Working> working;
  for (const Float64Row& row : rows) {
    working.push_back({.seen = seen_row(mlp.input_rule, times(row.x, mlp.up.cols(),
                                                              mlp.input_factors, mlp.input_rule)),
                       .inner = {},
                       .gate_terms = adapter_of(row).gate.terms(row.x),
                       .up_terms = adapter_of(row).up.terms(row.x),
                       .down_terms = {}});
  }
  std::vector<double> gate;
  std::vector<double> up;
  for (int64_t i = 0; i < mlp.up.rows(); ++i) {
    if (!mlp.gate.empty()) mlp.gate.widen(i, gate);
    mlp.up.widen(i, up);
    for (size_t at = 0; at < rows.size(); ++at) {
      Working& row = working[at];
      const Float64Adapter& adapter = adapter_of(rows[at]);
      const auto product = [&](const std::vector<double>& weights, const Float64Matrix& bias) {
        return biased(dot(weights.data(), row.seen.data(), mlp.up.cols()), bias, i);
      };
      const double gated =
          mlp.gate.empty() ? 0.0
                           : product(gate, mlp.gate_bias) + adapter.gate.delta(row.gate_terms, i);
      row.inner.push_back(activation::apply_reference(
          activation, gated, product(up, mlp.up_bias) + adapter.up.delta(row.up_terms, i)));
    }
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<double>& inner = working[i].inner;
    working[i].down_terms = adapter_of(rows[i]).down.terms(inner.data());
    inner = times(inner.data(), mlp.up.rows(), mlp.inner_factors, mlp.inner_rule);
    rows[i].allowed = make_codes(mlp, codes, inner);
  }
  std::vector<double> down;
  for (int64_t h = 0; h < mlp.down.rows(); ++h) {
    mlp.down.widen(h, down);
    for (size_t i = 0; i < rows.size(); ++i) {
      const double sum = dot(down.data(), working[i].inner.data(), mlp.down.cols());
      rows[i].out[h] =
          biased(sum, mlp.down_bias, h) + adapter_of(rows[i]).down.delta(working[i].down_terms, h);
    }
  }
}

}  // namespace conclave::inline v0
