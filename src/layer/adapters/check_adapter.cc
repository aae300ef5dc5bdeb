#include "core/part_spec.h"
#include "core/shared_facts.h"
#include "experts/adapters/elements.h"
#include "layer/arguments.h"

#include "conclave/error.h"
#include "conclave/lora.h"

#include <cmath>
#include <set>
#include <string>
#include <tuple>

namespace conclave::inline v0 {
namespace {

// A layer's MLP as factors must fit it.
struct Part {
  int64_t count = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  bool gated = true;
};

Part part_of(const MoeSpec& spec, WeightMlp mlp) {
  if (mlp == WeightMlp::kRouted) {
    return {.count = spec.num_experts,
            .hidden_size = expert_width(spec),
            .intermediate_size = spec.intermediate_size,
            .gated = is_gated(spec.activation)};
  }
  return {.count = shared_facts(spec).is_there ? spec.shared.count : 0,
          .hidden_size = spec.hidden_size,
          .intermediate_size = spec.shared.intermediate_size,
          .gated = is_gated(activation_or_routed(spec.shared.activation, spec))};
}

std::string text_of(const LoraFactors& factors) {
  const std::string place = to_string(WeightId(factors.mlp, factors.matrix)) + " of expert " +
                            std::to_string(factors.expert);
  return factors.name.empty() ? place : factors.name + ", " + place;
}

// Throws with the adapter's name and the factors'.
class Refusal {
 public:
  Refusal(const LoraAdapter& adapter, const LoraFactors& factors)
      : adapter_(adapter), factors_(factors) {}

  [[noreturn]] void operator()(ErrorCode code, ErrorDetail detail) const {
    detail.file = adapter_.name;
    if (detail.tensor.empty()) detail.tensor = text_of(factors_);
    throw Error(code, std::move(detail));
  }

 private:
  const LoraAdapter& adapter_;
  const LoraFactors& factors_;
};

void check_values(const char* name, const ConstTensorView& view, const Refusal& refuse) {
  for (int64_t row = 0; row < view.shape[0]; ++row) {
    for (int64_t col = 0; col < view.shape[1]; ++col) {
      const float value = experts::factor_at(view, row, col);
      if (std::isfinite(value)) continue;
      refuse(ErrorCode::kTensorValue,
             {.what = std::string("a value of lora_") + name + " is not finite",
              .found = std::to_string(value) + " at [" + std::to_string(row) + ", " +
                       std::to_string(col) + "]"});
    }
  }
}

// A matrix with data, of two dimensions; check_matrix does the rest.
void check_view(const char* name, const ConstTensorView& view, const Shape& shape,
                const LoraFactors& factors, const Refusal& refuse) {
  const std::string tensor = text_of(factors) + ": lora_" + name;
  if (view.empty()) {
    refuse(ErrorCode::kNullPointer, {.what = "factors have no data", .tensor = tensor});
  }
  try {
    check_matrix(tensor, view, shape, {DType::kF32, DType::kF16, DType::kBF16});
  } catch (const Error& error) {
    refuse(error.code(), error.detail());
  }
  check_values(name, view, refuse);
}

void check_place(const LoraFactors& factors, const Part& part, const Refusal& refuse) {
  if (factors.matrix == WeightMatrix::kGate && !part.gated) {
    refuse(ErrorCode::kInvalidArgument, {.what = "this activation has no gate to adapt"});
  }
  if (factors.expert >= 0 && factors.expert < part.count) return;
  refuse(ErrorCode::kInvalidArgument, {.what = "an adapter names an expert that the layer lacks",
                                       .found = std::to_string(factors.expert),
                                       .limit = std::to_string(part.count) + " experts"});
}

void check_factors(const LoraFactors& factors, const Part& part, int64_t max_rank,
                   const Refusal& refuse) {
  check_place(factors, part, refuse);
  const bool is_down = factors.matrix == WeightMatrix::kDown;
  const int64_t in = is_down ? part.intermediate_size : part.hidden_size;
  const int64_t out = is_down ? part.hidden_size : part.intermediate_size;
  const int64_t rank = factors.a.shape.rank() == 2 ? factors.a.shape[0] : -1;
  if (rank == 0 || rank > max_rank) {
    refuse(ErrorCode::kInvalidArgument,
           {.what = "the rank of an adapter is out of range",
            .found = std::to_string(rank),
            .limit = "1 to " + std::to_string(max_rank),
            .hint = rank == 0 ? "" : "raise LayerOptions.max_adapter_rank"});
  }
  check_view("A", factors.a, {rank < 0 ? 1 : rank, in}, factors, refuse);
  check_view("B", factors.b, {out, rank}, factors, refuse);
  if (std::isfinite(static_cast<float>(factors.scale))) return;
  refuse(ErrorCode::kTensorValue, {.what = "the scale of an adapter is not finite in float32",
                                   .found = std::to_string(factors.scale)});
}

}  // namespace

void check_adapter(const LoraAdapter& adapter, const MoeSpec& spec, int64_t max_rank) {
  if (adapter.factors.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "an adapter has no factors for this layer", .file = adapter.name});
  }
  std::set<std::tuple<WeightMlp, WeightMatrix, int64_t>> seen;
  for (const LoraFactors& factors : adapter.factors) {
    const Refusal refuse(adapter, factors);
    if (factors.mlp == WeightMlp::kResidual) {
      refuse(ErrorCode::kUnsupported, {.what = "residual MLPs take no adapters"});
    }
    check_factors(factors, part_of(spec, factors.mlp), max_rank, refuse);
    if (seen.emplace(factors.mlp, factors.matrix, factors.expert).second) continue;
    refuse(ErrorCode::kTensorDuplicate, {.what = "an adapter has two factors for one matrix"});
  }
}

}  // namespace conclave::inline v0
