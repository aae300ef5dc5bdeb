// Arrays of a dictionary cut into the roles of a layer, in whatever layout a framework has them.
#pragma once

#include "arrays.h"

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <array>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

namespace conclave::python {

// How the experts' matrices lie in `gate_up` and `down`.
struct ArrayLayout {
  GateUpOrder order = GateUpOrder::kConcatenated;
  GateUpOrder shared_order = GateUpOrder::kConcatenated;
  // [E, H, 2I] and [E, I, H] instead of [E, 2I, H] and [E, H, I].
  bool transposed = false;
  // [E]: which matrix of the arrays each expert is, -1 none; empty: all E, in order.
  std::vector<int32_t> local_of = {};
};

// One role: matrices of equal shape, whose rows and columns may lie apart. Strides in elements.
struct RoleArrays {
  std::vector<const std::byte*> matrices = {};  // null: not here
  WeightInfo info = {};
  int64_t row_stride = 0;
  int64_t col_stride = 1;
  std::string argument = {};
};

struct WeightArrays {
  std::set<std::string> names;  // of arguments; `kept` points into it
  std::vector<Array> kept;
  std::array<RoleArrays, kNumWeightRoles> roles;
};

// Keys are the names of ExpertWeights' members, or gate and up (and shared_gate, shared_up,
// residual_gate, residual_up) apart; the experts' matrices may also be lists with an array for
// each. With the GIL held. Throws Error naming the key: kInvalidArgument for one that is none,
// kShape, kDType, kMisaligned.
void cut_weights(const nb::dict& arrays, const MoeSpec& spec, const ArrayLayout& layout,
                 WeightArrays& weights);

}  // namespace conclave::python
