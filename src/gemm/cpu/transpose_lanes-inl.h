// Columns of a matrix become rows of a panel, square by square: `Square::kSize` columns by as many
// 32-bit lanes. A lane is a float32, a pair of bf16, two float16 that end in two panel rows, or
// codes that end in four or eight.
#pragma once

#include "gemm/cpu/simd-inl.h"
#include "gemm/packed_layout.h"

#include <cstdint>

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

// Says what is fetched while some columns are transposed: the columns behind them, or in short
// blocks, which would be over before anything came, the same columns of `ColumnLanes::next`.
enum class Fetch { kColumnsBehind, kSameOfNext };

// Returns how many 32-bit lanes it took: whole squares. What is fetched goes to the second-level
// cache: columns whose distance is a power of two would throw each other out of the first.
template <class Square, bool kHalves, Fetch kFetch = Fetch::kColumnsBehind>
CONCLAVE_KERNEL_INLINE int64_t transpose_squares(const ColumnLanes& lanes, int64_t num_lanes,
                                                 std::byte* panel) {
  constexpr int kSize = Square::kSize;
  const int64_t squares = num_lanes / kSize;
  for (int first = 0; first < kColumns; first += kSize) {
    SquareColumns<kSize> source;
    SquareColumns<kSize> next;
    source.take(lanes.columns + first);
    if constexpr (kFetch == Fetch::kSameOfNext) {
      next.take(lanes.next + first);
    } else {
      const bool is_last = first + kSize == kColumns;
      next.take(is_last ? lanes.next : lanes.columns + first + kSize);
    }
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

// Lanes of codes: 8 KiB of transposed ones stay in the first-level cache beside the columns that
// they come from, until all 64 columns of a lane are there to be spread. Rows of a lane take as
// many bytes as the lane.
template <class Square, int kBits, bool kStreams>
__attribute__((noinline)) int64_t transpose_codes(const ColumnLanes& codes, std::byte* panel) {
  constexpr int64_t kLaneCodes = 32 / kBits;
  constexpr int64_t kBlockLanes = 32;
  const int64_t num_lanes = codes.count / kLaneCodes;
  alignas(64) std::byte lanes[kBlockLanes * kLaneRowBytes];
  const std::byte* columns[kColumns];
  const std::byte* next[kColumns];
  int64_t done = 0;
  while (done < num_lanes) {
    const int64_t left = num_lanes - done;
    const int64_t count = left < kBlockLanes ? left : kBlockLanes;
    for (int i = 0; i < kColumns; ++i) {
      const std::byte* const column = codes.columns[i];
      columns[i] = column != nullptr ? column + done * 4 : nullptr;
      const std::byte* const later = column != nullptr ? column + (done + count) * 4 : nullptr;
      next[i] = count < left ? later : codes.next[i];
    }
    const int64_t taken = transpose_squares<Square, false, Fetch::kSameOfNext>(
        {.columns = columns, .next = next, .element_bits = 32, .count = count}, count, lanes);
    for (int64_t lane = 0; lane < taken; ++lane) {
      Square::template spread<kBits, kStreams>(lanes + lane * kLaneRowBytes,
                                               panel + (done + lane) * kLaneRowBytes);
    }
    done += taken;
    if (taken < count) break;
  }
  if constexpr (kStreams) _mm_sfence();
  return done * kLaneCodes;
}

// Lines that begin with the panel are written whole, and pass the caches by: nobody reads them
// soon, and the memory's old contents are not read first.
template <class Square, int kBits>
CONCLAVE_KERNEL_INLINE int64_t transpose_codes(const ColumnLanes& codes, std::byte* panel) {
  const bool has_whole_lines = reinterpret_cast<uintptr_t>(panel) % 64 == 0;
  return has_whole_lines ? transpose_codes<Square, kBits, true>(codes, panel)
                         : transpose_codes<Square, kBits, false>(codes, panel);
}

template <class Square>
CONCLAVE_KERNEL_INLINE int64_t transpose_lanes(const ColumnLanes& lanes, std::byte* panel) {
  switch (lanes.element_bits) {
    case 32:
      return transpose_squares<Square, false>(lanes, lanes.count, panel);
    case 16:
      return 2 * transpose_squares<Square, true>(lanes, lanes.count / 2, panel);
    case 8:
      return transpose_codes<Square, 8>(lanes, panel);
    case 4:
      return transpose_codes<Square, 4>(lanes, panel);
    default:
      return 0;
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
