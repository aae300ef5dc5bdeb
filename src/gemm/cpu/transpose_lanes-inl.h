// Columns of a matrix become rows of a panel, square by square: `Square::kSize` columns by as many
// 32-bit lanes. A lane is a float32, a pair of bf16, or two float16 that end in two panel rows.
#pragma once

#include "gemm/cpu/simd-inl.h"
#include "gemm/packed_layout.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

inline constexpr int kColumns = 64;
inline constexpr int64_t kLaneRowBytes = kColumns * 4;
// Bytes of one square's columns: `count` bytes apart from each other in each, zeros for those that
// do not exist.
template <int kSize>
struct SquareColumns {
  const std::byte* begin[kSize];
  int64_t mask[kSize];  // 0 for columns of zeros, which stay where they begin

  CONCLAVE_KERNEL_INLINE void take(const std::byte* const* columns) {
    alignas(64) static constexpr std::byte kZeros[64] = {};
    for (int i = 0; i < kSize; ++i) {
      begin[i] = columns[i] != nullptr ? columns[i] : kZeros;
      mask[i] = columns[i] != nullptr ? -1 : 0;
    }
  }
  CONCLAVE_KERNEL_INLINE const std::byte* at(int column, int64_t offset) const {
    return begin[column] + (offset & mask[column]);
  }
};

// Returns how many 32-bit lanes it took: whole squares. While some columns are transposed, the next
// ones are fetched into the second-level cache: columns whose distance is a power of two would
// throw each other out of the first.
template <class Square, bool kHalves>
CONCLAVE_KERNEL_INLINE int64_t transpose_squares(const ColumnLanes& lanes, int64_t num_lanes,
                                                 std::byte* panel) {
  constexpr int kSize = Square::kSize;
  const int64_t squares = num_lanes / kSize;
  for (int first = 0; first < kColumns; first += kSize) {
    SquareColumns<kSize> source;
    SquareColumns<kSize> next;
    source.take(lanes.columns + first);
    next.take(first + kSize < kColumns ? lanes.columns + first + kSize : lanes.next);
    std::byte* to = panel + first * (kHalves ? 2 : 4);
    for (int64_t n = 0; n < squares; ++n) {
      const int64_t offset = n * kSize * 4;
      Square square;
#pragma GCC unroll 16
      for (int i = 0; i < kSize; ++i) {
        __builtin_prefetch(next.at(i, offset), 0, 2);
        square.load(i, source.at(i, offset));
      }
      square.transpose();
#pragma GCC unroll 16
      for (int i = 0; i < kSize; ++i) {
        if constexpr (kHalves) {
          square.store_halves(i, to, to + kLaneRowBytes / 2);
        } else {
          square.store(i, to);
        }
        to += kLaneRowBytes;
      }
    }
  }
  return squares * kSize;
}

template <class Square>
CONCLAVE_KERNEL_INLINE int64_t transpose_lanes(const ColumnLanes& lanes, std::byte* panel) {
  if (lanes.lane_bytes == 4) return transpose_squares<Square, false>(lanes, lanes.count, panel);
  if (lanes.lane_bytes != 2) return 0;
  return 2 * transpose_squares<Square, true>(lanes, lanes.count / 2, panel);
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
