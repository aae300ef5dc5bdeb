// The kernels that are built for a type of weights.
#pragma once

#include "experts/cuda/tile_sm90.cuh"

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
inline constexpr Shape kWidePairGather = {128, 256, 4, 2, true};
// Three warpgroups: experts of 129 to 192 rows then load their weights once.
inline constexpr Shape kTall = {192, 192, 4, 1};
inline constexpr Shape kTallPair = {192, 192, 4, 2};
// For widths that 256 divides badly (2880).
inline constexpr Shape kMedium = {128, 192, 4, 1};
inline constexpr Shape kMediumPair = {128, 192, 4, 2};
// For all formulas without a gate: with more sums a thread, the code of some spills.
inline constexpr Shape kNarrow = {128, 128, 6, 1, true};

template <class T>
inline constexpr std::array kKernelsOf = {
    built<Config<T, Product::kUpGated, kWide>>(),
    built<Config<T, Product::kUpGated, kWidePair>>(),
    built<Config<T, Product::kUpGated, kWideGather>>(),
    built<Config<T, Product::kUpGated, kWidePairGather>>(),
    built<Config<T, Product::kUpGated, kWideGather, Formulas::kAll>>(),
    built<Config<T, Product::kUp, kNarrow, Formulas::kAll>>(),
    built<Config<T, Product::kUpGated, kTall>>(),
    built<Config<T, Product::kUpGated, kTallPair>>(),
    built<Config<T, Product::kDown, kTall>>(),
    built<Config<T, Product::kDown, kTallPair>>(),
    built<Config<T, Product::kDown, kWide>>(),
    built<Config<T, Product::kDown, kWidePair>>(),
    built<Config<T, Product::kDown, kMedium>>(),
    built<Config<T, Product::kDown, kMediumPair>>(),
    built<Config<T, Product::kDownSums, kTall>>(),
    built<Config<T, Product::kDownSums, kTallPair>>(),
    built<Config<T, Product::kDownSums, kWide>>(),
    built<Config<T, Product::kDownSums, kWidePair>>(),
    built<Config<T, Product::kDownSums, kMedium>>(),
    built<Config<T, Product::kDownSums, kMediumPair>>(),
};

}  // namespace conclave::inline v0::experts::tile_sm90
