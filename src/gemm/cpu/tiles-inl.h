// The 8 tile registers of AMX: 16 rows of 64 bytes each.
//
// Tiles 0 to 3 accumulate, 4 and 5 hold activations, 6 and 7 weights. A packed bf16 panel needs no
// change: 32 values of k and 16 columns are 16 panel rows of 64 bytes, 256 bytes apart.
#pragma once

#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

inline constexpr int kTileRows = 16;
inline constexpr int64_t kTileK = 32;
inline constexpr int64_t kTilePairs = kTileK / 2;
inline constexpr int64_t kTileBytes = 1024;
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int64_t kPairRowBytes = 256;
inline constexpr int64_t kSumRowBytes = 64 * sizeof(float);

// Activation rows for tiles come in groups of 16: [k / 32][16 rows][32 values of k], so that a tile
// is contiguous. A group has the bytes of 16 rows of padded k.

// Rows of the tiles that exist: instructions touch no memory beyond them, and take less time.
struct alignas(64) TileShape {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles are about to load what was stored: GCC's intrinsics do not say that they read memory.
CONCLAVE_KERNEL_INLINE void settle_memory() { __asm__ volatile("" : : : "memory"); }

// Tiles 0, 1 and 4 have `rows` rows, tiles 2, 3 and 5 `other_rows`.
CONCLAVE_KERNEL_INLINE void configure_tiles(int rows, int other_rows) {
  constexpr bool kIsOther[8] = {false, false, true, true, false, true, false, false};
  TileShape shape;
  for (int t = 0; t < 8; ++t) {
    shape.row_bytes[t] = kTileRowBytes;
    shape.rows[t] = static_cast<uint8_t>(t >= 6 ? kTileRows : kIsOther[t] ? other_rows : rows);
  }
  // The compiler's intrinsic names only the first bytes of the shape as its input.
  __asm__ volatile("" : : "r"(&shape) : "memory");
  _tile_loadconfig(&shape);
}

CONCLAVE_KERNEL_INLINE void configure_tiles(int rows) { configure_tiles(rows, rows); }

// The accumulators, side by side: up to 16 rows of 64 sums in memory.
CONCLAVE_KERNEL_INLINE void load_sums(const void* sums) {
  const auto* const first = static_cast<const std::byte*>(sums);
  _tile_loadd(0, first, kSumRowBytes);
  _tile_loadd(1, first + kTileRowBytes, kSumRowBytes);
  _tile_loadd(2, first + 2 * kTileRowBytes, kSumRowBytes);
  _tile_loadd(3, first + 3 * kTileRowBytes, kSumRowBytes);
}
CONCLAVE_KERNEL_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
CONCLAVE_KERNEL_INLINE void store_sums(void* sums) {
  auto* const first = static_cast<std::byte*>(sums);
  _tile_stored(0, first, kSumRowBytes);
  _tile_stored(1, first + kTileRowBytes, kSumRowBytes);
  _tile_stored(2, first + 2 * kTileRowBytes, kSumRowBytes);
  _tile_stored(3, first + 3 * kTileRowBytes, kSumRowBytes);
}

// A tile of the rows of a group: the place of the first row's values, and bytes to the next.
struct TileOfRows {
  const std::byte* first;
  int64_t stride;
};

// Brings rows together that lie anywhere.
class GatheredTiles {
 public:
  // The bytes from `at` on of each row; they stay for some tiles more.
  CONCLAVE_KERNEL_INLINE TileOfRows gather(const std::byte* const* rows, int64_t num_rows,
                                           int64_t at) {
    std::byte* const tile = gathered_[next_];
    next_ = (next_ + 1) % kGathered;
    for (int64_t r = 0; r < num_rows; ++r) {
      for (int64_t byte = 0; byte < kTileRowBytes; byte += Vec::kLanes * int64_t{sizeof(float)}) {
        Vec::load(rows[r] + at + byte).store(tile + r * kTileRowBytes + byte);
      }
    }
    settle_memory();
    return {tile, kTileRowBytes};
  }

 private:
  // More than one, so that no store waits for the loads of the tile before.
  static constexpr int kGathered = 4;
  alignas(64) std::byte gathered_[kGathered][kTileBytes];
  int next_ = 0;
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
