// Sums of the rows alone, which offsets multiply. The warps that gather rows add up each stage's
// columns once for all consumers, and leave the sums as an operand of wgmma.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/grid.cuh"
#include "experts/cuda/sm90/stream/producer.cuh"
#include "experts/cuda/sm90/stream/walk.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// Offsets change at multiples of so many columns, which are added up.
template <class Config>
inline constexpr int kColumnsOfRowSum = 16 * Config::kCodes.steps_of_sum;
// A sum of float32 is three numbers of bf16, without a rounding.
inline constexpr int kRowSumTerms = 3;

template <class Config>
struct SummedStorage : SharedStorage<Config> {
  static constexpr int kRowSums = Config::kDepth / kColumnsOfRowSum<Config>;
  static_assert(kRowSums == 16 || kRowSums == 8 || kRowSums == 4);
  // A block is eight columns of K: a term of eight sums, or two terms of four, of which the second
  // block has the lowest and the highest again. A term of 16 sums is two blocks.
  static constexpr int kBlockColumns = 8;
  static constexpr int kBlocksOfTerm = kRowSums / 8;
  static constexpr int kBlocks = kRowSums == 4 ? 2 : kRowSumTerms * kBlocksOfTerm;
  static constexpr int kBlockBytes = Config::kMaxTokens * kBlockColumns * 2;
  // Large tiles leave no room for the sums of several stages.
  static constexpr int kSlots = Config::kMaxTokens > 64 ? 1 : Config::kStages;
  // Eight rows of a block are a core matrix of wgmma without a swizzle.
  alignas(128) uint16_t sums[kSlots][kBlocks][Config::kMaxTokens][kBlockColumns];
  uint64_t sums_full[Config::kStages];

  static __device__ __forceinline__ int32_t sum_slot(int32_t slot) {
    return kSlots == 1 ? 0 : slot;
  }
};

// Core matrices of eight rows of 16 bytes, without a swizzle; the other half of K is the block
// `blocks` behind the first one.
template <class Config>
__device__ __forceinline__ uint64_t row_sum_descriptor(uint32_t address, uint32_t blocks) {
  constexpr uint64_t kStrideBytes = uint64_t{8 * 16 >> 4} << 32;
  const uint64_t leading = uint64_t{blocks * SummedStorage<Config>::kBlockBytes >> 4} << 16;
  return kStrideBytes | leading | ((address & 0x3FFFF) >> 4);
}

// One warp's share of the sums, stage by stage.
template <class Config>
class RowSums {
 public:
  __device__ __forceinline__ RowSums(SummedStorage<Config>& shared, int32_t warp)
      : shared_(shared), warp_(warp), lane_(static_cast<int32_t>(threadIdx.x % 32)) {}

  // Adds up the next stage's rows, of which there are `count`.
  __device__ __forceinline__ void add_up(int32_t count) {
    ptx::mbarrier_wait(&shared_.full[ring_.slot], ring_.phase);
    if constexpr (SummedStorage<Config>::kSlots == 1) await_readers();
    // A pass has eight rows and four of the sums, so that eight lanes read from all banks.
    constexpr int32_t kPassesOfRows = SummedStorage<Config>::kRowSums / 4;
    const int32_t passes = (count + 7) / 8 * kPassesOfRows;
    for (int32_t pass = warp_; pass < passes; pass += Config::kGatherWarps) {
      const int32_t row = pass / kPassesOfRows * 8 + lane_ % 8;
      const int32_t sum = pass % kPassesOfRows * 4 + lane_ / 8;
      store(row, sum, sum_of(row, sum));
    }
    // wgmma reads through the async proxy.
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(&shared_.sums_full[ring_.slot]);
    last_ = ring_;
    ring_.advance();
  }

 private:
  // The only slot is free when the stage before this one has been multiplied.
  __device__ __forceinline__ void await_readers() {
    if (begun_) ptx::mbarrier_wait(&shared_.empty[last_.slot], last_.phase);
    begun_ = true;
  }

  __device__ __forceinline__ float sum_of(int32_t row, int32_t sum) const {
    constexpr int kChunks = kColumnsOfRowSum<Config> / 8;
    constexpr int kSumsOfAtom = Config::kAtomDepth / kColumnsOfRowSum<Config>;
    const uint8_t* const columns =
        shared_.tokens[ring_.slot][sum / kSumsOfAtom] + row * Config::kAtomBytes;
    float parts[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int32_t chunk = (sum % kSumsOfAtom * kChunks + i) ^ (row % 8);
      const uint4 eight = *reinterpret_cast<const uint4*>(columns + chunk * 16);
      parts[i] = (sum_of_pair(eight.x) + sum_of_pair(eight.y)) +
                 (sum_of_pair(eight.z) + sum_of_pair(eight.w));
    }
    if constexpr (kChunks == 2) {
      return parts[0] + parts[1];
    } else {
      return (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }
  }
  static __device__ __forceinline__ float sum_of_pair(uint32_t pair) {
    return __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000U);
  }

  __device__ __forceinline__ void store(int32_t row, int32_t sum, float rest) {
    uint16_t terms[kRowSumTerms];
#pragma unroll
    for (uint16_t& term : terms) {
      const uint32_t bits = __float_as_uint(rest);
      term = static_cast<uint16_t>(bits >> 16);
      rest -= __uint_as_float(bits & 0xffff0000U);
    }
    auto& blocks = shared_.sums[shared_.sum_slot(ring_.slot)];
    constexpr int kBlocksOfTerm = SummedStorage<Config>::kBlocksOfTerm;
    if constexpr (kBlocksOfTerm != 0) {
#pragma unroll
      for (int term = 0; term < kRowSumTerms; ++term) {
        blocks[term * kBlocksOfTerm + sum / 8][row][sum % 8] = terms[term];
      }
    } else {
      blocks[0][row][sum] = blocks[1][row][4 + sum] = terms[0];
      blocks[0][row][4 + sum] = terms[1];
      blocks[1][row][sum] = terms[2];
    }
  }

  SummedStorage<Config>& shared_;
  int32_t warp_;
  int32_t lane_;
  RingPosition<Config::kStages> ring_;
  RingPosition<Config::kStages> last_;
  bool begun_ = false;
};

// Gathers the up product's rows, and adds each stage up while consumers still multiply others.
template <class Config>
__device__ __forceinline__ void gather_and_sum(const Params& params, SummedStorage<Config>& shared,
                                               int32_t warp) {
  // A stage's slot is free for another one only behind its sums: these follow so many stages later
  // at most.
  constexpr int kLag =
      SummedStorage<Config>::kSlots == 1 ? Config::kStages - 1 : Config::kStages - 2;
  static_assert(kLag >= 1 && kLag < 8);
  int32_t* source_rows = shared.source_rows[warp];
  RowSums<Config> sums(shared, warp);
  RingPosition<Config::kStages> ring;
  uint64_t counts = 0;  // a byte for each stage that is gathered and not added up
  int32_t pending = 0;
  const auto add_up_first = [&] {
    --pending;
    sums.add_up(static_cast<int32_t>(counts >> (8 * pending) & 0xffU));
  };
  uint32_t order = 0;
  for (Item item = await_item(shared, order); item.tile.count > 0;
       item = await_item(shared, ++order)) {
    find_source_rows<Config>(params, source_rows, item.tile);
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
      gather_stage<Config, Product::kUp>(params, source_rows, shared, ring.slot, item.tile, nullptr,
                                         stage, warp);
      ring.advance();
      counts = counts << 8 | static_cast<uint32_t>(item.tile.count);
      if (++pending > kLag) add_up_first();
    }
  }
  while (pending > 0) add_up_first();
  ptx::cp_async_wait_group<0>();
}

// Adds up the down product's rows.
template <class Config>
__device__ __forceinline__ void sum_in_order(const Params& params, SummedStorage<Config>& shared,
                                             int32_t warp) {
  RowSums<Config> sums(shared, warp);
  uint32_t order = 0;
  for (Item item = await_item(shared, order); item.tile.count > 0;
       item = await_item(shared, ++order)) {
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) sums.add_up(item.tile.count);
  }
}

}  // namespace conclave::inline v0::experts::stream
