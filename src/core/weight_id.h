// The parts of a WeightRole: which MLP, which matrix of it, which plane of the matrix.
//
// Code that treats all planes or all MLPs alike asks by these parts, never by the order of the
// roles.
#pragma once

#include "conclave/weights.h"

#include <cstdint>
#include <optional>

namespace conclave::inline v0 {

enum class Mlp : uint8_t { kNone, kRouted, kShared, kResidual };
enum class Matrix : uint8_t { kGate, kUp, kDown };
enum class Plane : uint8_t { kWeights, kBias, kScale, kInputScale };

// `matrix` and `plane` mean nothing with Mlp::kNone, which roles of the layer itself have.
struct WeightId {
  Mlp mlp = Mlp::kNone;
  Matrix matrix = Matrix::kGate;
  Plane plane = Plane::kWeights;

  friend bool operator==(const WeightId&, const WeightId&) = default;
};

WeightId weight_id(WeightRole role) noexcept;

// The role of an MLP's plane; nothing if no layer has it, as biases of the residual MLP.
std::optional<WeightRole> find_role(const WeightId& id) noexcept;

// The role of another plane of the same matrix, which must exist.
WeightRole plane_of(WeightRole role, Plane plane) noexcept;

}  // namespace conclave::inline v0
