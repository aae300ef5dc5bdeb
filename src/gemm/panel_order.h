// Which group of scales each k of a panel belongs to, where groups are no neighbours.
#pragma once

#include <cstdint>

namespace conclave::inline v0::gemm {

// The lower 32 columns of a panel and the upper ones have a table each, [k], because gate and up
// may share a panel. Without an order both are null.
struct PanelOrder {
  const int32_t* lower = nullptr;
  const int32_t* upper = nullptr;
};

}  // namespace conclave::inline v0::gemm
