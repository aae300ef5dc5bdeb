// The epilogue and stores of 16-bit results: bias, activation, rounding, transposition.
#pragma once

#include "activation/device/formulas.cuh"
#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/vector16.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/common/silu_pair.cuh"
#include "experts/cuda/sm90/stream/config.cuh"

namespace conclave::inline v0::experts::stream {

// Says what follows the sums of an up product: most models have paths of their own.
enum class Finish : uint8_t { kAny, kSilu, kBiasedSwiglu };

// A consumer thread's part of an item. Its sums d lie as wgmma leaves them: those of the warp's
// weight row lane / 4 are d[4j] and d[4j + 1], for tokens 8j + 2 (lane % 4) and the next; d[4j + 2]
// and d[4j + 3] are the same for row lane / 4 + 8. With a gate, the two rows are gate and up of one
// feature.
template <class Config>
struct Epilogue {
  using Output = typename Config::Output;
  static constexpr int kSlices = Config::kSlices;

  const Params& params;
  SharedStorage<Config>& shared;
  RingPosition<Config::kStages> ring;
  int32_t warp;  // among the consumers
  int32_t lane;
  int32_t line_half = 0;

  __device__ __forceinline__ Epilogue(const Params& p, SharedStorage<Config>& s)
      : params(p),
        shared(s),
        warp(static_cast<int32_t>(threadIdx.x / 32)),
        lane(static_cast<int32_t>(threadIdx.x % 32)) {}

  __device__ __forceinline__ void release(int32_t slot) {
    if (lane == 0) ptx::mbarrier_arrive(&shared.empty[slot]);
  }

  // Multiplies the sums of rows that are values of codes by their factors.
  template <int N, Product kProduct>
  __device__ __forceinline__ void scale_rows(float (&d)[N / 2], const TokenTile& tile) const {
    if constexpr (Config::kIsCoded) {
      const auto& own = static_cast<const CodedParams&>(params);
      if (own.row_factors == nullptr) return;
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        const int32_t token = i / 2 * 8 + lane % 4 * 2 + i % 2;
        float factor = 1.0F;
        if (token < tile.count) {
          const int32_t sorted = tile.begin + token;
          const int32_t row =
              kProduct == Product::kUp ? params.row_slot[sorted] / params.top_k : sorted;
          factor = own.row_factors[int64_t{row} * own.row_factor_stride];
        }
        const int at = i / 2 * 4 + i % 2;
        d[at] *= factor;
        d[at + 2] *= factor;
      }
    }
  }

  // Multiplies activated values by the factors of their columns: `feature` is that of d[4j], and
  // without a gate that of d[4j + 2] is eight more.
  template <int N>
  __device__ __forceinline__ void scale_columns(float (&d)[N / 2], int32_t expert, int32_t feature,
                                                bool gated) const {
    if constexpr (Config::kIsCoded) {
      const float* factors = static_cast<const CodedParams&>(params).column_factors;
      if (factors == nullptr) return;
      factors += int64_t{expert} * params.features;
      const float first = feature < params.features ? factors[feature] : 1.0F;
      const float second = !gated && feature + 8 < params.features ? factors[feature + 8] : 1.0F;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        d[4 * j] *= first;
        d[4 * j + 1] *= first;
        d[4 * j + 2] *= second;
        d[4 * j + 3] *= second;
      }
    }
  }

  __device__ __forceinline__ bool stores_floats() const {
    if constexpr (Config::kIsCoded) return static_cast<const CodedParams&>(params).stores_floats;
    return false;
  }
  // Stores a row of sums for each of the warp's weight rows that is a feature: the first, and
  // without a gate the one eight below.
  template <int N>
  __device__ __forceinline__ void store_floats(const float (&d)[N / 2], const TokenTile& tile,
                                               int32_t feature, bool gated) const {
    auto* const output = static_cast<float*>(params.output);
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int32_t token = i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (token >= tile.count) continue;
      float* const row = output + int64_t{tile.begin + token} * params.output_stride;
      const int at = i / 2 * 4 + i % 2;
      if (feature < params.features) row[feature] = d[at];
      if (!gated && feature + 8 < params.features) row[feature + 8] = d[at + 2];
    }
  }

  // Multiplies by the slot's weight and adds the bias in one rounding, which equals
  // tile/epilogue.cuh bit for bit.
  template <int N>
  __device__ __forceinline__ void weigh_and_bias(float (&d)[N / 2], const TokenTile& tile,
                                                 float first, float second) const {
    if (params.input_weights == nullptr && params.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int32_t token = i / 2 * 8 + lane % 4 * 2 + i % 2;
      float weight = 1.0F;
      if (params.input_weights != nullptr && token < tile.count) {
        weight = params.input_weights[params.row_slot[tile.begin + token]];
      }
      const int at = i / 2 * 4 + i % 2;
      d[at] = fmaf(d[at], weight, first);
      d[at + 2] = fmaf(d[at + 2], weight, second);
    }
  }

  template <int N>
  __device__ __forceinline__ void add_bias(float (&d)[N / 2], float first, float second) const {
    if (params.bias == nullptr) return;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      d[4 * j] += first;
      d[4 * j + 1] += first;
      d[4 * j + 2] += second;
      d[4 * j + 3] += second;
    }
  }

  // The neighbouring feature of a pair is four lanes away.
  template <int N>
  __device__ __forceinline__ void activate_silu(float (&d)[N / 2]) const {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int at = i / 2 * 4 + i % 2;
      const float own = silu_divisor(d[at]);
      d[at] = silu_beside(d[at], d[at + 2], own, __shfl_xor_sync(0xffffffff, own, 4));
    }
  }

  template <int N>
  __device__ __forceinline__ void activate_swiglu(float (&d)[N / 2]) const {
    const activation::FormulaParameters& p = params.activation.parameters;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      d[4 * j] = activation::device::SwigluOai::apply(d[4 * j], d[4 * j + 2], p);
      d[4 * j + 1] = activation::device::SwigluOai::apply(d[4 * j + 1], d[4 * j + 3], p);
    }
  }

  // The gates d[4j] and d[4j + 1] are replaced by the activation of them and of up, d[4j + 2] and
  // d[4j + 3]; without a gate each sum is by its own. Sums behind those of `count` tokens may stay.
  template <int N>
  __device__ __forceinline__ void activate(float (&d)[N / 2], int32_t count = N) const {
    const activation::DeviceActivation& act = params.activation;
    if (act.gated && act.fused == activation::FusedForm::kSilu) return activate_silu<N>(d);
    if (act.gated && act.fused == activation::FusedForm::kSwigluOai) return activate_swiglu<N>(d);
    // Rare formulas run on a copy in local memory, so that their code exists only once.
    const int32_t step = act.gated ? 4 : 2;
    float copy[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) copy[i] = d[i];
#pragma unroll 1
    for (int32_t at = 0; at < min(count, N) / 2; at = at % 2 == 0 ? at + 1 : at - 1 + step) {
      copy[at] = activation::device::apply(act, act.gated ? copy[at] : 0.0F,
                                           act.gated ? copy[at + 2] : copy[at]);
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = copy[i];
  }

  // Uniform over the grid. A path of its own skips nothing: where code is skipped, fetching the
  // next takes longer than running it.
  __device__ __forceinline__ Finish finish_of_up() const {
    const activation::DeviceActivation& act = params.activation;
    if (!act.gated || !stores_eights() || has_factors() || params.input_weights != nullptr) {
      return Finish::kAny;
    }
    if (params.bias == nullptr) {
      return act.fused == activation::FusedForm::kSilu ? Finish::kSilu : Finish::kAny;
    }
    return act.fused == activation::FusedForm::kSwigluOai ? Finish::kBiasedSwiglu : Finish::kAny;
  }
  // True if results of the down product are its sums, uniform over the grid.
  __device__ __forceinline__ bool stores_sums() const {
    return params.bias == nullptr && stores_eights() && !has_factors();
  }
  __device__ __forceinline__ bool stores_eights() const {
    return params.wide_stores && params.features % 8 == 0;
  }
  __device__ __forceinline__ bool has_factors() const {
    if constexpr (Config::kIsCoded) {
      const auto& own = static_cast<const CodedParams&>(params);
      return own.row_factors != nullptr || own.column_factors != nullptr || own.stores_floats;
    }
    return false;
  }

  // Stores eight features of a row, or fewer at its end; with kWide stores_eights() holds.
  template <bool kWide = false>
  __device__ __forceinline__ void store_eight(int64_t row, int32_t feature, uint4 values) const {
    auto* output = static_cast<Output*>(params.output) + row * params.output_stride + feature;
    if (kWide || (params.wide_stores && feature + 8 <= params.features)) {
      *reinterpret_cast<uint4*>(output) = values;
      return;
    }
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      if (feature + i < params.features) reinterpret_cast<uint16_t*>(output)[i] = bits;
    }
  }

  // Stores eight features of each row of the intermediate, which lie in d[4j] and d[4j + 1].
  template <int N, bool kWide = false>
  __device__ __forceinline__ void store_gated(const float (&d)[N / 2], const TokenTile& tile,
                                              int32_t feature) const {
    const uint32_t scratch = ptx::shared_address(shared.scratch[warp]) + lane * 16;
#pragma unroll
    for (int first = 0; first < N; first += 32) {
      uint32_t packed[4] = {};
#pragma unroll
      for (int j = 0; j < 4 && first + 8 * j < N; ++j) {
        packed[j] = ptx::pack_pair<Output>(d[first / 2 + 4 * j], d[first / 2 + 4 * j + 1]);
      }
      __syncwarp();
      ptx::stmatrix_x4_trans(scratch, packed[0], packed[1], packed[2], packed[3]);
      __syncwarp();
      const int32_t token = first + lane;
      if (token < tile.count && feature < params.features) {
        const uint4 values = *reinterpret_cast<const uint4*>(shared.scratch[warp] + lane * 16);
        store_eight<kWide>(tile.begin + token, feature, values);
      }
    }
  }

  // Stores sixteen features of each row, 16 rows at a time, with two lanes per row. slots[i] is the
  // output row of token 32 i + lane.
  template <int N, bool kWide = false>
  __device__ __forceinline__ void store_plain(const float (&d)[N / 2], int32_t count,
                                              int32_t feature,
                                              const int32_t (&slots)[(N + 31) / 32]) const {
    const uint32_t scratch = ptx::shared_address(shared.scratch[warp]) +
                             (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int first = 0; first < N; first += 16) {
      const int i = first / 2;
      uint32_t packed[4] = {};
      packed[0] = ptx::pack_pair<Output>(d[i], d[i + 1]);
      packed[1] = ptx::pack_pair<Output>(d[i + 2], d[i + 3]);
      if constexpr (N > 8) {
        packed[2] = ptx::pack_pair<Output>(d[i + 4], d[i + 5]);
        packed[3] = ptx::pack_pair<Output>(d[i + 6], d[i + 7]);
      }
      const int32_t slot = __shfl_sync(0xffffffff, slots[first / 32], first % 32 + lane / 2);
      __syncwarp();
      ptx::stmatrix_x4_trans(scratch, packed[0], packed[1], packed[2], packed[3]);
      __syncwarp();
      const int32_t at = feature + lane % 2 * 8;
      if (first + lane / 2 < count && at < params.features) {
        const uint4 values = *reinterpret_cast<const uint4*>(shared.scratch[warp] + lane * 16);
        store_eight<kWide>(slot, at, values);
      }
    }
  }

  static constexpr int kWarpgroup = 128;

  // The half of its warpgroup's lines that this warp may write next: its last readers have passed
  // the barrier since.
  __device__ __forceinline__ uint8_t* next_lines() {
    line_half ^= 1;
    return shared.lines.halves[warp / 4][line_half];
  }
  __device__ __forceinline__ void meet_warpgroup() const {
    ptx::named_barrier_sync(1 + warp / 4, kWarpgroup);
  }

  // Stores 32 features a slice of each row of the intermediate, 32 rows at a time.
  template <int N, bool kWide = false>
  __device__ __forceinline__ void store_gated_lines(const float (&d)[kSlices][N / 2],
                                                    const TokenTile& tile, int32_t feature) {
    constexpr int kRowBytes = 64 * kSlices + 16;
    constexpr int kLanes = 4 * kSlices;  // share a row
#pragma unroll
    for (int first = 0; first < N; first += 32) {
      uint8_t* lines = next_lines();
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        uint32_t packed[4] = {};
#pragma unroll
        for (int j = 0; j < 4 && first + 8 * j < N; ++j) {
          packed[j] =
              ptx::pack_pair<Output>(d[slice][first / 2 + 4 * j], d[slice][first / 2 + 4 * j + 1]);
        }
        ptx::stmatrix_x4_trans(
            ptx::shared_address(lines) + lane * kRowBytes + (slice * 4 + warp % 4) * 16, packed[0],
            packed[1], packed[2], packed[3]);
      }
      meet_warpgroup();
      const auto thread = static_cast<int32_t>(threadIdx.x % kWarpgroup);
#pragma unroll
      for (int32_t row = thread / kLanes; row < 32; row += kWarpgroup / kLanes) {
        const int32_t column = thread % kLanes * 8;
        if (first + row >= tile.count || feature + column >= params.features) continue;
        const uint4 values = *reinterpret_cast<const uint4*>(lines + row * kRowBytes + column * 2);
        store_eight<kWide>(tile.begin + first + row, feature + column, values);
      }
    }
  }

  // Stores 64 features a slice of each row, 16 rows at a time.
  template <int N, bool kWide = false>
  __device__ __forceinline__ void store_plain_lines(const float (&d)[kSlices][N / 2], int32_t count,
                                                    int32_t feature,
                                                    const int32_t (&slots)[(N + 31) / 32]) {
    constexpr int kRowBytes = 128 * kSlices + 16;
    constexpr int kLanes = 8 * kSlices;  // share a row
    constexpr int kRows = kWarpgroup / kLanes;
#pragma unroll
    for (int first = 0; first < N; first += 16) {
      uint8_t* lines = next_lines();
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int i = first / 2;
        uint32_t packed[4] = {};
        packed[0] = ptx::pack_pair<Output>(d[slice][i], d[slice][i + 1]);
        packed[1] = ptx::pack_pair<Output>(d[slice][i + 2], d[slice][i + 3]);
        if (first + 8 < N) {
          packed[2] = ptx::pack_pair<Output>(d[slice][i + 4], d[slice][i + 5]);
          packed[3] = ptx::pack_pair<Output>(d[slice][i + 6], d[slice][i + 7]);
        }
        ptx::stmatrix_x4_trans(ptx::shared_address(lines) + (lane / 16 * 8 + lane % 8) * kRowBytes +
                                   (slice * 8 + warp % 4 * 2 + lane / 8 % 2) * 16,
                               packed[0], packed[1], packed[2], packed[3]);
      }
      meet_warpgroup();
      const auto thread = static_cast<int32_t>(threadIdx.x % kWarpgroup);
      const int32_t column = thread % kLanes * 8;
#pragma unroll
      for (int32_t row = thread / kLanes; row < 16; row += kRows) {
        const int32_t slot = __shfl_sync(0xffffffff, slots[first / 32], first % 32 + row);
        if (first + row >= count || feature + column >= params.features) continue;
        const uint4 values = *reinterpret_cast<const uint4*>(lines + row * kRowBytes + column * 2);
        store_eight<kWide>(slot, feature + column, values);
      }
    }
  }

  __device__ __forceinline__ float bias_of(int64_t index, int32_t feature) const {
    return params.bias != nullptr && feature < params.features ? params.bias[index] : 0.0F;
  }

  // The first feature of this warp in a slice; a warp has 8 features of a slice with a gate, 16
  // without.
  __device__ __forceinline__ int32_t first_feature(int32_t feature_tile, int slice,
                                                   int32_t features_of_warp) const {
    const int32_t slices = Config::kConsumers * kSlices;
    const int32_t warps = (feature_tile * slices + warp / 4 * kSlices + slice) * 4 + warp % 4;
    return warps * features_of_warp;
  }

  // The first feature of this warpgroup, for whole lines.
  __device__ __forceinline__ int32_t first_of_group(int32_t feature_tile,
                                                    int32_t features_of_warp) const {
    return (feature_tile * Config::kConsumers + warp / 4) * kSlices * 4 * features_of_warp;
  }

  // Sets slots[i] to the output row of token 32 i + lane.
  template <int N, Product kProduct>
  __device__ __forceinline__ void find_slots(const TokenTile& tile,
                                             int32_t (&slots)[(N + 31) / 32]) const {
#pragma unroll
    for (int i = 0; i < (N + 31) / 32; ++i) {
      const int32_t token = 32 * i + lane;
      slots[i] = 0;
      if (token < tile.count) {
        slots[i] =
            kProduct == Product::kDown ? params.row_slot[tile.begin + token] : tile.begin + token;
      }
    }
  }
};

}  // namespace conclave::inline v0::experts::stream
