#include "convert/compare_layers.h"

#include "conclave/reference.h"
#include "conclave/tensor.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <vector>

namespace conclave::inline v0::conversion {
namespace {

ConstTensorView view_or_none(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->view() : ConstTensorView{};
}

std::vector<double> output_of(const Context& context, const MoeSpec& spec,
                              const WeightSource& weights, const ComparedRows& rows) {
  return reference_forward(context, spec, weights,
                           {.hidden = rows.hidden.view(),
                            .router_input = view_or_none(rows.router_input),
                            .residual_input = view_or_none(rows.residual_input),
                            .token_ids = view_or_none(rows.token_ids)})
      .output;
}

// The upper one of two middles; 0 for no values.
double middle_of(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

ConvertedLayer compare_layer(const Context& context, const SourceModel& source,
                             const Checkpoint& result, int64_t layer, const ComparedRows& rows) {
  const std::vector<double> expected =
      output_of(context, source.checkpoint().layer(layer).spec, *source.layer_source(layer), rows);
  std::vector<double> actual =
      output_of(context, result.layer(layer).spec, *result.layer_source(layer), rows);
  const Shape shape = rows.hidden.shape();
  ConvertedLayer compared{
      .layer = layer,
      .tokens =
          token_errors({.data = actual.data(), .dtype = DType::kF64, .shape = shape}, expected)};
  const auto worst = std::ranges::max_element(
      compared.tokens, {}, [](double value) { return std::isnan(value) ? HUGE_VAL : value; });
  if (worst != compared.tokens.end()) {
    compared.worst = *worst;
    compared.worst_token = worst - compared.tokens.begin();
  }
  compared.median = middle_of(compared.tokens);
  return compared;
}

}  // namespace conclave::inline v0::conversion
