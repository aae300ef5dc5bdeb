// Cuts the arrays of a dictionary into the weights of a layer, in whatever layout a framework has
// them.
#pragma once

#include "arrays.h"
#include "matrix_arrays.h"

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstddef>
#include <set>
#include <string>
#include <vector>

namespace conclave::python {

// The layout of the experts' matrices in `gate_up` and `down`.
struct ArrayLayout {
  GateUpOrder order = GateUpOrder::kConcatenated;
  GateUpOrder shared_order = GateUpOrder::kConcatenated;
  // Whether arrays are [E, H, 2I] and [E, I, H] instead of [E, 2I, H] and [E, H, I].
  bool transposed = false;
  // [E]: index of each expert's matrix in the arrays, -1 for none; if empty, all E in order.
  std::vector<int32_t> local_of = {};
};

struct WeightArrays {
  std::set<std::string> names;  // names of arguments; `kept` points into it
  std::vector<Array> kept;
  WeightTable<MatrixArrays> by_id;
};

// Keys are the names of ExpertWeights' members; gate and up (and shared_gate, shared_up,
// residual_gate, residual_up) may be separate. The experts' matrices may also be lists with one
// array each. Requires the GIL. Throws Error naming the key: kInvalidArgument for an unknown one,
// kShape, kDType, kMisaligned.
void cut_weights(const nb::dict& arrays, const MoeSpec& spec, const ArrayLayout& layout,
                 WeightArrays& weights);

}  // namespace conclave::python
