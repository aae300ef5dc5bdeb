// The kernels of tile_sm90 that are built for each type of weights.
#pragma once

#include "experts/cuda/sm90/tile/tile.cuh"

#include <array>

namespace conclave::inline v0::experts::tile_sm90 {

template <class C>
constexpr Kernel built() {
  return {C::kProduct, C::kFormulas,   C::kShape, tile_product<C>, sizeof(SharedStorage<C>),
          C::kThreads, C::kBoxFeatures};
}

// Four stages of 48 KiB, and 32 KiB of staging rows: 224 of 227 KiB.
inline constexpr Shape kWide = {128, 256, 4, 1};
inline constexpr Shape kWidePair = {128, 256, 4, 2};
inline constexpr Shape kWideGather = {128, 256, 4, 1, true};
// For widths that tiles of 256 cover badly, such as 2880.
inline constexpr Shape kMedium = {128, 192, 4, 1};
inline constexpr Shape kMediumPair = {128, 192, 4, 2};
// For all formulas without a gate: with more sums per thread, the code of some spills.
inline constexpr Shape kNarrow = {128, 128, 6, 1, true};

template <class T>
inline constexpr std::array kKernelsOf = {
    built<Config<T, Product::kUpGated, kWide>>(),
    built<Config<T, Product::kUpGated, kWidePair>>(),
    built<Config<T, Product::kUpGated, kWideGather>>(),
    built<Config<T, Product::kUpGated, kWideGather, Formulas::kAll>>(),
    built<Config<T, Product::kUp, kNarrow, Formulas::kAll>>(),
    built<Config<T, Product::kDown, kWide>>(),
    built<Config<T, Product::kDown, kWidePair>>(),
    built<Config<T, Product::kDown, kMedium>>(),
    built<Config<T, Product::kDown, kMediumPair>>(),
    built<Config<T, Product::kDownSums, kWide>>(),
    built<Config<T, Product::kDownSums, kWidePair>>(),
    built<Config<T, Product::kDownSums, kMedium>>(),
    built<Config<T, Product::kDownSums, kMediumPair>>(),
};

}  // namespace conclave::inline v0::experts::tile_sm90
