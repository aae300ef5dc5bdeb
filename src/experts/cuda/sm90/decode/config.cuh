// Element types of the decode kernel, and where its threads, data and work lie.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/mma.cuh"
#include "experts/cuda/sm90/decode/decode.h"
#include "experts/cuda/sm90/decode/rows.cuh"
#include "experts/cuda/sm90/decode/tables.h"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

namespace ptx = cuda::device;

inline constexpr int kUpBoxBytes = 16 * kDecodeBoxBytes;
inline constexpr int kUpStageBoxes = kDecodeUpStageBoxes;
inline constexpr int kMaxProducts = kDecodeMaxPassRows / 16;
inline constexpr uint32_t kProductBytes = 16 * kDecodeBoxBytes;
inline constexpr int kProducerWarp = kDecodeWarps;
inline constexpr int kFinishWarp = kDecodeWarps + 1;
inline constexpr int kNextTileWord = 32;  // index in the workspace; the grid barrier is word 0

template <DecodeElement kElement>
struct Config {
  static constexpr bool kIsE4M3 =
      kElement == DecodeElement::kE4M3Block || kElement == DecodeElement::kE4M3Row;
  static constexpr bool kBlockScales = kElement == DecodeElement::kE4M3Block;
  static constexpr bool kRowScales = kElement == DecodeElement::kE4M3Row;
  static constexpr int kBoxElements = kIsE4M3 ? 128 : 64;

  static __device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1) {
    if constexpr (kIsE4M3) {
      ptx::mma_m16n8k32_e4m3(c, a0, a1, a2, a3, b0, b1);
    } else if constexpr (kElement == DecodeElement::kBF16) {
      ptx::mma_m16n8k16_bf16(c, a0, a1, a2, a3, b0, b1);
    } else {
      ptx::mma_m16n8k16_f16(c, a0, a1, a2, a3, b0, b1);
    }
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return kElement == DecodeElement::kBF16 ? pack_bf16(low, high) : pack_f16(low, high);
  }
};

struct Shared {
  unsigned char* ring;
  uint64_t* full;   // a stage has arrived
  uint64_t* empty;  // all warps have read it
  uint64_t* tile_full;
  uint64_t* tile_empty;
  uint64_t* tables_ready;
  uint64_t* intermediate_ready;  // all blocks have stored theirs
  float* stage_scales;           // two per box
  DecodeTables* tables;
  float* tiles;         // [buffer, warp, i, lane]; later sums [warp, token, row]
  unsigned char* rows;  // input rows, later rounds of slices of intermediate rows
  float* row_scales;    // [row, box], or one per row at the first box

  __device__ Shared(unsigned char* base, const DecodeShared& places)
      : ring(base),
        full(reinterpret_cast<uint64_t*>(base + places.barriers)),
        empty(full + places.stages),
        tile_full(empty + places.stages),
        tile_empty(tile_full + kDecodeTileBuffers),
        tables_ready(tile_empty + kDecodeTileBuffers),
        intermediate_ready(tables_ready + 1),
        stage_scales(reinterpret_cast<float*>(base + places.stage_scales)),
        tables(reinterpret_cast<DecodeTables*>(base + places.tables)),
        tiles(reinterpret_cast<float*>(base + places.tiles)),
        rows(base + places.rows),
        row_scales(reinterpret_cast<float*>(base + places.row_scales)) {}
};

struct Thread {
  int warp;
  int lane;
  int group;  // g: gives the token that it loads and its row of weights
  int quad;   // q
  // The order of rows in shared memory puts those of neighbouring groups into different halves of
  // the banks under the 128-byte swizzle.
  int row;
  uint32_t fragment;  // byte offset within 16 rows of a box

  __device__ Thread()
      : warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        group(lane / 4),
        quad(lane % 4),
        row((group >> 1) | ((group & 1) << 2)),
        fragment(static_cast<uint32_t>(row * kDecodeBoxBytes + ((quad ^ row) << 4))) {}
};

// Barrier of the warps that multiply.
__device__ __forceinline__ void consumer_sync() { ptx::named_barrier_sync(1, kDecodeConsumers); }

// A place in a ring of barriers.
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1U;
    }
  }
};

// A block's work: tiles of the up product, then its columns of the down product for all parts
// (unit, slice). Half of the tiles, or a quarter if there are many, are assigned beforehand. Free
// blocks draw the others, since not all multiprocessors are equally near to memory; a draw costs a
// trip to the counter, which few tiles do not hide.
struct Work {
  static constexpr int kManyTiles = 16;  // per block
  int total_tiles = 0;
  int own_tiles = 0;
  int num_parts = 0;
  int first_row = 0;  // the block's first output column
  uint32_t* next_tile = nullptr;

  __device__ Work(const DecodeParams& params, int units) {
    const DecodePlan& plan = params.plan;
    total_tiles = units * plan.feature_tiles;
    const int share = total_tiles / static_cast<int>(gridDim.x);
    own_tiles = share < kManyTiles ? share / 2 : share / 4;
    first_row = static_cast<int>(blockIdx.x) * plan.passes * plan.pass_rows;
    if (first_row < plan.hidden_size) num_parts = units * plan.k_slices;
    next_tile = static_cast<uint32_t*>(params.call.workspace) + kNextTileWord;
  }
  // The block's i-th tile, or total_tiles or more if none is left. Call it once for each i.
  __device__ __forceinline__ int take(int i) const {
    if (i < own_tiles) return static_cast<int>(blockIdx.x) * own_tiles + i;
    return static_cast<int>(gridDim.x) * own_tiles + static_cast<int>(atomicAdd(next_tile, 1U));
  }
};

inline constexpr int kNoTile = -1;
inline constexpr int kTileUnknown = -2;

// Waits until the producer publishes the block's i-th tile. compute-sanitizer's racecheck reports
// this polling of a word that another warp writes without a barrier. It is safe: the word is
// aligned and complete in itself, a barrier has published the tables that it refers to, and a slot
// is not reused before the ring has come round.
__device__ __forceinline__ int published_tile(const DecodeTables& tables, int i) {
  const volatile int32_t* slot = &tables.tiles[i % kDecodeTileSlots];
  int tile = *slot;
  while (tile == kTileUnknown) tile = *slot;
  return tile;
}

struct UpTile {
  int unit;
  int tile;
};
__device__ __forceinline__ UpTile up_tile(const DecodePlan& plan, int tile) {
  const int unit = tile / plan.feature_tiles;
  return {unit, tile - unit * plan.feature_tiles};
}

struct DownPart {
  int unit;
  int slice;
  int begin;  // boxes
  int end;
};
__device__ __forceinline__ DownPart down_part(const DecodePlan& plan, int index) {
  const int unit = index / plan.k_slices;
  const int slice = index - unit * plan.k_slices;
  const int begin = plan.slice_boxes * slice;
  return {unit, slice, begin, min(begin + plan.slice_boxes, plan.down_boxes)};
}

__device__ __forceinline__ DownPart next_part(const DecodePlan& plan, const DownPart& part) {
  const bool same = part.end < plan.down_boxes;
  const int begin = same ? part.end : 0;
  return {same ? part.unit : part.unit + 1, same ? part.slice + 1 : 0, begin,
          min(begin + plan.slice_boxes, plan.down_boxes)};
}

}  // namespace conclave::inline v0::experts::decode
