// Counts that the kernels of a forward keep, beside that of its tokens, and what is counted of the
// weights.
#pragma once

#include <cstdint>

namespace conclave::inline v0 {

// As in LayerStatus.
struct KernelCounts {
  int64_t skipped_ids = 0;
  int64_t tokens_without_finite_logit = 0;
  int64_t gate_rows_with_nan = 0;
};

}  // namespace conclave::inline v0
