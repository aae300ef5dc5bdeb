#include "layer/router_vectors.h"

#include "conclave/error.h"

#include <cmath>
#include <string>

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

std::vector<int32_t> check_hash_table(const MoeSpec& spec, const WeightSource& source,
                                      const Tensor& stored) {
  std::vector<int32_t> table(static_cast<size_t>(stored.shape().num_elements()));
  for (size_t index = 0; index < table.size(); ++index) {
    const int64_t id =
        stored.dtype() == DType::kI64 ? stored.as<int64_t>()[index] : stored.as<int32_t>()[index];
    if (id < 0 || id >= spec.num_experts) {
      const auto top_k = static_cast<size_t>(spec.top_k);
      throw Error(
          ErrorCode::kExpertId,
          {.what = "the hash table names an expert that does not exist, at row " +
                   std::to_string(index / top_k) + ", slot " + std::to_string(index % top_k),
           .tensor = source.locate(weights::kHashTable, 0),
           .found = std::to_string(id),
           .limit = "0 to " + std::to_string(spec.num_experts - 1)});
    }
    table[index] = static_cast<int32_t>(id);
  }
  return table;
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
  return {.selection_bias = data(selection_bias),
          .expert_scale = data(expert_scale),
          .global_scale = data(global_scale),
          .hash_table = data(hash_table)};
}

RouterVectors read_router_vectors(const MoeSpec& spec, const WeightSource& source) {
  const RouterSpec& router = spec.router;
  const auto floats = [&](WeightId id, bool wanted) {
    return wanted ? read_floats(source, id) : std::vector<float>();
  };
  RouterVectors vectors{
      .logit_bias = floats(weights::kRouterBias, spec.has_gate && router.has_logit_bias),
      .input_scale = floats(weights::kRouterInputScale, spec.has_gate && router.input_norm.enabled),
      .selection_bias = floats(weights::kSelectionBias, router.has_selection_bias),
      .expert_scale = floats(weights::kExpertScale, router.has_expert_scale),
      .global_scale = floats(weights::kGlobalScale, router.has_global_scale),
      .hash_table = {}};
  check_selection_bias(source, vectors.selection_bias);
  if (router.vocab_size > 0) {
    vectors.hash_table = check_hash_table(spec, source, read_matrix(source, weights::kHashTable));
  }
  return vectors;
}

}  // namespace conclave::inline v0
