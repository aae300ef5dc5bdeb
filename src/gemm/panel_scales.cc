#include "gemm/panel_scales.h"

#include "core/float8.h"
#include "core/float_convert.h"
#include "quant/number_steps.h"

#include <algorithm>
#include <cstring>
#include <span>

namespace conclave::inline v0::gemm {
namespace {

template <class T>
T load(const std::byte* packed, int64_t index) {
  T value;
  std::memcpy(&value, packed + index * int64_t{sizeof(T)}, sizeof(value));
  return value;
}
template <class T>
void store(T value, std::byte* packed, int64_t index) {
  std::memcpy(packed + index * int64_t{sizeof(T)}, &value, sizeof(value));
}

// Packs the numbers of one column and unit, whose steps lie a panel row apart. Returns one that is
// no step, or null.
const float* pack_steps(std::span<const float> numbers, std::byte* steps, std::byte* unit_at) {
  const float unit = quant::unit_of_steps(numbers);
  store(unit, unit_at, 0);
  for (size_t i = 0; i < numbers.size(); ++i) {
    int8_t step = 0;
    if (!quant::find_step(numbers[i], unit, step)) return &numbers[i];
    store(step, steps, static_cast<int64_t>(i) * kPanelColumns);
  }
  return nullptr;
}

UnfitNumber pack_all_steps(const NumberPlane& plane, const PanelNumbers& columns,
                           std::byte* packed) {
  const auto groups = static_cast<size_t>(plane.groups);
  const auto together = static_cast<size_t>(plane.unit_groups);
  std::fill_n(packed, plane.bytes(), std::byte{});
  for (size_t column = 0; column < columns.size(); ++column) {
    if (columns[column] == nullptr) continue;
    const std::span<const float> numbers(columns[column], groups);
    for (size_t first = 0; first < groups; first += together) {
      std::byte* const steps = packed + first * kPanelColumns + column;
      const size_t unit = first / together * kPanelColumns + column;
      const float* const unfit =
          pack_steps(numbers.subspan(first, std::min(together, groups - first)), steps,
                     packed + plane.units_at() + unit * sizeof(float));
      if (unfit != nullptr) return {static_cast<int64_t>(column), *unfit};
    }
  }
  return {};
}

// One element of a plane that has no units. What has no form becomes whatever comes near it.
template <ScaleValues kValues>
struct Element {
  static float at(const std::byte* packed, int64_t index) { return load<float>(packed, index); }
  static void put(float number, std::byte* packed, int64_t index) { store(number, packed, index); }
};
template <>
struct Element<ScaleValues::kF16> {
  static float at(const std::byte* packed, int64_t index) {
    return f16_to_float(load<uint16_t>(packed, index));
  }
  static void put(float number, std::byte* packed, int64_t index) {
    store(float_to_f16(number), packed, index);
  }
};
template <>
struct Element<ScaleValues::kPowerOfTwo> {
  static float at(const std::byte* packed, int64_t index) {
    return e8m0_to_float(load<uint8_t>(packed, index));
  }
  static void put(float number, std::byte* packed, int64_t index) {
    store(float_to_e8m0(number), packed, index);
  }
};

template <ScaleValues kValues>
UnfitNumber pack_each(const NumberPlane& plane, const PanelNumbers& columns, std::byte* packed) {
  using Packed = Element<kValues>;
  for (int64_t group = 0; group < plane.groups; ++group) {
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      const float* const numbers = columns[static_cast<size_t>(column)];
      const float number = numbers != nullptr ? numbers[group] : 0.0F;
      const int64_t at = group * kPanelColumns + column;
      Packed::put(number, packed, at);
      if (kValues == ScaleValues::kFloat || numbers == nullptr) continue;
      if (Packed::at(packed, at) != number) return {column, number};
    }
  }
  return {};
}

float step_at(const NumberPlane& plane, const std::byte* packed, int64_t group, int64_t column) {
  const int64_t unit = group / plane.unit_groups * kPanelColumns + column;
  return static_cast<float>(load<int8_t>(packed, group * kPanelColumns + column)) *
         load<float>(packed + plane.units_at(), unit);
}

}  // namespace

float number_at(const NumberPlane& plane, const std::byte* packed, int64_t group,
                int64_t column) noexcept {
  const int64_t at = group * kPanelColumns + column;
  switch (plane.values) {
    case ScaleValues::kF16:
      return Element<ScaleValues::kF16>::at(packed, at);
    case ScaleValues::kPowerOfTwo:
      return Element<ScaleValues::kPowerOfTwo>::at(packed, at);
    case ScaleValues::kSteps:
      return step_at(plane, packed, group, column);
    case ScaleValues::kFloat8:
    case ScaleValues::kFloat:
      break;
  }
  return load<float>(packed, at);
}

UnfitNumber pack_numbers(const NumberPlane& plane, const PanelNumbers& columns, std::byte* packed) {
  switch (plane.values) {
    case ScaleValues::kF16:
      return pack_each<ScaleValues::kF16>(plane, columns, packed);
    case ScaleValues::kPowerOfTwo:
      return pack_each<ScaleValues::kPowerOfTwo>(plane, columns, packed);
    case ScaleValues::kSteps:
      return pack_all_steps(plane, columns, packed);
    case ScaleValues::kFloat8:
    case ScaleValues::kFloat:
      break;
  }
  return pack_each<ScaleValues::kFloat>(plane, columns, packed);
}

}  // namespace conclave::inline v0::gemm
