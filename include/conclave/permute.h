// Grouping of (token, slot) pairs by expert, as building blocks for engines with expert kernels of
// their own. MoeLayer does not need them: it gathers rows inside its kernels.
// Letters: T tokens, k slots, E experts, H hidden, B block size.
#pragma once

#include "conclave/tensor.h"
#include "conclave/version.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// The experts that this rank holds. `local_of` [E] gives the local index of each expert, -1
// elsewhere (ExpertPlacement::expert_map); empty: all E experts are local, under their own number.
struct ExpertSelection {
  int64_t num_experts = 0;
  std::span<const int32_t> local_of = {};
};

// Slots sorted by expert, each expert padded to whole blocks of B (vLLM's moe_align_block_size).
struct BlockAlignment {
  std::vector<int32_t> slots;            // [num_padded]: t * k + j, ascending within an expert; T *
                                         // k fills padded blocks
  std::vector<int32_t> expert_of_block;  // [num_padded / B] local expert
  int64_t num_padded = 0;
};
// topk_ids [T, k] int32 or int64; ids that are not local contribute nothing. Experts ascend, and
// slots of an expert keep (token, slot) order: the same on every run. num_padded is at most T k +
// E_local (B - 1) rounded up to B.
// Throws Error(kInvalidArgument, kShape, kDType).
CONCLAVE_API BlockAlignment align_block_size(const ConstTensorView& topk_ids, int64_t block_size,
                                             const ExpertSelection& experts);

// One row per slot with a local expert, grouped by expert.
struct PermutedRows {
  Tensor rows;                            // [N, H], in the type of hidden
  std::vector<int64_t> expert_first_row;  // [E_local + 1]
  std::vector<int64_t> slot_of_row;       // [N]: t * k + j
  std::vector<int64_t> row_of_slot;       // [T * k]: -1 if the slot's expert is not local
};
// hidden [T, H]; topk_ids [T, k]. Stable: slots of an expert keep (token, slot) order. Throws
// Error(kInvalidArgument, kShape, kDType).
CONCLAVE_API PermutedRows permute_rows(const ConstTensorView& hidden,
                                       const ConstTensorView& topk_ids,
                                       const ExpertSelection& experts);

// out[t] = sum over slots of topk_weights[t, j] * rows[row_of_slot[t, j]], in slot order, in
// float32, rounded once. rows [N, H] and out [T, H]: f32, f16 or bf16; topk_weights [T, k] f32.
// Slots without a row contribute nothing. Throws Error(kInvalidArgument, kShape, kDType).
CONCLAVE_API void unpermute_rows(const ConstTensorView& rows, std::span<const int64_t> row_of_slot,
                                 const ConstTensorView& topk_weights, const TensorView& out);

}  // namespace conclave::inline v0
