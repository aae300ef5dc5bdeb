// The warps of the decode kernel that load weights: they wait only for room in the ring.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/sm90/decode/walk.cuh"

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
  // Factors of codes: rows of a box, their first row, and the expert.
  const CUtensorMap* scales;
  const CUtensorMap* seconds;
  const DecodeFactors& factors;
  int factor_rows;
  int factor_row;
  int expert;
};

// Loads weights from one thread, to which every stage costs a whole turn of its loop.
template <class Config>
struct Producer {
  const DecodeParams& params;
  const Shared& shared;
  Ring ring = {};

  __device__ __forceinline__ void wait_for_room() const {
    ptx::mbarrier_wait(shared.empty + ring.slot, ring.phase ^ 1U);
  }

  static __device__ __forceinline__ int factors_of_stage(const Source& source) {
    return source.factor_rows * source.factors.stage_groups;
  }
  // Bytes that come to a stage beside its boxes.
  __device__ __forceinline__ uint32_t factor_bytes(const Source& source) const {
    if constexpr (!Config::kIsCoded) return 0;
    if constexpr (Config::kCodes.exact) return static_cast<uint32_t>(factors_of_stage(source));
    if constexpr (Config::kCodes.steps) {
      constexpr int kEach = Config::kCodes.offsets ? 2 : 1;
      return static_cast<uint32_t>(
          kEach * (factors_of_stage(source) + source.factor_rows * source.stage_boxes * 4));
    }
    return static_cast<uint32_t>(factors_of_stage(source) * (4 + params.second_bytes));
  }
  // Coordinates: row, part, group, expert.
  __device__ __forceinline__ void bring_factors(const Source& source, int box) const {
    if constexpr (!Config::kIsCoded) return;
    uint64_t* full = shared.full + ring.slot;
    unsigned char* target = shared.factors + ring.slot * params.plan.factor_bytes;
    int group = group_of_box(params.plan, source.factors, box);
    if constexpr (Config::kCodes.exact) {
      ptx::tma_load_3d(source.scales, full, target, source.factor_row, group, source.expert,
                       ptx::CacheHint::kEvictFirst);
      return;
    }
    // A box has the columns of a unit.
    const int second = Config::kCodes.steps ? box : group;
    // A pair has the scales of two groups, if it is not of both numbers of one.
    if constexpr (Config::kCodes.steps && !Config::kCodes.offsets) group /= 2;
    ptx::tma_load_4d(source.scales, full, target, source.factor_row, 0, group, source.expert,
                     ptx::CacheHint::kEvictFirst);
    if (!Config::kCodes.steps && params.second_bytes == 0) return;
    ptx::tma_load_4d(source.seconds, full, target + params.plan.second_factor, source.factor_row, 0,
                     second, source.expert, ptx::CacheHint::kEvictFirst);
  }

  // Coordinates: column, row, matrix, box, tile. A copy of one box counts columns, which lets it
  // end within a box; a copy of several counts boxes.
  __device__ __forceinline__ void bring(const Source& source, int begin, int end) {
    const uint32_t line_bytes = static_cast<uint32_t>(source.box_rows * kDecodeBoxBytes);
    for (int box = begin; box < end; box += source.stage_boxes) {
      wait_for_room();
      uint64_t* full = shared.full + ring.slot;
      unsigned char* target = shared.ring + ring.slot * kDecodeStageBytes;
      if (source.copy_boxes > 1) {
        ptx::mbarrier_arrive_expect_tx(
            full, static_cast<uint32_t>(source.copy_boxes) * line_bytes + factor_bytes(source));
        ptx::tma_load_5d(source.map, full, target, 0, source.row, source.matrix, box, source.tile,
                         ptx::CacheHint::kEvictFirst);
      } else {
        const int count = min(source.stage_boxes, end - box);
        ptx::mbarrier_arrive_expect_tx(
            full, static_cast<uint32_t>(count) * line_bytes + factor_bytes(source));
        for (int i = 0; i < count; ++i)
          ptx::tma_load_5d(source.map, full, target + i * source.box_bytes,
                           (box + i) * Config::kBoxElements, source.row, source.matrix, 0,
                           source.tile, ptx::CacheHint::kEvictFirst);
      }
      bring_factors(source, box);
      ring.advance(params.shared.stages);
    }
  }

  __device__ __forceinline__ void run(const Walk& walk) {
    const DecodePlan& plan = params.plan;
    DecodeTables& tables = *shared.tables;
    const bool gated = plan.tile_features == 8;
    int tile = walk.take(0);
    int next = walk.take(1);
    tell_item(0, tile < walk.total_tiles ? tile : kNoItem);
    for (int i = 0; tile < walk.total_tiles; ++i) {
      const bool more = next < walk.total_tiles;
      tell_item(i + 1, more ? next : kNoItem);
      const int after = more ? walk.take(i + 2) : next;
      const UpItem up = up_item(plan, tile);
      const int expert = tables.unit_expert[up.unit];
      bring({.map = &params.up_map,
             .row = gated ? 0 : up.tile * 16,
             .matrix = gated ? expert * 2 : expert,
             .tile = gated ? up.tile : 0,
             .box_rows = 16,
             .box_bytes = kUpBoxBytes,
             .copy_boxes = plan.up_copy_boxes,
             .stage_boxes = kUpStageBoxes,
             .scales = &params.up_scales,
             .seconds = &params.up_seconds,
             .factors = plan.up_factors,
             .factor_rows = 16,
             .factor_row = up.tile * (Config::kCodes.exact ? 16 : plan.tile_features),
             .expert = expert},
            0, plan.up_boxes);
      tile = next;
      next = after;
    }
    for_each_down_item(params, walk, [&](const DownItem& part, int row) {
      bring({.map = &params.down_map,
             .row = row,
             .matrix = tables.unit_expert[part.unit],
             .tile = 0,
             .box_rows = plan.pass_rows,
             .box_bytes = plan.down_box_bytes,
             .copy_boxes = plan.down_copy_boxes,
             .stage_boxes = plan.down_stage_boxes,
             .scales = &params.down_scales,
             .seconds = &params.down_seconds,
             .factors = plan.down_factors,
             .factor_rows = Config::kCodes.exact ? plan.down_scale_rows : plan.pass_rows,
             // Bytes come from multiples of 16.
             .factor_row = Config::kCodes.exact ? row / 16 * 16 : row,
             .expert = tables.unit_expert[part.unit]},
            part.begin, part.end);
    });
  }

 private:
  __device__ __forceinline__ void tell_item(int i, int tile) const {
    volatile int32_t* slot = &shared.tables->tiles[i % kDecodeTileSlots];
    *slot = tile;
  }
};

// Loads the scales of 128x128 blocks, two per box: those of gate and up, or of the two blocks of
// rows that a pass may touch. One warp runs it, with a lane for each scale.
struct ScaleProducer {
  const DecodeParams& params;
  const Shared& shared;
  int lane;
  Ring ring = {};

  __device__ __forceinline__ void bring(const float* line, int begin, int end, int stage_boxes) {
    for (int box = begin; box < end; box += stage_boxes) {
      ptx::mbarrier_wait(shared.empty + ring.slot, ring.phase ^ 1U);
      float* target = shared.stage_scales + ring.slot * kUpStageBoxes * 2 + lane;
      if (lane < 2 * min(stage_boxes, end - box))
        ptx::cp_async_4(ptx::shared_address(target), line + box + lane / 2, true);
      ptx::cp_async_mbarrier_arrive_noinc(shared.full + ring.slot);
      ring.advance(params.shared.stages);
    }
  }

  __device__ __forceinline__ void run(const Walk& walk) {
    const DecodePlan& plan = params.plan;
    const DecodeTables& tables = *shared.tables;
    const bool gated = plan.tile_features == 8;
    const int up_row_blocks = (plan.intermediate_size + kScaleGroup - 1) / kScaleGroup;
    for_each_up_item(params, shared, [&](const UpItem& up) {
      const int expert = tables.unit_expert[up.unit];
      const int64_t matrix = gated ? int64_t{expert} * 2 + lane % 2 : int64_t{expert};
      const int64_t line = matrix * up_row_blocks + up.tile * plan.tile_features / kScaleGroup;
      bring(params.weights.gate_up.scale + line * plan.up_boxes, 0, plan.up_boxes, kUpStageBoxes);
    });
    // Only rows that are not used would need a block of rows beyond the last.
    const int row_blocks = (plan.hidden_size + kScaleGroup - 1) / kScaleGroup;
    for_each_down_item(params, walk, [&](const DownItem& part, int row) {
      const int row_block = min(row / kScaleGroup + lane % 2, row_blocks - 1);
      const int64_t line = int64_t{tables.unit_expert[part.unit]} * row_blocks + row_block;
      bring(params.weights.down.scale + line * plan.down_boxes, part.begin, part.end,
            plan.down_stage_boxes);
    });
  }
};

}  // namespace conclave::inline v0::experts::decode
