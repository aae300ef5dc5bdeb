// A row on its way to the experts of all ranks, with what its token has chosen behind it: one block
// of bytes for each token, so that the rows of a rank are one message.
#pragma once

#include "layer/cuda/plan.h"

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0 {

struct GatheredRow {
  DType dtype = DType::kBF16;
  int64_t scales = 0;  // where a row of codes has its scales, in bytes
  int64_t ids = 0;     // where the ids begin; the weights follow them
  int64_t mark = 0;    // where a token's mark of adapters is; 0 if the layer takes none
  int64_t bytes = 0;   // from a row to the next, a multiple of 16
  int64_t columns = 0;
};

// Whether rows become codes where they come from: their kernels take a code a byte with scales that
// are made of the row alone, and no expert changes the row first. Adapters multiply the row itself.
bool travels_as_codes(const CudaPlan& plan);
// The form for rows that are `source` before they travel. Forms of different types have different
// sizes, by which ranks whose rows are of different types notice it.
GatheredRow gathered_row(const CudaPlan& plan, DType source);
// The largest that a call's rows may have.
int64_t most_gathered_row_bytes(const CudaPlan& plan);

}  // namespace conclave::inline v0
