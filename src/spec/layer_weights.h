// The weights of a layer with a given spec: one list for all who need it.
#pragma once

#include "quant/planes.h"

#include "conclave/weights.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// `count` matrices [rows, cols].
struct WeightShape {
  WeightId id = weights::kGate;
  int64_t count = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  quant::PlaneType type = quant::PlaneType::kFloat;
  DType dtype = DType::kF32;  // for quant::PlaneType::kWeights
  bool is_optional = false;
  bool is_vector = false;        // rows = 1 by definition; files store one axis
  quant::PlaneShape plane = {};  // for planes of a matrix
};

// Matrices come before their other planes.
std::vector<WeightShape> layer_weights(const MoeSpec& spec);

// Whether sources may store it as `dtype`.
bool is_stored_as(const WeightShape& shape, DType dtype);

// count_parameters for any spec whose sizes are in range, valid or not, so that a layer that does
// not run can still be listed. Throws Error(kSizeOverflow).
ParameterCount count_weights(const MoeSpec& spec);

}  // namespace conclave::inline v0
