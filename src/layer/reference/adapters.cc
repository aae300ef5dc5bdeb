#include "layer/reference/adapters.h"

#include "layer/arguments.h"

namespace conclave::inline v0 {
namespace {

Float64Factors& matrix_of(Float64Adapter& adapter, WeightMatrix matrix) {
  if (matrix == WeightMatrix::kGate) return adapter.gate;
  return matrix == WeightMatrix::kUp ? adapter.up : adapter.down;
}

}  // namespace

std::vector<double> Float64Factors::terms(const double* x) const {
  std::vector<double> terms;
  for (int64_t row = 0; row < a.rows; ++row) terms.push_back(scale * dot(a.row(row), x, a.cols));
  return terms;
}

double Float64Factors::delta(const std::vector<double>& terms, int64_t row) const {
  return terms.empty() ? 0 : dot(b.row(row), terms.data(), b.cols);
}

std::vector<Float64Adapter> ReferenceAdapters::of_expert(WeightMlp mlp, int64_t expert) const {
  std::vector<Float64Adapter> entries(adapters_.size());
  for (size_t at = 0; at < entries.size(); ++at) {
    for (const LoraFactors& factors : adapters_[at].factors) {
      if (factors.mlp != mlp || factors.expert != expert) continue;
      matrix_of(entries[at], factors.matrix) = {
          .a = to_float64(factors.a), .b = to_float64(factors.b), .scale = factors.scale};
    }
  }
  return entries;
}

const Float64Adapter* ReferenceAdapters::of_token(const std::vector<Float64Adapter>& expert,
                                                  int64_t token) const {
  if (ids_.empty()) return nullptr;
  const int64_t id = load_token_id(ids_, token);
  return id < 0 ? nullptr : &expert[static_cast<size_t>(id)];
}

}  // namespace conclave::inline v0
