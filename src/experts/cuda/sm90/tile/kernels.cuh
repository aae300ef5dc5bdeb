// The kernels that are built for each type of weights.
#pragma once

#include "experts/cuda/sm90/tile/tile.cuh"

#include <array>

namespace conclave::inline v0::experts::tile {

template <class Config>
constexpr Kernel built() {
  return {Config::kProduct,
          Config::kFormulas,
          Config::kShape,
          tile_product<Config>,
          sizeof(SharedStorage<Config>),
          Config::kThreads,
          Config::kBoxFeatures};
}

// Four stages of 48 KiB, and 32 KiB of staging rows: 224 of 227 KiB.
inline constexpr Shape kWide = {128, 256, 4, 1};
inline constexpr Shape kWidePair = {128, 256, 4, 2};
inline constexpr Shape kWideGather = {128, 256, 4, 1, true};
// For widths that items of 256 features cover badly, such as 2880.
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
    built<Config<T, Product::kUpPlain, kNarrow, Formulas::kAll>>(),
    built<Config<T, Product::kDown, kWide>>(),
    built<Config<T, Product::kDown, kWidePair>>(),
    built<Config<T, Product::kDown, kMedium>>(),
    built<Config<T, Product::kDown, kMediumPair>>(),
    built<Config<T, Product::kDownSums, kWide>>(),
    built<Config<T, Product::kDownSums, kWidePair>>(),
    built<Config<T, Product::kDownSums, kMedium>>(),
    built<Config<T, Product::kDownSums, kMediumPair>>(),
};

}  // namespace conclave::inline v0::experts::tile
