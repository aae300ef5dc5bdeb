// The decode kernel's weights on their way: which a warp reads, and its ring of shared memory.
#pragma once

#include "cuda/device/copy.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/decode_config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

struct UpUnit {
  int unit;
  int tile;
};
struct DownUnit {
  int unit;
  int pass;
  int slice;
};

struct Work {
  int first_tile = 0;  // of the block
  int num_up = 0;      // of the warp
  int num_down = 0;
  int first_row = 0;  // column of the output where the block's begin
  int warp = 0;

  __device__ Work(const DecodePlan& plan, int units, int warp_index) : warp(warp_index) {
    const int64_t tiles = int64_t{units} * plan.feature_tiles;
    first_tile = static_cast<int>(tiles * blockIdx.x / gridDim.x);
    const int end_tile = static_cast<int>(tiles * (blockIdx.x + 1) / gridDim.x);
    num_up = share(end_tile - first_tile);
    first_row = static_cast<int>(blockIdx.x) * plan.block_rows();
    if (first_row < plan.hidden_size) num_down = share(units * plan.passes * plan.k_slices);
  }
  __device__ UpUnit up(const DecodePlan& plan, int i) const {
    const int tile = first_tile + warp + i * kDecodeWarps;
    const int unit = tile / plan.feature_tiles;
    return {unit, tile - unit * plan.feature_tiles};
  }
  __device__ DownUnit down(const DecodePlan& plan, int i) const {
    const int index = warp + i * kDecodeWarps;
    const int unit = index / (plan.passes * plan.k_slices);
    const int rest = index - unit * plan.passes * plan.k_slices;
    const int pass = rest / plan.k_slices;
    return {unit, pass, rest - pass * plan.k_slices};
  }

 private:
  __device__ int share(int total) const {
    return warp < total ? (total - warp + kDecodeWarps - 1) / kDecodeWarps : 0;
  }
};

__device__ __forceinline__ int slice_begin(const DecodePlan& plan, int slice) {
  return plan.down_boxes * slice / plan.k_slices;
}

template <class C>
struct Ring {
  uint32_t boxes;  // of the first stage, in shared memory
  uint64_t* full;  // a barrier a stage
  float* scales;   // four a stage
  int stages;
  int slot = 0;
  uint32_t parity = 0;

  __device__ Ring(const DecodeParams& params, const Shared& shared, int warp)
      : boxes(ptx::shared_address(shared.base) +
              static_cast<uint32_t>(warp * params.shared.stages * kDecodeStageBytes)),
        full(reinterpret_cast<uint64_t*>(shared.base + params.shared.barriers) +
             warp * params.shared.stages),
        scales(reinterpret_cast<float*>(shared.base + params.shared.stage_scales) +
               warp * params.shared.stages * kUpStageBoxes * 2),
        stages(params.shared.stages) {}

  __device__ uint32_t address() const {
    return boxes + static_cast<uint32_t>(slot * kDecodeStageBytes);
  }
  __device__ const float* stage_scales() const { return scales + slot * kUpStageBoxes * 2; }
  __device__ void wait() const { ptx::mbarrier_wait(full + slot, parity); }
  __device__ void advance() {
    if (++slot == stages) {
      slot = 0;
      parity ^= 1U;
    }
  }
};

template <class C>
struct Producer {
  const DecodeParams& params;
  const Shared& shared;
  const Work& work;
  int lane;
  int next = 0;  // unit
  bool is_down = false;
  int box = 0;
  int end = 0;
  int expert = 0;
  int place = 0;  // feature tile, or the first row of the pass

  __device__ Producer(const DecodeParams& p, const Shared& s, const Work& w, int lane_index)
      : params(p), shared(s), work(w), lane(lane_index) {}

  // Starts the next stage of weights into `slot`, if there is one.
  __device__ void issue(const Ring<C>& ring, int slot) {
    if (box == end && !next_unit()) return;
    const int most = is_down ? params.plan.down_stage_boxes : kUpStageBoxes;
    const int count = min(end - box, most);
    uint64_t* full = ring.full + slot;
    if (lane == 0)
      issue_boxes(ring.boxes + static_cast<uint32_t>(slot * kDecodeStageBytes), full, count);
    if constexpr (C::kBlockScales) {
      issue_scales(ring.scales + slot * kUpStageBoxes * 2, count);
      ptx::cp_async_mbarrier_arrive_noinc(full);
    }
    box += count;
  }

 private:
  __device__ bool next_unit() {
    const DecodePlan& plan = params.plan;
    if (next == work.num_up + work.num_down) return false;
    is_down = next >= work.num_up;
    if (is_down) {
      const DownUnit unit = work.down(plan, next - work.num_up);
      expert = shared.tables->unit_expert[unit.unit];
      place = work.first_row + unit.pass * plan.pass_rows;
      box = slice_begin(plan, unit.slice);
      end = slice_begin(plan, unit.slice + 1);
    } else {
      const UpUnit unit = work.up(plan, next);
      expert = shared.tables->unit_expert[unit.unit];
      place = unit.tile;
      box = 0;
      end = plan.up_boxes;
    }
    ++next;
    return true;
  }

  __device__ void issue_boxes(uint32_t target, uint64_t* full, int count) const {
    const DecodePlan& plan = params.plan;
    const uint32_t bytes = is_down ? static_cast<uint32_t>(plan.pass_rows * kDecodeBoxBytes)
                                   : static_cast<uint32_t>(kUpBoxBytes);
    ptx::mbarrier_arrive_expect_tx(full, bytes * static_cast<uint32_t>(count));
    for (int i = 0; i < count; ++i) {
      const int column = (box + i) * C::kBoxElements;
      void* destination = shared.base + (target - ptx::shared_address(shared.base)) +
                          i * (is_down ? plan.down_box_bytes : kUpBoxBytes);
      if (is_down) {
        ptx::tma_load_3d(&params.down_map, full, destination, column, place, expert,
                         ptx::CacheHint::kEvictFirst);
      } else if (plan.tile_features == 8) {
        ptx::tma_load_5d(&params.up_map, full, destination, column, 0, 0, place, expert,
                         ptx::CacheHint::kEvictFirst);
      } else {
        ptx::tma_load_3d(&params.up_map, full, destination, column, place * 16, expert,
                         ptx::CacheHint::kEvictFirst);
      }
    }
  }

  // Two of a box: of gate and up, or of the two blocks of rows that a pass may touch.
  __device__ void issue_scales(float* target, int count) const {
    if (lane >= 2 * count) return;
    const DecodePlan& plan = params.plan;
    const int half = lane % 2;
    const int k_block = box + lane / 2;
    const float* source = nullptr;
    bool valid = true;
    if (is_down) {
      const int row_blocks = (plan.hidden_size + 127) / 128;
      const int row_block = place / 128 + half;
      valid = row_block < row_blocks;
      source = params.weights.down_scale +
               (int64_t{expert} * row_blocks + row_block) * plan.down_boxes + k_block;
    } else {
      const int row_blocks = (plan.intermediate_size + 127) / 128;
      const bool gated = plan.tile_features == 8;
      const int64_t matrix = gated ? int64_t{expert} * 2 + half : int64_t{expert};
      source = params.weights.gate_up_scale +
               (matrix * row_blocks + place * plan.tile_features / 128) * plan.up_boxes + k_block;
    }
    ptx::cp_async_4(ptx::shared_address(target + lane), valid ? source : params.weights.down_scale,
                    valid);
  }
};

}  // namespace conclave::inline v0::experts::decode
