// Sums and orders over a warp. Sums add neighbours first, in the same way in every lane, so that
// all lanes hold the same bits.
#pragma once

#include <cstdint>

namespace conclave::inline v0::routing::device {

inline constexpr uint32_t kFullWarp = 0xffffffffU;

__device__ __forceinline__ int32_t lane_id() { return static_cast<int32_t>(threadIdx.x % 32); }

// lane_id() / lanes for a power of two; a division by a non-constant takes a hundred cycles.
__device__ __forceinline__ int32_t run_of_lanes(int32_t lanes) {
  return lane_id() >> (31 - __clz(lanes));
}

// Sums over aligned runs of `lanes` lanes, a power of two.
__device__ __forceinline__ double warp_sum(double value, int32_t lanes = 32) {
  for (int32_t step = 1; step < lanes; step *= 2) {
    value += __shfl_xor_sync(kFullWarp, value, step);
  }
  return value;
}
__device__ __forceinline__ double warp_max(double value, int32_t lanes = 32) {
  for (int32_t step = 1; step < lanes; step *= 2) {
    const double other = __shfl_xor_sync(kFullWarp, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// Maps values to integers of the same order, -0 to that of 0; 0 is below all of them. Not for NaN.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0F));
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
__device__ __forceinline__ float value_of(uint32_t ordered_key) {
  const bool positive = (ordered_key & 0x80000000U) != 0;
  return __uint_as_float(positive ? ordered_key ^ 0x80000000U : ~ordered_key);
}
__device__ __forceinline__ uint64_t ordered(double value) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(__dadd_rn(value, 0.0)));
  constexpr uint64_t kSign = uint64_t{1} << 63;
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}
inline constexpr uint32_t kOrderedAbsent32 = 0x007fffffU;  // the key of -inf
inline constexpr uint64_t kOrderedAbsent64 = 0x000fffffffffffffU;

__device__ __forceinline__ uint32_t warp_max_key(uint32_t key) {
  return __reduce_max_sync(kFullWarp, key);
}
__device__ __forceinline__ uint64_t warp_max_key(uint64_t key) {
  const auto high = static_cast<uint32_t>(key >> 32);
  const uint32_t top = __reduce_max_sync(kFullWarp, high);
  const uint32_t low = __reduce_max_sync(kFullWarp, high == top ? static_cast<uint32_t>(key) : 0U);
  return uint64_t{top} << 32 | low;
}

template <class Key>
struct Chosen {
  int32_t column;
  Key key;
};

// The largest of keys [kBegin, kEnd), ties to the lower column. Halving takes fewer dependent steps
// than a scan.
template <int kBegin, int kEnd, class Key, int kColumns>
__device__ __forceinline__ Chosen<Key> best_column(const Key (&keys)[kColumns]) {
  if constexpr (kEnd - kBegin == 1) {
    return {kBegin, keys[kBegin]};
  } else {
    constexpr int kMiddle = (kBegin + kEnd) / 2;
    const Chosen<Key> left = best_column<kBegin, kMiddle>(keys);
    const Chosen<Key> right = best_column<kMiddle, kEnd>(keys);
    return right.key > left.key ? right : left;
  }
}

// A lane's columns are adjacent, so that it loads them at once.
template <int kColumns>
__device__ __forceinline__ int32_t column_of(int i) {
  return lane_id() * kColumns + i;
}

// Selects the k best of the warp's columns: lane j gets the j-th best, ties to the lower column.
// Consumes the keys, of which at least k must be above 0.
template <class Key, int kColumns>
__device__ __forceinline__ Chosen<Key> select_best(Key (&keys)[kColumns], int32_t top_k) {
  Chosen<Key> own{-1, 0};
  for (int32_t slot = 0; slot < top_k; ++slot) {
    const auto [at, best] = best_column<0, kColumns>(keys);
    const Key top = warp_max_key(best);
    const auto column = best == top ? static_cast<uint32_t>(column_of<kColumns>(at)) : 0xffffffffU;
    const uint32_t winner = __reduce_min_sync(kFullWarp, column);
    if (lane_id() == slot) own = {static_cast<int32_t>(winner), top};
    const int32_t used = column == winner ? at : -1;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i == used) keys[i] = 0;
    }
  }
  return own;
}

// Sorts in descending order by Batcher's exchanges; kCount is a power of two.
template <int kCount>
__device__ __forceinline__ void sort_descending(uint32_t (&values)[kCount]) {
#pragma unroll
  for (int size = 1; size < kCount; size *= 2) {
#pragma unroll
    for (int step = size; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int other = i + step;
        const int start = step == size ? 0 : step;
        const bool paired = i >= start && other < kCount && (i - start) % (2 * step) < step &&
                            i / (2 * size) == other / (2 * size);
        if (!paired) continue;
        const uint32_t high = max(values[i], values[other]);
        values[other] = min(values[i], values[other]);
        values[i] = high;
      }
    }
  }
}

}  // namespace conclave::inline v0::routing::device
