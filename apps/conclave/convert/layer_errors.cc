#include "convert/layer_errors.h"

#include "convert/median.h"

#include "conclave/reference.h"
#include "conclave/tensor.h"

#include <algorithm>
#include <cmath>
#include <memory>

namespace conclave::tool {
namespace {

std::vector<double> output_of(const Context& context, const Checkpoint& model, int64_t layer,
                              const LayerInput& input) {
  const std::unique_ptr<WeightSource> weights = model.layer_source(layer);
  return reference_forward(context, model.layer(layer).spec, *weights,
                           {.hidden = input.hidden,
                            .router_logits = input.router_logits,
                            .topk_ids = input.topk_ids,
                            .topk_weights = input.topk_weights,
                            .router_input = input.router_input,
                            .residual_input = input.residual_input,
                            .token_ids = input.token_ids})
      .output;
}

}  // namespace

LayerError layer_error(const Context& context, const Checkpoint& source, const Checkpoint& result,
                       int64_t layer, const BatchSource& batches) {
  const Batch batch = batches.load(layer, source.layer(layer).spec);
  const std::vector<double> expected = output_of(context, source, layer, batch.view());
  std::vector<double> actual = output_of(context, result, layer, batch.view());
  const Shape shape = batch.hidden.shape();
  LayerError error{.layer = layer,
                   .tokens = token_errors(
                       {.data = actual.data(), .dtype = DType::kF64, .shape = shape}, expected)};
  const auto worst = std::ranges::max_element(
      error.tokens, {}, [](double value) { return std::isnan(value) ? HUGE_VAL : value; });
  if (worst != error.tokens.end()) {
    error.worst = *worst;
    error.worst_token = worst - error.tokens.begin();
  }
  error.median = median(error.tokens);
  return error;
}

}  // namespace conclave::tool
