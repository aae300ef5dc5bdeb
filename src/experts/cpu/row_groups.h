// Rows for tile instructions: groups of rows interleaved in pieces of 64 bytes, so that a tile of
// one group is contiguous.
#pragma once

#include "core/flow.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::experts {

struct RowSelection {
  const RowBundle& bundle;
  const int64_t* row_index = nullptr;  // indices of bundle rows
  int64_t num_rows = 0;
  int64_t group = 1;
};

// Piece p of selected row r goes to destination + (r / group) * group * row_bytes
// + (p * group + r % group) * 64. Rows missing from the last group are not written.
void interleave_rows(const RowSelection& selection, std::byte* destination);

}  // namespace conclave::inline v0::experts
