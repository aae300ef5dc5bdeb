// Groups of 16 rows on tile registers: their sums, and how they become output rows.
#pragma once

#include "gemm/cpu/finish-inl.h"
#include "gemm/cpu/tiles-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// The sums of one group of rows. Accumulators are stored side by side.
struct alignas(64) GroupSums {
  float value[kTileRows][64];
};

// Rows that a group of a task has.
CONCLAVE_KERNEL_INLINE int64_t rows_of_group(const PanelTask& task, int64_t group) {
  const int64_t rest = task.num_rows - group * kTileRows;
  return rest < kTileRows ? rest : kTileRows;
}

CONCLAVE_KERNEL_INLINE void finish_group(const PanelTask& task, int64_t group, int64_t num_rows,
                                         GroupSums& sums) {
  // Activated rows form a group again; float32 rows stand alone, and those that become codes do.
  const bool grouped = task.epilogue != nullptr && task.row_scales.first == nullptr;
  finish_tile(task, {.sums = sums.value[0],
                     .first_row = group * kTileRows,
                     .num_rows = num_rows,
                     .out = task.out + group * kTileRows * task.out_row_bytes,
                     .out_row_bytes = grouped ? kTileRowBytes : task.out_row_bytes,
                     .out_block_bytes = task.out_block_bytes});
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
