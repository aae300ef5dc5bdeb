// The weights of a layer with a given spec: one list for all who need it.
#pragma once

#include "quant/planes.h"

#include "conclave/weights.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0::quant {

// `count` matrices [rows, cols].
struct WeightShape {
  WeightId id = weights::kGate;
  int64_t count = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  PlaneType type = PlaneType::kFloat;
  DType dtype = DType::kF32;  // for PlaneType::kWeights
  bool is_optional = false;
  bool is_vector = false;  // rows = 1 by definition; files store one axis
  PlaneShape plane = {};   // for planes of a matrix
};

// Matrices come before their other planes.
std::vector<WeightShape> layer_weights(const MoeSpec& spec);

// Whether sources may store it as `dtype`.
bool is_stored_as(const WeightShape& shape, DType dtype);

}  // namespace conclave::inline v0::quant
