// Turns finished sums in the first-level cache into output rows.
#pragma once

#include "gemm/cpu/panel_task.h"
#include "gemm/cpu/row_offsets-inl.h"
#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

CONCLAVE_KERNEL_INLINE void add_bias(const float* bias, const FinishedTile& tile) {
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    for (int64_t c = 0; c < 64; c += Vec::kLanes) {
      float* sum = tile.sums + r * 64 + c;
      Vec::add(Vec::load(sum), Vec::load(bias + c)).store(sum);
    }
  }
}

CONCLAVE_KERNEL_INLINE void store_rows(int64_t valid_columns, const FinishedTile& tile) {
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    std::byte* out = tile.out + r * tile.out_row_bytes;
    for (int64_t c = 0; c < valid_columns; c += Vec::kLanes) {
      const int64_t rest = valid_columns - c;
      const Vec sum = Vec::load(tile.sums + r * 64 + c);
      if (rest >= Vec::kLanes) {
        sum.store(out + c * 4);
      } else {
        sum.store_first(out + c * 4, rest);
      }
    }
  }
}

// Takes what offsets of weights take from rows of codes, adds the bias, then runs the epilogue or
// stores float32 rows. It is out of line and works through
// memory, so that it takes no registers from the loop over k; it runs once in thousands of steps.
__attribute__((noinline)) inline void finish_tile(const PanelTask& task, const FinishedTile& tile) {
  if (task.row_scales.first != nullptr && task.offsets.exist()) take_offsets(task, tile);
  if (task.bias != nullptr) add_bias(task.bias, tile);
  if (task.epilogue != nullptr) {
    task.epilogue(task, tile);
  } else {
    store_rows(task.valid_columns, tile);
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
