#include "layer/router_vectors.h"

#include "conclave/error.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

Tensor read_matrix(const WeightSource& source, WeightId id) {
  const WeightInfo info = source.describe(id);
  Tensor matrix(info.dtype, {info.rows, info.cols});
  source.read(id, 0, {.row_begin = 0, .row_end = info.rows, .col_begin = 0, .col_end = info.cols},
              {matrix.as<std::byte>(), matrix.size_bytes()});
  return matrix;
}

std::vector<float> read_floats(const WeightSource& source, WeightId id) {
  const Tensor stored = read_matrix(source, id);
  std::vector<float> values(static_cast<size_t>(stored.shape().num_elements()));
  convert(stored.const_view(),
          {.data = values.data(), .dtype = DType::kF32, .shape = stored.shape()});
  return values;
}

}  // namespace

Tensor checked_router_tensor(const MoeSpec& spec, const WeightSource& source,
                             const routing::SizedRouterTensor& tensor, Tensor stored) {
  const routing::RouterTensor& row = *tensor.tensor;
  if (row.check != nullptr) row.check(spec, stored.const_view(), 0, source.locate(*row.id, 0));
  const DType wanted = row.element == routing::RouterElement::kIndex ? DType::kI32 : DType::kF32;
  if (stored.dtype() == wanted) return stored;
  Tensor values(wanted, stored.shape());
  if (wanted == DType::kF32) {
    convert(stored.const_view(), values.view());
    return values;
  }
  std::transform(stored.as<int64_t>(), stored.as<int64_t>() + tensor.num_elements(),
                 values.as<int32_t>(), [](int64_t value) { return static_cast<int32_t>(value); });
  return values;
}

void check_selection_bias(const WeightSource& source, const std::vector<float>& bias) {
  for (size_t expert = 0; expert < bias.size(); ++expert) {
    if (!std::isnan(bias[expert])) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "the selection bias of expert " + std::to_string(expert) + " is NaN",
                 .tensor = source.locate(weights::kSelectionBias, 0),
                 .expected = "a number: experts are ordered by it"});
  }
}

RouterWeights RouterVectors::view() const {
  const auto data = [](const auto& values) { return values.empty() ? nullptr : values.data(); };
  RouterWeights weights{.selection_bias = data(selection_bias),
                        .expert_scale = data(expert_scale),
                        .global_scale = data(global_scale)};
  for (const Own& one : own) {
    routing::set_router_tensor(one.tensor, one.values.as<std::byte>(), weights);
  }
  return weights;
}

RouterVectors RouterVectors::copy() const {
  RouterVectors vectors{.logit_bias = logit_bias,
                        .input_scale = input_scale,
                        .selection_bias = selection_bias,
                        .expert_scale = expert_scale,
                        .global_scale = global_scale,
                        .own = {}};
  for (const Own& one : own) {
    Tensor values(one.values.dtype(), one.values.shape());
    std::copy_n(one.values.as<std::byte>(), values.size_bytes(), values.as<std::byte>());
    vectors.own.push_back({.tensor = one.tensor, .values = std::move(values)});
  }
  return vectors;
}

void read_router_vectors(const MoeSpec& spec, const WeightSource& source,
                         const WantedWeights& wants, RouterVectors& vectors) {
  const RouterSpec& router = spec.router;
  RouterVectors next = vectors.copy();
  const auto read = [&](WeightId id, bool is_there, std::vector<float>& values) {
    if (is_there && wants(id)) values = read_floats(source, id);
  };
  read(weights::kRouterBias, spec.has_gate && router.has_logit_bias, next.logit_bias);
  read(weights::kRouterInputScale, spec.has_gate && router.input_norm.enabled, next.input_scale);
  read(weights::kSelectionBias, router.has_selection_bias, next.selection_bias);
  read(weights::kExpertScale, router.has_expert_scale, next.expert_scale);
  read(weights::kGlobalScale, router.has_global_scale, next.global_scale);
  if (wants(weights::kSelectionBias)) check_selection_bias(source, next.selection_bias);
  for (const routing::SizedRouterTensor& own : routing::router_tensors_of(spec)) {
    if (!own.tensor->id || !wants(*own.tensor->id)) continue;
    std::erase_if(next.own, [&](const RouterVectors::Own& one) {
      return one.tensor.tensor->id == own.tensor->id;
    });
    if (source.describe(*own.tensor->id).count == 0) continue;
    Tensor stored = read_matrix(source, *own.tensor->id);
    next.own.push_back({own, checked_router_tensor(spec, source, own, std::move(stored))});
  }
  vectors = std::move(next);
}

RouterVectors read_router_vectors(const MoeSpec& spec, const WeightSource& source) {
  RouterVectors vectors;
  read_router_vectors(
      spec, source, [](WeightId) { return true; }, vectors);
  return vectors;
}

}  // namespace conclave::inline v0
