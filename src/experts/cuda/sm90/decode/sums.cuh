// A warp's products are added up in these.
#pragma once

#include "experts/cuda/sm90/codes_in_order.cuh"
#include "experts/cuda/sm90/decode/config.cuh"

namespace conclave::inline v0::experts::decode {

// Sums of products of 16 rows, float32 or exact; [i]: row half i / 2, token 2q + i % 2. Some have
// two chains, so that products overlap.
template <class Config, int kProducts>
struct Sums {
  static constexpr bool kOverlaps =
      Config::kIsCoded ? Config::kCodes.exact && kProducts == 1 : !Config::kIsByte;
  static constexpr int kChains = kOverlaps ? 2 : 1;
  typename Config::Sum chain[kProducts][kChains][4] = {};

  __device__ __forceinline__ float get(int product, int i) const {
    if constexpr (Config::kCodes.in_order) return chain[product][0][i] * CodesInOrder::kUnit;
    if constexpr (Config::kIsInteger) return static_cast<float>(chain[product][0][i]);
    return kChains == 1 ? chain[product][0][i]
                        : chain[product][0][i] + chain[product][kChains - 1][i];
  }
};

}  // namespace conclave::inline v0::experts::decode
