// Places on the device of the rows and columns of stored matrices whose columns have an order.
#pragma once

#include "layer/cuda/column_orders.h"
#include "layer/cuda/mlp_source.h"

#include "conclave/weights.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// Each list may be empty: then all lies as it is stored.
struct MatrixPlaces {
  std::vector<int32_t> rows;     // the stored row of each row; -1: none
  std::vector<int32_t> columns;  // the stored column of each column; -1: none
  std::vector<int32_t> groups;   // the group of each `group` columns; -1: none
  int64_t group = 0;
};
// Counts from the rank's first row and column on. Down's order of columns is that of gate's and
// up's rows.
struct ExpertPlaces {
  MatrixPlaces gate;
  MatrixPlaces up;
  MatrixPlaces down;

  const MatrixPlaces& of(WeightMatrix matrix) const {
    return matrix == WeightMatrix::kGate ? gate : matrix == WeightMatrix::kUp ? up : down;
  }
};

// The order of the source's experts. `source` must be in host memory. Throws Error(kTensorValue)
// for an entry that is no group.
MlpOrder read_order(const MlpSource& mlp, const WeightSource& source);
// The places of an expert in the problem's layout; empty lists without an order. Throws
// Error(kUnsupported) if the layout has no room for its order, which a reload may bring.
ExpertPlaces places_of(const MlpSource& mlp, const LocalExpert& expert, const WeightSource& source);

}  // namespace conclave::inline v0
