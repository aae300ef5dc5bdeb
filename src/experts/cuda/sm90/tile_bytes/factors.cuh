// Scales and biases of an item, which are copied to shared memory while its products run: the sums
// leave no registers for them, and loads behind the products would be waited for one by one.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "experts/cuda/sm90/tile_bytes/config.cuh"

namespace conclave::inline v0::experts::tile_bytes {

template <class Config>
struct ItemFactors {
  static constexpr int kThreads = 128;  // a warpgroup
  static constexpr bool kHasRows = !Config::kBlockScales;
  static constexpr bool kHasColumns = kHasRows && !Config::kHasLanes;

  const Params& params;
  FactorStorage& storage;  // the warpgroup has one of its own
  int32_t warpgroup;

  __device__ __forceinline__ ItemFactors(const Params& p, FactorStorage& s, int32_t group)
      : params(p), storage(s), warpgroup(group) {}

  __device__ __forceinline__ bool has_any() const { return kHasRows || params.bias != nullptr; }

  __device__ __forceinline__ void meet() const { ptx::named_barrier_sync(1 + warpgroup, kThreads); }

  // Begins the copies for an item. The barrier is there since warps may still read those of the
  // item before.
  __device__ __forceinline__ void fetch(const Item& item) const {
    if (!has_any()) return;
    meet();
    constexpr bool kGated = Config::kProduct == Product::kUpGated;
    const auto thread = static_cast<int32_t>(threadIdx.x) % kThreads;
#pragma unroll
    for (int32_t column = thread; column < Config::kWeightRows; column += kThreads) {
      // A chunk of a gated item has 8 columns of gate, then 8 of up, and so on.
      const bool is_up = kGated && column / 8 % 2 == 1;
      const int32_t feature =
          item.feature_tile * Config::kFeatures + (kGated ? column / 16 * 8 + column % 8 : column);
      const bool valid = feature < params.features;
      if constexpr (kHasColumns) {
        const float* const scales = params.weight_scales + item.expert * params.expert_scale_stride;
        copy(storage.scales[column], scales + (is_up ? params.half_scale_stride : 0) + feature,
             valid, params.weight_scales);
      }
      if (params.bias != nullptr) {
        const float* const biases =
            params.bias + int64_t{item.expert} * params.features * (kGated ? 2 : 1);
        copy(storage.biases[column], biases + (is_up ? params.features : 0) + feature, valid,
             params.bias);
      }
    }
    if constexpr (kHasRows) {
      if (params.constant_scale == nullptr && thread < 64) {
        const int32_t row = warpgroup * 64 + thread;
        copy(storage.rows[thread], params.row_scales + item.begin + row, row < item.count,
             params.row_scales);
      }
    }
    ptx::cp_async_commit_group();
  }

  // Waits for what fetch() began.
  __device__ __forceinline__ void await() const {
    if (!has_any()) return;
    ptx::cp_async_wait_group<0>();
    meet();
  }

  // Those of accumulator pair j of chunk c.
  __device__ __forceinline__ float2 scales(int c, int j) const {
    return *reinterpret_cast<const float2*>(storage.scales + column_of(c, j));
  }
  __device__ __forceinline__ float2 biases(int c, int j) const {
    return *reinterpret_cast<const float2*>(storage.biases + column_of(c, j));
  }
  // `row` is one of the item's.
  __device__ __forceinline__ float row_scale(int32_t row) const {
    if constexpr (!kHasRows) return 1;
    return params.constant_scale != nullptr ? *params.constant_scale : storage.rows[row % 64];
  }

 private:
  static __device__ __forceinline__ int column_of(int c, int j) {
    return c * 128 + j * 8 + 2 * (static_cast<int32_t>(threadIdx.x) % 4);
  }
  // Writes 0 for what lies beyond an end.
  static __device__ __forceinline__ void copy(float& destination, const float* source, bool valid,
                                              const float* begin) {
    ptx::cp_async_4(ptx::shared_address(&destination), valid ? source : begin, valid);
  }
};

}  // namespace conclave::inline v0::experts::tile_bytes
