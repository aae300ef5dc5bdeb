// Weights of lanes on their way to the ring: a thread has their codes copied, and a warpgroup
// decodes them to e5m2, which the products read. Weights that both blocks of a cluster need are
// decoded in halves, each of which goes to the other block by a copy. An exponent of five bits
// holds all codes of e2m1 times scales that are powers of two, as long as none is more than 2^26
// below the largest of its matrix.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/scale_bytes.h"
#include "experts/cuda/sm90/tile_bytes/config.cuh"

namespace conclave::inline v0::experts::tile_bytes {

// Eight codes of e2m1 in CodeOrder::kLanesOfFloats, with a scale whose byte is ByteForm::kNear.
class DecodedLanes {
 public:
  // Sums are multiplied by this and by FactorPlanes::sum_factors.
  static constexpr float kUnit = 0x1p-12F;

  // 6 times the largest scale is 1.5 2^15, the largest number of e5m2 but one.
  __device__ __forceinline__ explicit DecodedLanes(uint32_t byte) {
    // The magnitudes of e2m1 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6; a step of the exponent is 4 in bits
    // of e5m2, and 0.5 has 4 (byte - 227) of them.
    constexpr uint32_t kHalf = 4U * (kLeastNearOfE5m2 - 1);
    low_ = byte * 0x04040400U + (0x06040000U - kHalf * 0x01010100U);
    high_ = byte * 0x04040404U + (0x0e0c0a08U - kHalf * 0x01010101U);
  }

  // The even columns of the word's pairs, and the odd ones, in the order of `lane_byte`.
  __device__ __forceinline__ uint2 of(uint32_t word) const {
    // Three bits of each code go to a nibble, which selects a magnitude.
    uint32_t places = choose(word, word << 2, 0x00ff00ffU);
    places = (places & 0x07070707U) | (places << 1 & 0x70707070U);
    return {sign(__byte_perm(low_, high_, places), word >> 12 & 0xfU),
            sign(__byte_perm(low_, high_, places >> 16), word >> 28)};
  }

 private:
  static __device__ __forceinline__ uint32_t choose(uint32_t a, uint32_t b, uint32_t from_a) {
    return (a & from_a) | (b & ~from_a);
  }
  // Four signs, of pairs 1, 3, 2 and 0, become the highest bits of the bytes of pairs 3, 1, 0, 2.
  static __device__ __forceinline__ uint32_t sign(uint32_t magnitudes, uint32_t signs) {
    constexpr uint32_t kSpread = 1U << 15 | 1U << 6 | 1U << 29 | 1U << 20;
    return magnitudes | (signs * kSpread & 0x80808080U);
  }

  uint32_t low_;
  uint32_t high_;
};

// Decodes a row of a stage's weights, of which 16 bytes of codes are eight of each of two groups of
// 32 columns; two of the eight have a place side by side.
__device__ __forceinline__ void decode_row(const CodeRing& ring, int32_t slot, int32_t row,
                                           uint8_t* weights) {
  constexpr int kChunks = CodeRing::kRowBytes / 16;
  const uint8_t* const codes = ring.codes[slot] + row * CodeRing::kRowBytes;
  uint8_t* const decoded = weights + row * 128;
  uint4 words[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    words[i] = ptx::load_shared(ptx::shared_address(codes + (i ^ (row / 2 % 4)) * 16));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // each has 64 columns
    const DecodedLanes lanes[2] = {DecodedLanes(ring.scales[slot][2 * half][row]),
                                   DecodedLanes(ring.scales[slot][2 * half + 1][row])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4& chunk = words[2 * half + i];
      const uint2 first[2] = {lanes[0].of(chunk.x), lanes[0].of(chunk.z)};
      const uint2 second[2] = {lanes[1].of(chunk.y), lanes[1].of(chunk.w)};
      *reinterpret_cast<uint4*>(decoded + ((4 * half + i) ^ (row % 8)) * 16) =
          make_uint4(first[0].x, first[0].y, first[1].x, first[1].y);
      *reinterpret_cast<uint4*>(decoded + ((4 * half + 2 + i) ^ (row % 8)) * 16) =
          make_uint4(second[0].x, second[0].y, second[1].x, second[1].y);
    }
  }
}

// A warp's 32 rows of a half follow each other: one copy sends them to the other block.
template <class Config>
__device__ __forceinline__ void send_rows(SharedStorage<Config>& shared, int32_t stage,
                                          int32_t first_row) {
  constexpr uint32_t kBytes = 32 * Config::kDepth;
  const uint32_t peer = ptx::cluster_rank() ^ 1;
  const uint8_t* const rows = shared.weights[stage] + first_row * Config::kDepth;
  ptx::bulk_copy_to_block(ptx::map_to_block(ptx::shared_address(rows), peer), rows, kBytes,
                          ptx::map_to_block(ptx::shared_address(&shared.full[stage]), peer));
}

// The decoding warpgroup calls this.
template <class Config>
__device__ void decode_weights(SharedStorage<Config>& shared) {
  constexpr int32_t kHalfRows = Config::kWeightRows / 2;
  static_assert(Config::kDecoderThreads == kHalfRows && Config::kDepth == 128);
  CodeRing& ring = shared.lanes;
  RingPosition<CodeRing::kSlots> slot;
  RingPosition<Config::kStages> stage;
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % kHalfRows;
  const int32_t own_half = static_cast<int32_t>(ptx::cluster_rank()) * kHalfRows;
  const bool signals = threadIdx.x % 32 == 0;
  for (;; slot.advance(), stage.advance()) {
    ptx::mbarrier_wait(&ring.full[slot.slot], slot.phase);
    const CodeWork work = ring.work[slot.slot];
    ptx::mbarrier_wait(&shared.empty[stage.slot], stage.phase ^ 1);
    uint8_t* const weights = shared.weights[stage.slot];
    const int32_t halves = work == CodeWork::kAll ? 2 : work == CodeWork::kHalf ? 1 : 0;
    const int32_t first_row = thread + (work == CodeWork::kHalf ? own_half : 0);
#pragma unroll 1
    for (int32_t half = 0; half < halves; ++half) {
      decode_row(ring, slot.slot, first_row + half * kHalfRows, weights);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (signals) {
      ptx::mbarrier_arrive(&ring.empty[slot.slot]);
      ptx::mbarrier_arrive(&shared.full[stage.slot]);
      if (work == CodeWork::kHalf) send_rows<Config>(shared, stage.slot, first_row);
    }
    if (work == CodeWork::kEnd) return;
  }
}

// The thread that has codes copied, with its place in their ring.
template <class Config>
struct CodeLoader {
  const Params& params;
  const CUtensorMap* weight_map;
  SharedStorage<Config>& shared;
  int32_t rank;
  RingPosition<CodeRing::kSlots> slot = {};

  __device__ __forceinline__ void load_item(const Item& item, int32_t steps) {
    const CodeWork work = item.shares_weights ? CodeWork::kHalf
                          : item.count > 0    ? CodeWork::kAll
                                              : CodeWork::kIdle;
    for (int32_t step = 0; step < steps; ++step) {
      begin(work);
      if (work != CodeWork::kIdle) load_stage(item, step);
      finish();
    }
  }
  __device__ __forceinline__ void end() {
    begin(CodeWork::kEnd);
    finish();
  }

 private:
  static constexpr int32_t kHalfRows = Config::kWeightRows / 2;

  __device__ __forceinline__ void begin(CodeWork work) {
    ptx::mbarrier_wait(&shared.lanes.empty[slot.slot], slot.phase ^ 1);
    shared.lanes.work[slot.slot] = work;
  }
  __device__ __forceinline__ void finish() {
    ptx::mbarrier_arrive(&shared.lanes.full[slot.slot]);
    slot.advance();
  }
  // Each block of the cluster decodes a half where both have the same weights.
  __device__ __forceinline__ void load_stage(const Item& item, int32_t step) const {
    const int32_t first_half = item.shares_weights ? rank : 0;
    const int32_t last_half = item.shares_weights ? rank : 1;
    for (int32_t half = first_half; half <= last_half; ++half) load_half(item, step, half);
  }
  __device__ __forceinline__ void load_half(const Item& item, int32_t step, int32_t half) const {
    constexpr uint32_t kCodeBytes = kHalfRows * CodeRing::kRowBytes;
    CodeRing& ring = shared.lanes;
    uint64_t* const full = &ring.full[slot.slot];
    const int32_t first_row = item.feature_tile * Config::kWeightRows + half * kHalfRows;
    // Rows may end before this half begins.
    const auto scale_bytes = static_cast<uint32_t>(
        max(int64_t{0}, min(int64_t{kHalfRows}, params.byte_stride - first_row)));
    const int32_t group = step * CodeRing::kScalesOfStage;
    const int32_t groups =
        scale_bytes == 0 ? 0 : min(CodeRing::kScalesOfStage, params.scale_groups - group);
    ptx::mbarrier_expect_tx(full, kCodeBytes + static_cast<uint32_t>(groups) * scale_bytes);
    load_codes(item, step * CodeRing::kRowBytes, half, full);
    const uint8_t* const scales =
        params.scale_bytes +
        (int64_t{item.expert} * params.scale_groups + group) * params.byte_stride + first_row;
    for (int32_t i = 0; i < groups; ++i) {
      ptx::bulk_load(ring.scales[slot.slot][i] + half * kHalfRows, scales + i * params.byte_stride,
                     scale_bytes, full);
    }
  }
  __device__ __forceinline__ void load_codes(const Item& item, int32_t k, int32_t half,
                                             uint64_t* full) const {
    uint8_t* const to = shared.lanes.codes[slot.slot] + half * kHalfRows * CodeRing::kRowBytes;
    if constexpr (Config::kProduct == Product::kUpGated) {
      const int32_t group = item.feature_tile * (Config::kFeatures / 8) + half * (kHalfRows / 16);
      ptx::tma_load_5d(weight_map, full, to, k, 0, 0, group, item.expert);
    } else {
      const int32_t row = item.feature_tile * Config::kFeatures + half * kHalfRows;
      ptx::tma_load_3d(weight_map, full, to, k, row, item.expert);
    }
  }
};

// One thread loads the codes of the items that tell_items finds. They depend on no earlier kernel.
template <class Config>
__device__ void produce_codes(const Params& params, const CUtensorMap* weight_map,
                              SharedStorage<Config>& shared) {
  const int32_t steps = (params.depth + Config::kDepth - 1) / Config::kDepth;
  CodeLoader<Config> loader{.params = params,
                            .weight_map = weight_map,
                            .shared = shared,
                            .rank = static_cast<int32_t>(ptx::cluster_rank())};
  for (uint32_t phase = 0;; phase ^= 1) {
    ptx::mbarrier_wait(&shared.item_full, phase);
    const Item item = shared.item;
    if (item.expert < 0) return loader.end();
    ptx::mbarrier_arrive(&shared.item_empty);
    loader.load_item(item, steps);
  }
}

}  // namespace conclave::inline v0::experts::tile_bytes
