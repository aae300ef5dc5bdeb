// Numbers of groups become rows of a panel by vectors: squares of float32 are transposed, and take
// the form that the plane has. Whatever has none is left to pack_numbers, which says what it is.
#pragma once

#include "gemm/cpu/simd-inl.h"
#include "gemm/cpu/unit_steps-inl.h"
#include "gemm/panel_scales.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Numbers of neighbouring columns, transposed: those of up to 16 groups.
template <class Square>
struct NumberTile {
  using Ints = typename Square::Ints;
  Ints rows[kTileGroups];

  // `none` stands for a column that does not exist, and repeats its number for every group.
  CONCLAVE_KERNEL_INLINE void load(const float* const* columns, int64_t first_group, int count,
                                   const float* none) {
    constexpr int kSize = Square::kSize;
#pragma GCC unroll 2
    for (int part = 0; part < kTileGroups; part += kSize) {
      if (part >= count) return;
      const int rest = count - part < kSize ? count - part : kSize;
      Square square;
#pragma GCC unroll 16
      for (int i = 0; i < kSize; ++i) {
        const float* const numbers = columns[i] != nullptr ? columns[i] + first_group + part : none;
        square.load(i, reinterpret_cast<const std::byte*>(numbers), rest);
      }
      square.transpose();
#pragma GCC unroll 16
      for (int i = 0; i < kSize; ++i) rows[part + i] = reinterpret_cast<Ints>(square.rows[i]);
    }
  }
};

// Writes numbers of one group and returns lanes that are not 0 for those without a form. NaN has
// none.
template <class Square, ScaleValues kValues>
CONCLAVE_KERNEL_INLINE auto put_numbers(typename Square::Ints bits, std::byte* to) {
  using Ints = typename Square::Ints;
  if constexpr (kValues == ScaleValues::kPowerOfTwo) {
    constexpr int kLeast = 0x00400000;  // 2^-127, which is subnormal
    const Ints code = bits >> 23;
    Square::store_bytes(reinterpret_cast<typename Square::Vector>(code), to);
    const Ints is_power = ((bits & 0x007fffff) == 0) & (code > 0) & (code < 255);
    return Ints(~(is_power | (bits == kLeast)));
  } else if constexpr (kValues == ScaleValues::kF16) {
    const Ints back = reinterpret_cast<Ints>(
        Square::store_f16(reinterpret_cast<typename Square::Vector>(bits), to));
    return Ints((back != bits) | ((bits & 0x7fffffff) > 0x7f800000));
  } else {
    __builtin_memcpy(to, &bits, sizeof(bits));
    return Ints{};
  }
}

CONCLAVE_KERNEL_INLINE int groups_of_tile(const NumberPlane& plane, int64_t first) {
  const int64_t left = plane.groups - first;
  return left < kTileGroups ? static_cast<int>(left) : kTileGroups;
}

template <class Square, ScaleValues kValues>
CONCLAVE_KERNEL_INLINE bool pack_rows(const NumberPlane& plane, const float* const* columns,
                                      std::byte* packed) {
  constexpr bool kInPowers = kValues == ScaleValues::kPowerOfTwo;
  float none[kTileGroups];
  for (float& number : none) number = kInPowers ? 0x1p-127F : 0.0F;
  const int64_t bytes = plane.number_bytes();
  for (int64_t group = 0; group < plane.groups; group += kTileGroups) {
    const int count = groups_of_tile(plane, group);
    typename Square::Ints unfit{};
    for (int column = 0; column < kPanelColumns; column += Square::kSize) {
      NumberTile<Square> tile;
      tile.load(columns + column, group, count, none);
      std::byte* const to = packed + (group * kPanelColumns + column) * bytes;
      for (int i = 0; i < count; ++i) {
        unfit |= put_numbers<Square, kValues>(tile.rows[i], to + i * kPanelColumns * bytes);
      }
    }
    if (Square::any(reinterpret_cast<typename Square::Vector>(unfit))) return false;
  }
  return true;
}

// Units begin with a tile or within it: `plane.unit_groups` divides 16.
template <class Square>
CONCLAVE_KERNEL_INLINE bool pack_step_rows(const NumberPlane& plane, const float* const* columns,
                                           std::byte* packed) {
  constexpr float kNone[kTileGroups] = {};
  const int in_units = static_cast<int>(plane.unit_groups);
  std::byte* const units = packed + plane.units_at();
  for (int64_t group = 0; group < plane.groups; group += kTileGroups) {
    const int count = groups_of_tile(plane, group);
    typename Square::Ints unfit{};
    for (int column = 0; column < kPanelColumns; column += kTogether * Square::kSize) {
      NumberTile<Square> tiles[kTogether];
      for (int j = 0; j < kTogether; ++j) {
        tiles[j].load(columns + column + j * Square::kSize, group, count, kNone);
      }
      for (int first = 0; first < count; first += in_units) {
        const typename Square::Ints* numbers[kTogether];
        for (int j = 0; j < kTogether; ++j) numbers[j] = tiles[j].rows + first;
        const int64_t unit = (group + first) / in_units * kPanelColumns + column;
        unfit |= put_steps<Square>(numbers, count - first < in_units ? count - first : in_units,
                                   packed + (group + first) * kPanelColumns + column,
                                   units + unit * int64_t{sizeof(float)});
      }
    }
    if (Square::any(reinterpret_cast<typename Square::Vector>(unfit))) return false;
  }
  return true;
}

// A NumbersFunction.
template <class Square>
CONCLAVE_KERNEL_INLINE bool pack_by_squares(const NumberPlane& plane, const float* const* columns,
                                            std::byte* packed) {
  switch (plane.values) {
    case ScaleValues::kF16:
      return pack_rows<Square, ScaleValues::kF16>(plane, columns, packed);
    case ScaleValues::kPowerOfTwo:
      return pack_rows<Square, ScaleValues::kPowerOfTwo>(plane, columns, packed);
    case ScaleValues::kSteps:
      return kTileGroups % plane.unit_groups == 0 && pack_step_rows<Square>(plane, columns, packed);
    case ScaleValues::kFloat8:
    case ScaleValues::kFloat:
      break;
  }
  return pack_rows<Square, ScaleValues::kFloat>(plane, columns, packed);
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
