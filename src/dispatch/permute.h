// Groups assignments (a row and one of its experts) by local expert: a stable counting sort.
#pragma once

#include "core/flow.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0::dispatch {

// Rows of one source, with up to top_k assignments each.
struct AssignmentBlock {
  const int32_t* local_expert = nullptr;  // [num_rows, top_k]; outside [0, E_local): no assignment
  int64_t num_rows = 0;
  int64_t first_row = 0;       // bundle row of the block's row 0
  int64_t* slot_of = nullptr;  // [num_rows, top_k] out: the batch slot, -1 for none
};

// The outputs of permute and its scratch memory.
struct PermuteTarget {
  BatchLayout layout = BatchLayout::kContiguous;
  int64_t num_local_experts = 0;
  int64_t slots_per_expert = 0;     // for kPadded: at least the rows of all blocks
  int64_t* expert_begin = nullptr;  // [E_local]
  int64_t* expert_count = nullptr;  // [E_local]
  int64_t* source_row = nullptr;    // [slots]
  int64_t* last_row = nullptr;      // [E_local] scratch
};

struct PermuteResult {
  int64_t assignments = 0;     // those with an expert in range
  int64_t occupied_slots = 0;  // fewer if a row names an expert twice
};

// Slots of an expert are in the order (block, row, position among the row's top_k). A row that
// names an expert twice occupies one slot, which both assignments share: no row count exceeds
// min(top_k, E_local), and the expert computes the row once. Bundle rows of different blocks must
// differ. Allocates nothing.
PermuteResult permute(std::span<const AssignmentBlock> blocks, int64_t top_k,
                      const PermuteTarget& target);

}  // namespace conclave::inline v0::dispatch
