#include "quant/gguf/grids.h"

#include "quant/gguf/grid_points.h"

#include <array>
#include <cstddef>

namespace conclave::inline v0::quant {
namespace {

// Replaces each field of a packed point by the value that it numbers.
template <size_t kElements, size_t kPoints, size_t kValues>
constexpr auto unpack(const uint16_t (&points)[kPoints],
                      const std::array<int8_t, kValues>& values) {
  constexpr size_t kBits = 16 / kElements == 2 ? 2 : 3;
  std::array<std::array<int8_t, kElements>, kPoints> grid{};
  for (size_t point = 0; point < kPoints; ++point) {
    for (size_t i = 0; i < kElements; ++i) {
      grid[point][i] = values[points[point] >> (kBits * i) & ((1U << kBits) - 1)];
    }
  }
  return grid;
}

constexpr std::array<int8_t, 3> kTernary = {-1, 0, 1};
constexpr std::array<int8_t, 3> kIq2Values = {8, 25, 43};
constexpr std::array<int8_t, 8> kIq3XxsValues = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr std::array<int8_t, 8> kIq3SValues = {1, 3, 5, 7, 9, 11, 13, 15};

constexpr auto kIq1 = unpack<8>(grid_points::kIq1, kTernary);
constexpr auto kIq2Xxs = unpack<8>(grid_points::kIq2Xxs, kIq2Values);
constexpr auto kIq2Xs = unpack<8>(grid_points::kIq2Xs, kIq2Values);
constexpr auto kIq2S = unpack<8>(grid_points::kIq2S, kIq2Values);
constexpr auto kIq3Xxs = unpack<4>(grid_points::kIq3Xxs, kIq3XxsValues);
constexpr auto kIq3S = unpack<4>(grid_points::kIq3S, kIq3SValues);

}  // namespace

const int8_t* grid_iq1(int index) noexcept { return kIq1[static_cast<size_t>(index)].data(); }
const int8_t* grid_iq2_xxs(int index) noexcept {
  return kIq2Xxs[static_cast<size_t>(index)].data();
}
const int8_t* grid_iq2_xs(int index) noexcept { return kIq2Xs[static_cast<size_t>(index)].data(); }
const int8_t* grid_iq2_s(int index) noexcept { return kIq2S[static_cast<size_t>(index)].data(); }
const int8_t* grid_iq3_xxs(int index) noexcept {
  return kIq3Xxs[static_cast<size_t>(index)].data();
}
const int8_t* grid_iq3_s(int index) noexcept { return kIq3S[static_cast<size_t>(index)].data(); }

}  // namespace conclave::inline v0::quant
