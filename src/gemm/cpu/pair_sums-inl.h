// What products of pairs with codes have in common whatever multiplies them: where weights have
// offsets, those of a scale are multiplied by the sum of the row's values and taken off.
#pragma once

#include "gemm/cpu/coded_pieces-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// total -= sum(x) * offset over the k that share the scale of a piece, for a row of sums. It is out
// of line, so that it takes no registers from the loops over k.
__attribute__((noinline)) inline void subtract_offsets(const PanelTask& task, const Piece& piece,
                                                       const Bf16Values& row, float* total) {
  const int64_t group = scale_index(task, piece.begin);
  const int64_t begin = group / 64 * task.scale_width - task.scale_skip;
  const Vec sum = Vec::broadcast(-sum_of_bf16(row, begin < 0 ? 0 : begin, piece.end));
  for (int64_t c = 0; c < 64; c += Vec::kLanes) {
    Vec::fma(sum, Vec::load(task.offsets + group + c), Vec::load(total + c)).store(total + c);
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
