#include "core/weight_id.h"

#include "core/dcheck.h"

#include <array>

namespace conclave::inline v0 {
namespace {

struct Row {
  WeightRole role;
  WeightId id;
};

constexpr std::array kRows = {
    Row{WeightRole::kGate, {Mlp::kRouted, Matrix::kGate, Plane::kWeights}},
    Row{WeightRole::kUp, {Mlp::kRouted, Matrix::kUp, Plane::kWeights}},
    Row{WeightRole::kDown, {Mlp::kRouted, Matrix::kDown, Plane::kWeights}},
    Row{WeightRole::kGateBias, {Mlp::kRouted, Matrix::kGate, Plane::kBias}},
    Row{WeightRole::kUpBias, {Mlp::kRouted, Matrix::kUp, Plane::kBias}},
    Row{WeightRole::kDownBias, {Mlp::kRouted, Matrix::kDown, Plane::kBias}},
    Row{WeightRole::kGateScale, {Mlp::kRouted, Matrix::kGate, Plane::kScale}},
    Row{WeightRole::kUpScale, {Mlp::kRouted, Matrix::kUp, Plane::kScale}},
    Row{WeightRole::kDownScale, {Mlp::kRouted, Matrix::kDown, Plane::kScale}},
    Row{WeightRole::kGateInputScale, {Mlp::kRouted, Matrix::kGate, Plane::kInputScale}},
    Row{WeightRole::kUpInputScale, {Mlp::kRouted, Matrix::kUp, Plane::kInputScale}},
    Row{WeightRole::kDownInputScale, {Mlp::kRouted, Matrix::kDown, Plane::kInputScale}},
    Row{WeightRole::kSharedGate, {Mlp::kShared, Matrix::kGate, Plane::kWeights}},
    Row{WeightRole::kSharedUp, {Mlp::kShared, Matrix::kUp, Plane::kWeights}},
    Row{WeightRole::kSharedDown, {Mlp::kShared, Matrix::kDown, Plane::kWeights}},
    Row{WeightRole::kSharedGateBias, {Mlp::kShared, Matrix::kGate, Plane::kBias}},
    Row{WeightRole::kSharedUpBias, {Mlp::kShared, Matrix::kUp, Plane::kBias}},
    Row{WeightRole::kSharedDownBias, {Mlp::kShared, Matrix::kDown, Plane::kBias}},
    Row{WeightRole::kSharedGateScale, {Mlp::kShared, Matrix::kGate, Plane::kScale}},
    Row{WeightRole::kSharedUpScale, {Mlp::kShared, Matrix::kUp, Plane::kScale}},
    Row{WeightRole::kSharedDownScale, {Mlp::kShared, Matrix::kDown, Plane::kScale}},
    Row{WeightRole::kSharedGateInputScale, {Mlp::kShared, Matrix::kGate, Plane::kInputScale}},
    Row{WeightRole::kSharedUpInputScale, {Mlp::kShared, Matrix::kUp, Plane::kInputScale}},
    Row{WeightRole::kSharedDownInputScale, {Mlp::kShared, Matrix::kDown, Plane::kInputScale}},
    Row{WeightRole::kResidualGate, {Mlp::kResidual, Matrix::kGate, Plane::kWeights}},
    Row{WeightRole::kResidualUp, {Mlp::kResidual, Matrix::kUp, Plane::kWeights}},
    Row{WeightRole::kResidualDown, {Mlp::kResidual, Matrix::kDown, Plane::kWeights}},
};

}  // namespace

WeightId weight_id(WeightRole role) noexcept {
  for (const Row& row : kRows) {
    if (row.role == role) return row.id;
  }
  return {};
}

std::optional<WeightRole> find_role(const WeightId& id) noexcept {
  for (const Row& row : kRows) {
    if (row.id == id) return row.role;
  }
  return std::nullopt;
}

WeightRole plane_of(WeightRole role, Plane plane) noexcept {
  WeightId id = weight_id(role);
  id.plane = plane;
  const std::optional<WeightRole> found = find_role(id);
  CONCLAVE_DCHECK(found.has_value());
  return found.value_or(role);
}

}  // namespace conclave::inline v0
