// A group of up to 16 rows of bf16, for products with a panel of codes in the order of tiles.
#pragma once

#include "gemm/cpu/coded_pieces-inl.h"
#include "gemm/cpu/pair_sums-inl.h"
#include "gemm/cpu/tile_groups-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// The tiles of a piece, counted from that of k = 0.
CONCLAVE_KERNEL_INLINE int64_t first_tile(const Piece& piece) { return piece.begin / kTileK; }
CONCLAVE_KERNEL_INLINE int64_t end_tile(const Piece& piece) {
  return (piece.end + kTileK - 1) / kTileK;
}

// Rows of one group of a task, and their sums: of a piece that the next strip continues, and of all
// pieces that ended.
struct CodedGroup {
  const std::byte* rows = nullptr;  // plain rows, interleaved
  int64_t num_rows = 0;
  // The values and scales of each row of codes.
  const std::byte* values[kTileRows];
  const float* scales[kTileRows];
  GroupSums partial;
  GroupSums total;
  alignas(64) float of_groups[kTileRows][kSumsTogether];  // sums of the rows' own values
};

// Sums what offsets are multiplied with, when a piece begins.
CONCLAVE_KERNEL_INLINE void sum_rows(const PanelTask& task, const Piece& piece, CodedGroup& group) {
  if (!task.offsets.exist() || task.row_scales.first != nullptr) return;
  for (int64_t r = 0; r < group.num_rows; ++r) {
    // Tiles of k follow each other 16 rows apart.
    const auto* values = reinterpret_cast<const uint16_t*>(group.rows + r * kTileRowBytes);
    sum_next_groups(task, piece, {values, kTileBytes / 2}, group.of_groups[r]);
  }
}

// Adds the sums of a piece that ended to the totals.
CONCLAVE_KERNEL_INLINE void scale_sums(const PanelTask& task, const Piece& piece,
                                       const float (*sums)[64], CodedGroup& group) {
  const PieceNumbers numbers(task, piece);
  for (int64_t r = 0; r < group.num_rows; ++r) {
    Vec partial[kPairVectors];
    for (int j = 0; j < kPairVectors; ++j) {
      partial[j] = Vec::load(sums[r] + j * Vec::kLanes);
    }
    if (task.row_scales.first != nullptr) {
      add_group_of_codes(piece, numbers, partial, group.scales[r], group.total.value[r]);
    } else if (!task.offsets.exist()) {
      add_group<false>(piece, numbers, partial, nullptr, group.total.value[r]);
    } else {
      add_group<true>(piece, numbers, partial, group.of_groups[r], group.total.value[r]);
    }
  }
}

// Finds the rows of codes of a group, of which task row `first` is the first.
CONCLAVE_KERNEL_INLINE void find_rows(const PanelTask& task, int64_t first, CodedGroup& group) {
  for (int64_t r = 0; r < group.num_rows; ++r) {
    const int64_t slot = first + r;
    const int64_t row = task.row_index != nullptr ? task.row_index[slot] : slot;
    group.values[r] = task.rows + row * task.row_bytes;
    group.scales[r] = task.row_scales.of_row(row, task.row_bytes);
  }
}

// Group `index` of a task, before anything is added.
CONCLAVE_KERNEL_INLINE void begin_group(const PanelTask& task, int64_t index, CodedGroup& group) {
  const int64_t row = index * kTileRows;
  group.rows = task.rows + row * task.row_bytes;
  group.num_rows = rows_of_group(task, index);
  if (task.row_scales.first != nullptr) find_rows(task, row, group);
  for (auto& sums : group.total.value) {
    for (int64_t c = 0; c < 64; c += Vec::kLanes) Vec::zero().store(sums + c);
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
