// Finds the best of a warp's columns by one reduction each: a key gives up its lowest bits to the
// number of its column. If those bits would decide, the exact keys are compared instead.
#pragma once

#include "routing/cuda/warp.cuh"

#include <cstdint>

namespace conclave::inline v0::routing::device {

// True if each of the `count` lanes has a key at least as large as the next lane's.
__device__ __forceinline__ bool in_order(const Chosen<uint32_t>& own, int32_t count) {
  const uint32_t next = __shfl_down_sync(kFullWarp, own.key, 1);
  return __all_sync(kFullWarp, lane_id() + 1 >= count || own.key >= next);
}

static __device__ __noinline__ Chosen<uint32_t> put_in_order(Chosen<uint32_t> own, int32_t count) {
  int32_t rank = 0;
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t key = __shfl_sync(kFullWarp, own.key, i);
    const int32_t column = __shfl_sync(kFullWarp, own.column, i);
    rank += key > own.key || (key == own.key && column < own.column) ? 1 : 0;
  }
  Chosen<uint32_t> result{-1, 0};
  for (int32_t i = 0; i < count; ++i) {
    const int32_t place = __shfl_sync(kFullWarp, rank, i);
    const uint32_t key = __shfl_sync(kFullWarp, own.key, i);
    const int32_t column = __shfl_sync(kFullWarp, own.column, i);
    if (lane_id() == place) result = {column, key};
  }
  return result;
}

template <int kColumns>
struct ExactKeys {
  uint32_t of[kColumns];
};
template <int kColumns>
static __device__ __noinline__ Chosen<uint32_t> select_exact(ExactKeys<kColumns> keys,
                                                             int32_t count) {
  return select_best(keys.of, count);
}

// Works as select_best for `count` columns, which must be all columns or more than top_k. Keys of
// columns beyond the last are 0, all others are at least kOrderedAbsent32.
template <int kColumns>
__device__ __forceinline__ Chosen<uint32_t> select_candidates(const ExactKeys<kColumns>& keys,
                                                              int32_t top_k, int32_t count,
                                                              int32_t num_columns) {
  constexpr uint32_t kColumnBits = 32 * kColumns - 1;
  uint32_t packed[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const uint32_t column = kColumnBits - static_cast<uint32_t>(column_of<kColumns>(i));
    packed[i] = (keys.of[i] & ~kColumnBits) | column;
  }
  sort_descending(packed);
  uint32_t own = 0;
#pragma unroll 1
  for (int32_t slot = 0; slot < count; ++slot) {
    const uint32_t top = warp_max_key(packed[0]);
    if (lane_id() == slot) own = top;
    const bool used = packed[0] == top;
#pragma unroll
    for (int i = 0; i + 1 < kColumns; ++i) packed[i] = used ? packed[i + 1] : packed[i];
    if (used) packed[kColumns - 1] = 0;
  }
  const uint32_t column = kColumnBits - (own & kColumnBits);
  const uint32_t chosen = __shfl_sync(kFullWarp, own, top_k - 1);
  const uint32_t spare = __shfl_sync(kFullWarp, own, count - 1);
  if (count < num_columns && (chosen & ~kColumnBits) == (spare & ~kColumnBits)) {
    return select_exact(keys, count);
  }
  Chosen<uint32_t> result{static_cast<int32_t>(column), 0};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const uint32_t key =
        __shfl_sync(kFullWarp, keys.of[i], static_cast<int>(column / uint32_t{kColumns}));
    if (column % uint32_t{kColumns} == static_cast<uint32_t>(i)) result.key = key;
  }
  if (lane_id() >= count) result = {-1, 0};
  return in_order(result, count) ? result : put_in_order(result, count);
}

}  // namespace conclave::inline v0::routing::device
