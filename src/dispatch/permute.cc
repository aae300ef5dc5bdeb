#include "dispatch/permute.h"

#include "core/dcheck.h"

#include <algorithm>

namespace conclave::inline v0::dispatch {
namespace {

// Only this function decides whether an id may be used as an index.
bool is_local(int32_t expert, int64_t num_local_experts) {
  return expert >= 0 && expert < num_local_experts;
}

// Counts each expert's distinct rows.
PermuteResult count_rows(std::span<const AssignmentBlock> blocks, int64_t top_k,
                         const PermuteTarget& target) {
  PermuteResult result;
  std::fill_n(target.expert_count, target.num_local_experts, int64_t{0});
  std::fill_n(target.last_row, target.num_local_experts, int64_t{-1});
  for (const AssignmentBlock& block : blocks) {
    for (int64_t i = 0; i < block.num_rows * top_k; ++i) {
      const int32_t expert = block.local_expert[i];
      if (!is_local(expert, target.num_local_experts)) continue;
      ++result.assignments;
      const int64_t row = block.first_row + i / top_k;
      if (target.last_row[expert] == row) continue;
      target.last_row[expert] = row;
      ++target.expert_count[expert];
      ++result.occupied_slots;
    }
  }
  return result;
}

void place_experts(const PermuteTarget& target) {
  int64_t next = 0;
  for (int64_t expert = 0; expert < target.num_local_experts; ++expert) {
    target.expert_begin[expert] =
        target.layout == BatchLayout::kPadded ? expert * target.slots_per_expert : next;
    CONCLAVE_DCHECK(target.layout != BatchLayout::kPadded ||
                    target.expert_count[expert] <= target.slots_per_expert);
    next += target.expert_count[expert];
  }
}

}  // namespace

PermuteResult permute(std::span<const AssignmentBlock> blocks, int64_t top_k,
                      const PermuteTarget& target) {
  const PermuteResult result = count_rows(blocks, top_k, target);
  place_experts(target);
  // expert_count restarts as the number of slots filled so far and ends at the counted value.
  std::fill_n(target.expert_count, target.num_local_experts, int64_t{0});
  std::fill_n(target.last_row, target.num_local_experts, int64_t{-1});
  for (const AssignmentBlock& block : blocks) {
    for (int64_t i = 0; i < block.num_rows * top_k; ++i) {
      const int32_t expert = block.local_expert[i];
      if (!is_local(expert, target.num_local_experts)) {
        block.slot_of[i] = -1;
        continue;
      }
      const int64_t row = block.first_row + i / top_k;
      if (target.last_row[expert] != row) {
        target.last_row[expert] = row;
        target.source_row[target.expert_begin[expert] + target.expert_count[expert]] = row;
        ++target.expert_count[expert];
      }
      block.slot_of[i] = target.expert_begin[expert] + target.expert_count[expert] - 1;
    }
  }
  return result;
}

}  // namespace conclave::inline v0::dispatch
