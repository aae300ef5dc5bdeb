// Rows of slots, each as its expert reads it.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0 {

// The form of such rows.
struct OwnRowForm {
  DType dtype = DType::kBF16;  // kF32 or kBF16
  int64_t width = 0;           // elements of a row, a multiple of 8
  // If not 0, values are two terms of bf16: those of so many columns, a multiple of 8, are followed
  // by their second terms.
  int64_t term_columns = 0;
};

struct OwnRows {
  const void* rows = nullptr;  // [num_slots / slots_per_row, row_stride]
  DType dtype = DType::kF32;   // kF32, kF16 or kBF16
  int64_t row_stride = 0;      // elements
  int64_t num_slots = 0;
  int64_t slots_per_row = 1;
  // GroupedRows: the sorted row of each slot, and where those of each local expert begin.
  const int32_t* slot_row = nullptr;
  const int32_t* expert_begin = nullptr;
  int64_t num_experts = 0;
  const float* weights = nullptr;    // [num_slots], or null: all 1
  const int32_t* columns = nullptr;  // [num_experts, table_stride]; -1: 0; null: as they are
  const float* factors = nullptr;    // [num_experts, table_stride], or null
  int64_t table_stride = 0;          // a multiple of 8
  int64_t num_columns = 0;           // a row has, if `columns` does not say it; 0 follows
  OwnRowForm form;
  bool clears_others = false;  // rows of slots without a local expert become 0
  void* out = nullptr;         // [num_slots, form.width]
};
// out[s, p] is column columns[e, p] of slot s's row, times the slot's weight, then times
// factors[e, p], each product rounded to float32. Enqueues one launch, which overlaps with its
// predecessor; none for no slots.
void make_own_rows(const OwnRows& args, CUstream_st* stream);

}  // namespace conclave::inline v0
