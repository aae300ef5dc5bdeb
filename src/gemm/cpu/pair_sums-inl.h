// The offsets of weights that are codes, in products of pairs: those of a group of k, times the sum
// of the row's values, are taken off when the products of all codes are added up.
#pragma once

#include "gemm/cpu/coded_pieces-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

inline constexpr int kPairVectors = 64 / Vec::kLanes;

// Minus the sums of a row's values over each of kSumsTogether groups from the `first` on; zeros for
// groups that do not exist. Out of line, so that it takes no registers from the loops over k.
__attribute__((noinline)) inline void sum_groups(const PanelTask& task, const Bf16Values& row,
                                                 int64_t first, float* sums) {
  LaneSums lanes;
  for (int i = 0; i < kSumsTogether; ++i) {
    const int64_t begin = (first + i) * task.scale_width - task.scale_skip;
    const int64_t end = lesser(task.k, begin + task.scale_width);
    lanes.set(i, row, begin < 0 ? 0 : begin, end);
  }
  Vec::mul(lanes.fold(), Vec::broadcast(-1.0F)).store(sums);
}

// To be called when a piece begins: as many groups as are summed together have their sums at once.
CONCLAVE_KERNEL_INLINE void sum_next_groups(const PanelTask& task, const Piece& piece,
                                            const Bf16Values& row, float* sums) {
  if (piece.group % kSumsTogether == 0) sum_groups(task, row, piece.group, sums);
}

// The scales and offsets of a piece that ended.
struct PieceNumbers {
  GroupVectors scales;
  GroupVectors offsets;  // if the task has any

  CONCLAVE_KERNEL_INLINE PieceNumbers(const PanelTask& task, const Piece& piece) {
    scales.set(task.scales, piece.group);
    if (task.offsets.exist()) offsets.set(task.offsets, piece.group);
  }
};

// totals + partial * row scale * scale, for a row of codes and a piece that ended.
CONCLAVE_KERNEL_INLINE void add_group_of_codes(const Piece& piece, const PieceNumbers& numbers,
                                               const Vec (&partial)[kPairVectors],
                                               const float* row_scales, float* totals) {
  const Vec row_scale = Vec::broadcast(row_scales[piece.row_group]);
#pragma GCC unroll 4
  for (int j = 0; j < kPairVectors; ++j) {
    const int column = j * Vec::kLanes;
    const Vec scaled = Vec::mul(partial[j], row_scale);
    Vec::fma(scaled, numbers.scales.value[j], Vec::load(totals + column)).store(totals + column);
  }
}

// totals + partial * scale - sum(x) * offset, for a row and a piece that ended. `sums` are those of
// sum_next_groups.
template <bool kOffsets>
CONCLAVE_KERNEL_INLINE void add_group(const Piece& piece, const PieceNumbers& numbers,
                                      const Vec (&partial)[kPairVectors], const float* sums,
                                      float* totals) {
  const Vec sum = kOffsets ? Vec::broadcast(sums[piece.group % kSumsTogether]) : Vec::zero();
#pragma GCC unroll 4
  for (int j = 0; j < kPairVectors; ++j) {
    const int column = j * Vec::kLanes;
    Vec total = Vec::fma(partial[j], numbers.scales.value[j], Vec::load(totals + column));
    if constexpr (kOffsets) total = Vec::fma(sum, numbers.offsets.value[j], total);
    total.store(totals + column);
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
