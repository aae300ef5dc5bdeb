// The warps of the decode kernel that load weights: they wait only for room in the ring.
#pragma once

#include "cuda/device/copy.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/sm90/decode/config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// One row of boxes: a tile of the up product, or a part of the down product.
struct Source {
  const CUtensorMap* map;
  int row;  // coordinates in the map
  int matrix;
  int tile;
  int box_rows;
  int box_bytes;
  int copy_boxes;
  int stage_boxes;
};

// Loads weights, from one thread: every stage costs it a whole turn of its loop.
template <class C>
struct Producer {
  const DecodeParams& params;
  const Shared& shared;
  Cursor cursor = {};

  __device__ __forceinline__ void wait_for_room() const {
    ptx::mbarrier_wait(shared.empty + cursor.slot, cursor.parity ^ 1U);
  }

  // Coordinates: column, row, matrix, box, tile. A copy of one box counts columns, which lets it
  // end within a box; a copy of several counts boxes.
  __device__ __forceinline__ void bring(const Source& source, int begin, int end) {
    const uint32_t line_bytes = static_cast<uint32_t>(source.box_rows * kDecodeBoxBytes);
    for (int box = begin; box < end; box += source.stage_boxes) {
      wait_for_room();
      uint64_t* full = shared.full + cursor.slot;
      unsigned char* target = shared.ring + cursor.slot * kDecodeStageBytes;
      if (source.copy_boxes > 1) {
        ptx::mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(source.copy_boxes) * line_bytes);
        ptx::tma_load_5d(source.map, full, target, 0, source.row, source.matrix, box, source.tile,
                         ptx::CacheHint::kEvictFirst);
      } else {
        const int count = min(source.stage_boxes, end - box);
        ptx::mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(count) * line_bytes);
        for (int i = 0; i < count; ++i)
          ptx::tma_load_5d(source.map, full, target + i * source.box_bytes,
                           (box + i) * C::kBoxElements, source.row, source.matrix, 0, source.tile,
                           ptx::CacheHint::kEvictFirst);
      }
      cursor.advance(params.shared.stages);
    }
  }

  __device__ __forceinline__ void run(const Work& work) {
    const DecodePlan& plan = params.plan;
    DecodeTables& tables = *shared.tables;
    const bool gated = plan.tile_features == 8;
    int tile = work.take(0);
    int next = work.take(1);
    publish(0, tile < work.total_tiles ? tile : kNoTile);
    for (int i = 0; tile < work.total_tiles; ++i) {
      const bool more = next < work.total_tiles;
      publish(i + 1, more ? next : kNoTile);
      const int after = more ? work.take(i + 2) : next;
      const UpTile up = up_tile(plan, tile);
      const int expert = tables.unit_expert[up.unit];
      bring({.map = &params.up_map,
             .row = gated ? 0 : up.tile * 16,
             .matrix = gated ? expert * 2 : expert,
             .tile = gated ? up.tile : 0,
             .box_rows = 16,
             .box_bytes = kUpBoxBytes,
             .copy_boxes = plan.up_copy_boxes,
             .stage_boxes = kUpStageBoxes},
            0, plan.up_boxes);
      tile = next;
      next = after;
    }
    for (int pass = 0; pass < plan.passes; ++pass) {
      const int row = work.first_row + pass * plan.pass_rows;
      if (row >= plan.hidden_size) return;
      DownPart part = down_part(plan, 0);
      for (int i = 0; i < work.num_parts; ++i, part = next_part(plan, part)) {
        bring({.map = &params.down_map,
               .row = row,
               .matrix = tables.unit_expert[part.unit],
               .tile = 0,
               .box_rows = plan.pass_rows,
               .box_bytes = plan.down_box_bytes,
               .copy_boxes = plan.down_copy_boxes,
               .stage_boxes = plan.down_stage_boxes},
              part.begin, part.end);
      }
    }
  }

 private:
  __device__ __forceinline__ void publish(int i, int tile) const {
    volatile int32_t* slot = &shared.tables->tiles[i % kDecodeTileSlots];
    *slot = tile;
  }
};

// Loads the scales of 128x128 blocks, two per box: for gate and up, or for the two blocks of rows
// that a pass may touch. One warp runs it, one lane per scale.
struct ScaleFeeder {
  const DecodeParams& params;
  const Shared& shared;
  int lane;
  Cursor cursor = {};

  __device__ __forceinline__ void bring(const float* line, int begin, int end, int stage_boxes) {
    for (int box = begin; box < end; box += stage_boxes) {
      ptx::mbarrier_wait(shared.empty + cursor.slot, cursor.parity ^ 1U);
      float* target = shared.stage_scales + cursor.slot * kUpStageBoxes * 2 + lane;
      if (lane < 2 * min(stage_boxes, end - box))
        ptx::cp_async_4(ptx::shared_address(target), line + box + lane / 2, true);
      ptx::cp_async_mbarrier_arrive_noinc(shared.full + cursor.slot);
      cursor.advance(params.shared.stages);
    }
  }

  __device__ __forceinline__ void run(const Work& work) {
    const DecodePlan& plan = params.plan;
    const DecodeTables& tables = *shared.tables;
    const bool gated = plan.tile_features == 8;
    const int up_row_blocks = (plan.intermediate_size + 127) / 128;
    for (int i = 0;; ++i) {
      const int tile = published_tile(tables, i);
      if (tile == kNoTile) break;
      const UpTile up = up_tile(plan, tile);
      const int expert = tables.unit_expert[up.unit];
      const int64_t matrix = gated ? int64_t{expert} * 2 + lane % 2 : int64_t{expert};
      const int64_t line = matrix * up_row_blocks + up.tile * plan.tile_features / 128;
      bring(params.weights.gate_up_scale + line * plan.up_boxes, 0, plan.up_boxes, kUpStageBoxes);
    }
    // Only unused rows would need a block of rows beyond the last.
    const int row_blocks = (plan.hidden_size + 127) / 128;
    for (int pass = 0; pass < plan.passes; ++pass) {
      const int row = work.first_row + pass * plan.pass_rows;
      if (row >= plan.hidden_size) return;
      const int row_block = min(row / 128 + lane % 2, row_blocks - 1);
      DownPart part = down_part(plan, 0);
      for (int i = 0; i < work.num_parts; ++i, part = next_part(plan, part)) {
        const int64_t line = int64_t{tables.unit_expert[part.unit]} * row_blocks + row_block;
        bring(params.weights.down_scale + line * plan.down_boxes, part.begin, part.end,
              plan.down_stage_boxes);
      }
    }
  }
};

}  // namespace conclave::inline v0::experts::decode
