// Numbers of groups of k in a panel: the scales, or the offsets, of its 64 columns. They are
// float32 or, where a format says what numbers it has, take fewer bytes and come back with the same
// bits.
#pragma once

#include "conclave/spec.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm {

inline constexpr int64_t kPanelColumns = 64;

// The numbers of each panel column, one for each group. Null stands for zeros, or where there are
// none for the least powers of two: the codes of such columns are zeros.
using PanelNumbers = std::array<const float*, kPanelColumns>;

// [groups, 64] numbers, those of one group after the other. Files of any instruction set ask for
// the places, and none may leave a copy behind. Steps are whole numbers of one byte, behind which
// [num_units, 64] float32 units follow: a number is its step times its unit.
struct NumberPlane {
  ScaleValues values = ScaleValues::kFloat;
  int64_t groups = 0;
  int64_t unit_groups = 1;  // neighbouring groups that share a unit

  [[gnu::always_inline]] int64_t number_bytes() const noexcept {
    switch (values) {
      case ScaleValues::kFloat8:
      case ScaleValues::kFloat:
        return 4;
      case ScaleValues::kF16:
        return 2;
      case ScaleValues::kPowerOfTwo:
      case ScaleValues::kSteps:
        return 1;
    }
    return 4;
  }
  [[gnu::always_inline]] int64_t num_units() const noexcept {
    return values == ScaleValues::kSteps ? (groups + unit_groups - 1) / unit_groups : 0;
  }
  [[gnu::always_inline]] size_t units_at() const noexcept {
    return static_cast<size_t>(groups * kPanelColumns * number_bytes());
  }
  [[gnu::always_inline]] size_t bytes() const noexcept {
    return units_at() + static_cast<size_t>(num_units() * kPanelColumns) * sizeof(float);
  }
};

// A number that a plane has no form for.
struct UnfitNumber {
  int64_t column = -1;  // none
  float value = 0;
};

// Writes the bytes of pack_numbers from 64 columns, or returns false: a number may have no form.
// gemm/cpu/pack_numbers.h has some.
using NumbersFunction = bool (*)(const NumberPlane& plane, const float* const* columns,
                                 std::byte* packed) noexcept;

// Writes all bytes of a plane, unless a number does not fit: it returns the first.
UnfitNumber pack_numbers(const NumberPlane& plane, const PanelNumbers& columns, std::byte* packed);

// One of the numbers; for the scalar path and tests.
float number_at(const NumberPlane& plane, const std::byte* packed, int64_t group,
                int64_t column) noexcept;

}  // namespace conclave::inline v0::gemm
