// Factors of adapters for weights whose columns have an order: down's order of columns is that of
// gate's and up's rows.
#pragma once

#include "layer/adapters/adapter_parts.h"

#include "conclave/tensor.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

struct OrderedPart {
  AdapterPart part;
  std::vector<Tensor> memory;  // views that are not the given part's point there
};

// Puts rows of B of gate and up and columns of A of down where the weights have theirs. `columns`:
// [experts of the part, inner], the column of down in each place, counted from the rank's first;
// -1: none, which becomes 0.
OrderedPart order_factors(const AdapterPart& part, std::span<const int32_t> columns, int64_t inner);

}  // namespace conclave::inline v0
