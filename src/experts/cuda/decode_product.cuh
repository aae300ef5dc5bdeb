// One box of weights times one box of rows.
#pragma once

#include "cuda/device/copy.cuh"
#include "experts/cuda/decode_config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

struct Fragment {
  uint4 half[2];  // 16 bytes of K from each half of the box
};

// float32 sums of kRows / 16 products. 16-bit weights: two chains, so that products overlap.
template <class C, int kProducts>
struct Sums {
  float chain[kProducts][C::kIsE4M3 ? 1 : 2][4] = {};

  __device__ float get(int product, int i) const {
    if constexpr (C::kIsE4M3)
      return chain[product][0][i];
    else
      return chain[product][0][i] + chain[product][1][i];
  }
};

// What a box's sums are multiplied by: scales of the weight rows' two halves and of two tokens.
template <int kProducts>
struct BoxScales {
  float rows[kProducts][2];
  float tokens[2];
};

template <class C, int kProducts>
__device__ __forceinline__ void multiply_box(uint32_t address, const Fragment& b,
                                             const BoxScales<kProducts>& scales,
                                             Sums<C, kProducts>& sums) {
#pragma unroll
  for (int product = 0; product < kProducts; ++product) {
    float partial[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = (address + static_cast<uint32_t>(product) * kTileBytes) ^
                             static_cast<uint32_t>(half * 64);
      const uint4 low = ptx::load_shared(place);
      const uint4 high = ptx::load_shared(place + 1024);
      const uint4 x = b.half[half];
      if constexpr (C::kIsE4M3) {
        C::multiply(partial, low.x, high.x, low.y, high.y, x.x, x.y);
        C::multiply(partial, low.z, high.z, low.w, high.w, x.z, x.w);
      } else {
        C::multiply(sums.chain[product][half], low.x, high.x, low.y, high.y, x.x, x.y);
        C::multiply(sums.chain[product][half], low.z, high.z, low.w, high.w, x.z, x.w);
      }
    }
    if constexpr (C::kIsE4M3) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale =
            C::kBlockScales ? scales.rows[product][i / 2] * scales.tokens[i % 2] : 1.0F;
        sums.chain[product][0][i] = fmaf(partial[i], scale, sums.chain[product][0][i]);
      }
    }
  }
}

}  // namespace conclave::inline v0::experts::decode
