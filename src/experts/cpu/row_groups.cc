#include "experts/cpu/row_groups.h"

#include <cstring>

namespace conclave::inline v0::experts {

void interleave_rows(const RowSelection& selection, std::byte* destination) {
  constexpr int64_t kPieceBytes = 64;
  const int64_t row_bytes = selection.bundle.row_bytes;
  for (int64_t r = 0; r < selection.num_rows; ++r) {
    const std::byte* source = selection.bundle.rows + selection.row_index[r] * row_bytes;
    std::byte* target = destination + r / selection.group * selection.group * row_bytes +
                        r % selection.group * kPieceBytes;
    for (int64_t byte = 0; byte < row_bytes; byte += kPieceBytes) {
      std::memcpy(target + byte * selection.group, source + byte, kPieceBytes);
    }
  }
}

}  // namespace conclave::inline v0::experts
