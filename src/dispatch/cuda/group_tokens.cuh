// Groups few tokens in the kernel that has chosen their experts, which differ within a token: one
// bit per token marks who chose an expert, and the bits give counts and ranks. Runs in one block or
// one cluster, with up to 32 tokens per block.
#pragma once

#include "dispatch/cuda/group_slots.cuh"

#include <cstdint>

namespace conclave::inline v0::dispatch::device {

// Lies in group_tokens_shared_bytes() of shared memory.
struct TokenShared {
  uint32_t* tokens;  // [blocks, E]: one bit per token of a block, written by that block
  uint32_t* rows;    // [E]: first row of this block
};

__device__ __forceinline__ TokenShared carve_token_shared(void* memory, int32_t experts,
                                                          uint32_t blocks) {
  auto* words = static_cast<uint32_t*>(memory);
  return {words, words + blocks * static_cast<uint32_t>(experts)};
}
// Must run before a barrier of the cluster.
__device__ __forceinline__ void clear_token_shared(const TokenShared& shared, int32_t experts,
                                                   uint32_t blocks) {
  const uint32_t words = blocks * static_cast<uint32_t>(experts);
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) shared.tokens[i] = 0;
}

__device__ __forceinline__ uint32_t* own_tokens(const GroupParams& params,
                                                const TokenShared& shared) {
  return shared.tokens + blockIdx.x * static_cast<uint32_t>(params.num_local_experts);
}

// Adds one choice of a token; returns its local expert, or -1.
__device__ __forceinline__ int32_t add_choice(const GroupParams& params, const TokenShared& shared,
                                              uint32_t token_bit, int32_t id) {
  const int32_t expert = local_expert_of(params, id);
  if (expert >= 0) atomicOr(own_tokens(params, shared) + expert, token_bit);
  if (params.expert_load != nullptr && id >= 0 && id < params.num_counted) {
    atomicAdd(params.expert_load + id, 1ULL);
  }
  return expert;
}

// Tells the other blocks of the cluster. Runs between a barrier of the block and one of the
// cluster.
__device__ __forceinline__ void tell_choices(const GroupParams& params, const TokenShared& shared) {
  uint32_t* own = own_tokens(params, shared);
  for (auto e = static_cast<int32_t>(threadIdx.x); e < params.num_local_experts;
       e += static_cast<int32_t>(blockDim.x)) {
    const uint32_t tokens = own[e];
#pragma unroll 4
    for (uint32_t b = 0; b < gridDim.x; ++b) {
      if (b != blockIdx.x) cuda::device::store_shared_cluster(own + e, tokens, b);
    }
  }
}

// Rows in the low half of a word and tiles in the high half, so that one scan sums both.
inline constexpr uint32_t kTileUnit = 1U << 16;

// Sum over the threads before this one; `all` receives the sum over the block.
__device__ __forceinline__ uint32_t scan_packed(uint32_t own, uint32_t* warp_sums, uint32_t& all) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t sum = own;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  const uint32_t warp = lane < blockDim.x / 32 ? warp_sums[lane] : 0;
  const uint32_t before = __reduce_add_sync(kFullWarp, lane < threadIdx.x / 32 ? warp : 0U);
  all = __reduce_add_sync(kFullWarp, warp);
  return before + sum - own;
}

// Computes where each expert's rows begin, one thread per expert, after all choices were added.
// Contains a barrier after shared.rows is written.
__device__ __forceinline__ void place_choices(const GroupParams& params, const TokenShared& shared,
                                              uint32_t block, uint32_t blocks) {
  __shared__ uint32_t warp_sums[32];
  const auto expert = static_cast<int32_t>(threadIdx.x);
  const bool valid = expert < params.num_local_experts;
  uint32_t count = 0;
  uint32_t before = 0;
#pragma unroll 8
  for (uint32_t b = 0; b < blocks; ++b) {
    const uint32_t at = b * static_cast<uint32_t>(params.num_local_experts) + threadIdx.x;
    const uint32_t bits = valid ? shared.tokens[at] : 0;
    count += static_cast<uint32_t>(__popc(bits));
    before += b < block ? static_cast<uint32_t>(__popc(bits)) : 0;
  }
  TileCut cut = plain_cut(params);
  uint32_t tiles = cut.tiles(count);
  uint32_t all = 0;
  uint32_t sum = scan_packed(count + tiles * kTileUnit, warp_sums, all);
  if (is_skewed(params, all / kTileUnit)) {
    cut = skewed_cut(params);
    tiles = cut.tiles(count);
    __syncthreads();  // the sums of warps have been read
    sum = scan_packed(count + tiles * kTileUnit, warp_sums, all);
  }
  const uint32_t tile = cut.tokens;
  const uint32_t begin = sum % kTileUnit;
  if (valid) shared.rows[expert] = begin + before;
  __syncthreads();
  if (!valid) return;
  for (uint32_t t = block; t < tiles; t += blocks) {
    const uint32_t left = count - t * tile;
    const int4 value = make_int4(expert, static_cast<int>(begin + t * tile),
                                 static_cast<int>(left < tile ? left : tile), 0);
    *reinterpret_cast<int4*>(params.tiles + sum / kTileUnit + t) = value;
  }
  if (block != 0) return;
  params.expert_begin[expert] = static_cast<int32_t>(begin);
  if (threadIdx.x != 0) return;
  params.expert_begin[params.num_local_experts] = static_cast<int32_t>(all % kTileUnit);
  store_tile_numbers(params, cut, all / kTileUnit);
}

__device__ __forceinline__ void store_choice(const GroupParams& params, const TokenShared& shared,
                                             uint32_t token_bit, int32_t expert, int32_t slot) {
  if (expert < 0) {
    params.slot_row[slot] = -1;
    return;
  }
  const uint32_t earlier = own_tokens(params, shared)[expert] & (token_bit - 1);
  const uint32_t row = shared.rows[expert] + static_cast<uint32_t>(__popc(earlier));
  params.row_slot[row] = slot;
  params.slot_row[slot] = static_cast<int32_t>(row);
}

}  // namespace conclave::inline v0::dispatch::device
