// The warps of the decode kernel that load weights: they wait only for room in the ring.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/prefetch.cuh"
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
      constexpr int kEach = Config::kCodes.offsets && !Config::kHasSmallCodes ? 2 : 1;
      const int units = source.factor_rows * source.stage_boxes * Config::kUnitsOfBox;
      return static_cast<uint32_t>(kEach * (factors_of_stage(source) + units * 4));
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
    // A box has the columns of whole units.
    const int second = Config::kCodes.steps ? box * Config::kUnitsOfBox : group;
    group /= Config::kGroupsOfWord;
    ptx::tma_load_4d(source.scales, full, target, source.factor_row, 0, group, source.expert,
                     ptx::CacheHint::kEvictFirst);
    if (!Config::kCodes.steps && params.second_bytes == 0) return;
    ptx::tma_load_4d(source.seconds, full, target + params.plan.second_factor, source.factor_row, 0,
                     second, source.expert, ptx::CacheHint::kEvictFirst);
  }

  // Coordinates: column, row, matrix, box, tile. A copy of one box counts columns, which lets it
  // end within a box; a copy of several counts boxes.
  __device__ __forceinline__ void bring(const Source& source, int begin, int end) {
    for (int box = begin; box < end; box += source.stage_boxes) bring_stage(source, box, end);
  }
  __device__ __forceinline__ void bring_stage(const Source& source, int box, int end) {
    const uint32_t line_bytes = static_cast<uint32_t>(source.box_rows * kDecodeBoxBytes);
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

  // Asks L2 for the boxes of a stage.
  __device__ __forceinline__ void prefetch_stage(const Source& source, int box, int end) const {
    if (source.copy_boxes > 1) {
      ptx::tma_prefetch_5d(source.map, 0, source.row, source.matrix, box, source.tile);
      return;
    }
    for (const int last = min(box + source.stage_boxes, end); box < last; ++box) {
      ptx::tma_prefetch_5d(source.map, box * Config::kBoxElements, source.row, source.matrix, 0,
                           source.tile);
    }
  }

  __device__ __forceinline__ Source down_source(const DownItem& part, int row) const {
    const DecodePlan& plan = params.plan;
    const int expert = shared.tables->unit_expert[part.unit];
    return {.map = &params.down_map,
            .row = row,
            .matrix = expert,
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
            .expert = expert};
  }

  // Asks L2 for the first pass's stages from `box` of `part` on.
  __device__ __forceinline__ void prefetch_down(const Walk& walk, DownItem part, int box,
                                                int row) const {
    const DecodePlan& plan = params.plan;
    int stages = plan.stages_in_l2;
    while (part.unit * plan.k_slices + part.slice < walk.num_parts) {
      const Source source = down_source(part, row);
      for (; box < part.end; box += source.stage_boxes) {
        if (stages-- == 0) return;
        prefetch_stage(source, box, part.end);
      }
      part = next_item(plan, part);
      box = part.begin;
    }
  }

  __device__ __forceinline__ void run(const Walk& walk) {
    const DecodePlan& plan = params.plan;
    DecodeTables& tables = *shared.tables;
    const bool gated = plan.tile_features == 8;
    for (int i = 0;; ++i) {
      const int item = take_item(walk, i);
      if (item == kNoItem) break;
      const UpItem up = up_item(item);
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
    }
    // A ring full of them waits for the barrier of the grid, while memory would rest.
    int until_full = params.shared.stages;
    for_each_down_item(params, walk, [&](const DownItem& part, int row) {
      const Source source = down_source(part, row);
      for (int box = part.begin; box < part.end; box += source.stage_boxes) {
        if (until_full-- == 0) prefetch_down(walk, part, box, row);
        bring_stage(source, box, part.end);
      }
    });
  }

 private:
  // The block's i-th item, which is begun now.
  __device__ __forceinline__ int take_item(const Walk& walk, int i) const {
    DecodeTables& tables = *shared.tables;
    volatile int32_t* const begun = &tables.begun;
    *begun = i + 1;
    if (i >= walk.own_tiles && walk.draws()) return await_item(tables, i);
    const int item = item_of(params.plan, walk.total_tiles, walk.own_tile(i));
    tell_item(tables, i, item);
    return item;
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
