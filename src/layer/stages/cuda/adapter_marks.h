// Which tokens of a chunk have an adapter.
#pragma once

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0 {

// marks[t] is 1 plus the place of ids[t] among the known ids, or 0: for -1, for an id that is not
// known, which is counted where the token is live, and for a token that is not.
struct MarkTokens {
  const void* ids = nullptr;  // [T]
  DType ids_dtype = DType::kI32;
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;  // or null
  const bool* padding_mask = nullptr;    // [T], or null
  const int32_t* known = nullptr;        // [num_known], ascending
  int32_t num_known = 0;
  uint64_t* unknown = nullptr;
  int32_t* marks = nullptr;
};
void mark_tokens(const MarkTokens& args, CUstream_st* stream);

// Splits choices by whether their token has a mark: marked[t, s] = ids[t, s] where it has one, else
// -1; others[t, s], unless null, the other way round.
struct SplitChoices {
  const int32_t* ids = nullptr;  // [T, slots]
  const int32_t* marks = nullptr;
  int64_t num_tokens = 0;
  int64_t slots = 0;
  int32_t* marked = nullptr;
  int32_t* others = nullptr;
};
void split_choices(const SplitChoices& args, CUstream_st* stream);

// Copies rows of marked tokens.
struct CopyMarked {
  const int32_t* marks = nullptr;
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;  // or null
  size_t row_bytes = 0;
  const void* from = nullptr;
  int64_t from_stride_bytes = 0;
  void* to = nullptr;
  int64_t to_stride_bytes = 0;
};
void copy_marked_rows(const CopyMarked& args, CUstream_st* stream);

}  // namespace conclave::inline v0
