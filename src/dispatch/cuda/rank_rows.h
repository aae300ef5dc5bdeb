// Rows as they travel between expert-parallel ranks on CUDA, and the sums that come back.
#pragma once

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

// A token's block of bytes: its row, then its ids, its weights, and a mark that its rank gave it.
// Blocks lie at multiples of 16 bytes.
struct RankRowForm {
  DType dtype = DType::kBF16;  // kF32, kF16 or kBF16
  int64_t columns = 0;
  int64_t ids = 0;    // the place of the ids in the block, in bytes, a multiple of 4
  int64_t mark = 0;   // the place of the mark, likewise; 0 if there is none
  int64_t bytes = 0;  // the block has so many
  int32_t top_k = 0;
};

struct PackRankRows {
  RankRowForm form;
  const void* rows = nullptr;  // [num_rows, row_stride]
  DType dtype = DType::kBF16;
  int64_t row_stride = 0;  // elements
  int64_t num_rows = 0;
  const int64_t* live_rows = nullptr;  // device, or null; later rows get ids -1
  const int32_t* topk_ids = nullptr;   // [num_rows, k]
  const float* topk_weights = nullptr;
  const int32_t* marks = nullptr;  // [num_rows], or null: every live row has `mark`
  int32_t mark = 0;
  std::byte* out = nullptr;
};
// Enqueues one launch; rows are rounded to nearest even where the form's type is narrower.
void pack_rank_rows(const PackRankRows& args, CUstream_st* stream);

struct UnpackChoices {
  RankRowForm form;
  const std::byte* blocks = nullptr;
  int64_t num_rows = 0;
  int32_t* topk_ids = nullptr;  // [num_rows, k]
  float* topk_weights = nullptr;
  int32_t* marks = nullptr;  // [num_rows], if the form has them
};
// Enqueues the copy of what all blocks have beside their rows.
void unpack_choices(const UnpackChoices& args, CUstream_st* stream);

// Each rank's experts add this to the same rows, at multiples of 16 bytes.
struct RankParts {
  const void* own = nullptr;
  const void* others = nullptr;  // num_rows * stride elements for each other rank, by rank
  DType dtype = DType::kF32;     // or kF16, kBF16
  int32_t rank = 0;
  int32_t ranks = 1;
  int64_t num_rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;  // elements
  float* out = nullptr;
  int64_t out_stride = 0;
};
// Enqueues out = part 0 + part 1 + ..., from left to right in float32.
void add_rank_parts(const RankParts& args, CUstream_st* stream);

}  // namespace conclave::inline v0::dispatch
