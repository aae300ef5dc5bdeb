// The plain structs that stages pass to each other; two stages share each, so they live here. All
// pointers are into the workspace or the caller's tensors; nothing here owns memory.
#pragma once

#include "conclave/dtype.h"
#include "conclave/routing.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// Activation rows in the format the kernel reads: `num_rows` rows of `row_bytes` bytes, each
// holding `hidden_size` elements of `dtype`, then zeros. row_bytes is a multiple of 64.
struct RowBundle {
  const std::byte* rows = nullptr;
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  DType dtype = DType::kF32;
};

enum class BatchLayout : uint8_t {
  kContiguous,  // expert e owns slots [begin[e], begin[e] + count[e]), densely one after another
  kPadded,      // the same, but begin[e] = e * a fixed slot count
};

// Rows grouped by local expert. Slot s reads row source_row[s] of the bundle: rows are gathered
// by the kernel, never copied. Slots outside every expert's range are unused.
struct ExpertBatch {
  RowBundle bundle;
  BatchLayout layout = BatchLayout::kContiguous;
  int64_t num_local_experts = 0;
  int64_t num_slots = 0;
  const int64_t* expert_begin = nullptr;  // [num_local_experts]
  const int64_t* expert_count = nullptr;  // [num_local_experts]
  const int64_t* source_row = nullptr;    // [num_slots]
};

enum class OutputTag : uint8_t { kPerRow, kReducedPerToken };

// The result of the experts: float32 rows of `hidden_size` elements, one per batch slot.
struct ExpertOutput {
  OutputTag tag = OutputTag::kPerRow;
  float* rows = nullptr;
  int64_t row_stride = 0;  // elements
};

}  // namespace conclave::inline v0
