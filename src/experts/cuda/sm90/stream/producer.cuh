// Loads that fill the ring: one thread makes those of weights, and of token rows that lie in order,
// by TMA (drawn_producer.cuh); three warps gather other token rows and the block scales.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/sm90/stream/walk.cuh"

namespace conclave::inline v0::experts::stream {

__device__ __forceinline__ const CodedParams& coded(const Params& params) {
  return static_cast<const CodedParams&>(params);
}

// Loads the factors of a stage's codes: scales, and behind them offsets or zero points.
template <class Config>
__device__ __forceinline__ void load_factors(const CodedParams& params,
                                             SharedStorage<Config>& shared, int32_t slot,
                                             int32_t expert, int32_t feature_tile, int32_t stage) {
  const int32_t feature = feature_tile * params.features_of_tile;
  const int32_t group = stage * Config::kDepth / params.group;
  uint8_t* factors = shared.codes.factors[slot];
  if constexpr (Config::kCodes.steps) {
    // Words of steps are those of one group, of two or of four, units those of a stage.
    constexpr int kGroups = Config::kDepth / 16 / Config::kCodes.steps_of_sum;
    constexpr int kWords = are_small(Config::kCodes) ? kGroups / 4
                           : Config::kCodes.offsets  ? kGroups
                                                     : kGroups / 2;
    ptx::tma_load_4d(&params.scales, &shared.full[slot], factors, feature, 0, stage * kWords,
                     expert, ptx::CacheHint::kEvictFirst);
    ptx::tma_load_4d(&params.shifts, &shared.full[slot], factors + decltype(shared.codes)::kUnitsAt,
                     feature, 0, stage, expert, ptx::CacheHint::kEvictFirst);
    return;
  }
  if constexpr (Config::kIsExact) {
    ptx::tma_load_3d(&params.scales, &shared.full[slot], factors,
                     feature_tile * Config::kWeightRows, group, expert,
                     ptx::CacheHint::kEvictFirst);
    return;
  }
  ptx::tma_load_4d(&params.scales, &shared.full[slot], factors, feature, 0, group, expert,
                   ptx::CacheHint::kEvictFirst);
  if (params.shift_bytes == 0) return;
  ptx::tma_load_4d(&params.shifts, &shared.full[slot],
                   factors + params.groups_of_stage * Config::kWeightRows * sizeof(float), feature,
                   0, group, expert, ptx::CacheHint::kEvictFirst);
}

template <class Config, Product kProduct>
__device__ __forceinline__ void load_weights(const Params& params, SharedStorage<Config>& shared,
                                             int32_t slot, int32_t expert, int32_t feature_tile,
                                             int32_t stage) {
  if constexpr (Config::kIsCoded) {
    if constexpr (kProduct == Product::kUp) stage >>= coded(params).terms_shift;
    load_factors<Config>(coded(params), shared, slot, expert, feature_tile, stage);
  }
#pragma unroll
  for (int atom = 0; atom < Config::kWeightAtoms; ++atom) {
    const int32_t k = Config::weight_column(stage, atom);
    if (kProduct == Product::kUp && params.activation.gated) {
      ptx::tma_load_5d(&params.weights, &shared.full[slot], shared.weights[slot][atom], k, 0, 0,
                       feature_tile * (Config::kWeightRows / 16), expert,
                       ptx::CacheHint::kEvictFirst);
    } else {
      ptx::tma_load_3d(&params.weights, &shared.full[slot], shared.weights[slot][atom], k,
                       feature_tile * Config::kWeightRows, expert, ptx::CacheHint::kEvictFirst);
    }
  }
}

template <class Config>
__device__ __forceinline__ int32_t token_boxes(int32_t count) {
  return (count + Config::kTokenBox - 1) / Config::kTokenBox;
}

template <class Config, Product kProduct>
__device__ __forceinline__ void expect_stage(const Params& params, SharedStorage<Config>& shared,
                                             int32_t slot, int32_t count) {
  uint32_t bytes = Config::kWeightAtoms * Config::kWeightBytes;
  if constexpr (Config::kCodes.steps) {
    bytes += sizeof(shared.codes.factors[slot]);
  } else if constexpr (Config::kIsCoded) {
    const uint32_t each = Config::kIsExact ? 1 : sizeof(float) + coded(params).shift_bytes;
    bytes += coded(params).groups_of_stage * Config::kWeightRows * each;
  }
  if constexpr (kRowsInOrder<Config, kProduct> && !Config::kHasTokenRing) {
    bytes += token_boxes<Config>(count) * Config::kTokenBox * Config::kAtoms * Config::kAtomBytes;
  }
  ptx::mbarrier_arrive_expect_tx(&shared.full[slot], bytes);
}

template <class Config>
__device__ __forceinline__ void load_rows(const Params& params, SharedStorage<Config>& shared,
                                          int32_t slot, const TokenTile& tile, int32_t stage) {
  constexpr int32_t kBoxBytes = Config::kTokenBox * Config::kAtomBytes;
  for (int32_t box = 0; box < token_boxes<Config>(tile.count); ++box) {
#pragma unroll
    for (int atom = 0; atom < Config::kAtoms; ++atom) {
      ptx::tma_load_2d(&params.rows, &shared.full[slot],
                       shared.tokens[slot][atom] + box * kBoxBytes,
                       stage * Config::kDepth + atom * Config::kAtomDepth,
                       tile.begin + box * Config::kTokenBox, ptx::CacheHint::kEvictLast);
    }
  }
}

// Waits until the ring has room for `stages` more. The first `ahead` are already loaded and are not
// waited for, since they may have been released again.
template <class Config>
__device__ __forceinline__ void claim_stages(SharedStorage<Config>& shared,
                                             RingPosition<Config::kStages> ring, int32_t ahead,
                                             int32_t stages) {
  for (int32_t i = 0; i < stages; ++i) {
    if (i >= ahead) ptx::mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
    ring.advance();
  }
}

// Loads the first item's weights, in the down product as many stages as the ring holds; returns
// their number.
template <class Config, Product kProduct>
__device__ __forceinline__ int32_t load_ahead(const Params& params, SharedStorage<Config>& shared,
                                              const TokenTile& tile, int32_t feature_tile) {
  // In the up product, more would delay the loads of the rows, which other warps request after the
  // wait.
  constexpr int32_t kMost = kProduct == Product::kUp ? 2 : Config::kStages;
  const int32_t stages = min(kMost, params.depth_stages);
  for (int32_t stage = 0; stage < stages; ++stage) {
    expect_stage<Config, kProduct>(params, shared, stage, tile.count);
    load_weights<Config, kProduct>(params, shared, stage, tile.expert, feature_tile, stage);
  }
  return stages;
}

// Prefetches to L2 the weights after those of load_ahead: memory would otherwise idle while the
// last blocks of the up product end.
template <class Config>
__device__ __forceinline__ void prefetch_ahead(const Walk<Config>& walk, int32_t index,
                                               int32_t loaded) {
  const Params& params = walk.params;
  Item item = walk.at(index);
  int32_t stage = loaded;
  for (int32_t left = Config::kStagesAhead; left > 0; --left) {
    if (stage >= params.depth_stages) {
      stage = 0;
      index += static_cast<int32_t>(gridDim.x);
      if (index >= walk.items) return;
      item = walk.at(index);
    }
#pragma unroll
    for (int atom = 0; atom < Config::kWeightAtoms; ++atom) {
      ptx::tma_prefetch_3d(&params.weights, Config::weight_column(stage, atom),
                           item.feature_tile * Config::kWeightRows, item.tile.expert);
    }
    ++stage;
  }
}

// Atoms of K that kernels with a ring of tokens multiply, two by two.
__device__ __forceinline__ int32_t even_atoms(const Params& params, int32_t atom_depth) {
  return (params.depth + 2 * atom_depth - 1) / (2 * atom_depth) * 2;
}

// Fills a ring of tokens.
template <class Config>
__device__ __forceinline__ void produce_rows(const Params& params, SharedStorage<Config>& shared) {
  constexpr int32_t kBoxBytes = Config::kTokenBox * Config::kAtomBytes;
  ptx::grid_dependency_wait();
  // Earlier kernels stored the rows through the generic proxy.
  ptx::fence_proxy_async();
  const int32_t atoms = even_atoms(params, Config::kAtomDepth);
  RingPosition<Config::kTokenStages> ring;
  uint32_t order = 0;
  for (Item item = await_item(shared, order); item.tile.count > 0;
       item = await_item(shared, ++order)) {
    const int32_t boxes = token_boxes<Config>(item.tile.count);
    for (int32_t atom = 0; atom < atoms; ++atom) {
      uint64_t* const full = &shared.tokens_full[ring.slot];
      ptx::mbarrier_wait(&shared.tokens_empty[ring.slot], ring.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, boxes * kBoxBytes);
      for (int32_t box = 0; box < boxes; ++box) {
        ptx::tma_load_2d(&params.rows, full, shared.tokens[ring.slot][0] + box * kBoxBytes,
                         atom * Config::kAtomDepth, item.tile.begin + box * Config::kTokenBox,
                         ptx::CacheHint::kEvictLast);
      }
      ring.advance();
    }
  }
}

// The warps that take part in the gather: if rows are in order, only block scales are left to
// fetch.
template <class Config, Product kProduct>
constexpr int gather_warps() {
  if (!kRowsInOrder<Config, kProduct>) return Config::kGatherWarps;
  return Config::kBlockScales ? 1 : 0;
}

// Each warp keeps the source rows of the whole tile, so that warps need not wait for each other.
template <class Config>
__device__ __forceinline__ void find_source_rows(const Params& params, int32_t* source_rows,
                                                 const TokenTile& tile) {
  __syncwarp();
  for (int32_t r = static_cast<int32_t>(threadIdx.x % 32); r < tile.count; r += 32) {
    // The load bypasses L1, because it may come before the kernel's wait.
    source_rows[r] = __ldcg(params.row_slot + tile.begin + r) / params.top_k;
  }
  __syncwarp();
}

// Gathers an atom of each row from `column` on, swizzled as by TMA, with zeros beyond the row's
// end.
template <class Config>
__device__ __forceinline__ void gather_atom(const Params& params, const int32_t* source_rows,
                                            uint32_t destination, int32_t count, int32_t column,
                                            int32_t first_row) {
  using Element = typename Config::Element;
  constexpr auto kSize = static_cast<int32_t>(sizeof(Element));
  const int32_t chunk = static_cast<int32_t>(threadIdx.x % 8);
  column += chunk * 16 / kSize;
  const int32_t bytes = max(0, min(16, (params.depth - column) * kSize));
  const auto* input = static_cast<const Element*>(params.input) + (bytes > 0 ? column : 0);
  for (int32_t r = first_row; r < count; r += 4 * Config::kGatherWarps) {
    const uint32_t address = destination + r * Config::kAtomBytes + ((chunk ^ (r & 7)) << 4);
    ptx::cp_async_16_part(address, input + source_rows[r] * params.input_stride, bytes);
  }
}

// Gathers the scales of an atom's token rows: rows 32 i + lane, for every i of this warp.
template <class Config, Product kProduct>
__device__ __forceinline__ void gather_token_scales(const Params& params,
                                                    const int32_t* source_rows, float* destination,
                                                    const TokenTile& tile, int32_t block,
                                                    int32_t warp) {
  constexpr int32_t kStep = 32 * gather_warps<Config, kProduct>();
  const ScaleParams& scales = params.scales;
  const bool valid = block < scales.blocks;
  const float* source = scales.tokens + (valid ? block * scales.block_stride : 0);
  for (int32_t r = 32 * warp + static_cast<int32_t>(threadIdx.x % 32); r < tile.count; r += kStep) {
    const int32_t row = kRowsInOrder<Config, kProduct> ? tile.begin + r : source_rows[r];
    ptx::cp_async_4(ptx::shared_address(destination + r), source + row * scales.row_stride, valid);
  }
}

// The first scale of a tile's weights; `half` selects its gate or up rows, or its first or second
// 128 rows. A last tile with fewer rows takes the scales of the last block instead.
template <class Config, Product kProduct>
__device__ __forceinline__ const float* find_weight_scales(const Params& params,
                                                           const TokenTile& tile,
                                                           int32_t feature_tile, int32_t half) {
  const ScaleParams& scales = params.scales;
  const float* expert = scales.weights + tile.expert * scales.expert_stride;
  if (kProduct == Product::kUp && params.activation.gated) {
    return expert + half * scales.half_stride + int64_t{feature_tile} * scales.blocks;
  }
  const int32_t last = (params.features + kScaleGroup - 1) / kScaleGroup - 1;
  const int32_t block = min(feature_tile * Config::kSlices + half, last);
  return expert + int64_t{block} * scales.blocks;
}

// Two lanes of one warp fetch the scales as early as the tokens, because they come from memory that
// nothing has read yet.
__device__ __forceinline__ void gather_weight_scales(const Params& params, const float* source,
                                                     float (&destination)[2], int32_t block,
                                                     int32_t half) {
  if (half > 1) return;
  const bool valid = block < params.scales.blocks;
  ptx::cp_async_4(ptx::shared_address(destination + half), source + (valid ? block : 0), valid);
}

template <class Config, Product kProduct>
__device__ __forceinline__ void gather_stage(const Params& params, const int32_t* source_rows,
                                             SharedStorage<Config>& shared, int32_t slot,
                                             const TokenTile& tile, const float* weight_scales,
                                             int32_t stage, int32_t warp) {
  const int32_t first_row = 4 * warp + static_cast<int32_t>(threadIdx.x % 32) / 8;
#pragma unroll
  for (int atom = 0; atom < Config::kAtoms; ++atom) {
    if constexpr (!kRowsInOrder<Config, kProduct>) {
      gather_atom<Config>(params, source_rows, ptx::shared_address(shared.tokens[slot][atom]),
                          tile.count, stage * Config::kDepth + atom * Config::kAtomDepth,
                          first_row);
    }
    if constexpr (Config::kBlockScales) {
      const int32_t block = stage * Config::kAtoms + atom;
      gather_token_scales<Config, kProduct>(params, source_rows, shared.token_scales[slot][atom],
                                            tile, block, warp);
      if (warp == 0) {
        gather_weight_scales(params, weight_scales, shared.weight_scales[slot][atom], block,
                             static_cast<int32_t>(threadIdx.x % 32));
      }
    }
  }
  ptx::cp_async_mbarrier_arrive_noinc(&shared.full[slot]);
}

// Every thread's copies arrive at the stage's barrier when they have landed.
template <class Config, Product kProduct>
__device__ __forceinline__ void gather(const Params& params, SharedStorage<Config>& shared,
                                       int32_t warp) {
  int32_t* source_rows = shared.source_rows[warp];
  RingPosition<Config::kStages> ring;
  uint32_t order = 0;
  for (Item item = await_item(shared, order); item.tile.count > 0;
       item = await_item(shared, ++order)) {
    const float* weight_scales = nullptr;
    if constexpr (Config::kBlockScales) {
      weight_scales = find_weight_scales<Config, kProduct>(params, item.tile, item.feature_tile,
                                                           static_cast<int32_t>(threadIdx.x % 2));
    }
    if constexpr (!kRowsInOrder<Config, kProduct>) {
      find_source_rows<Config>(params, source_rows, item.tile);
    }
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
      gather_stage<Config, kProduct>(params, source_rows, shared, ring.slot, item.tile,
                                     weight_scales, stage, warp);
      ring.advance();
    }
  }
  ptx::cp_async_wait_group<0>();
}

}  // namespace conclave::inline v0::experts::stream
