// Scales and offsets of a panel as float32: where they lie, or widened from fewer bytes.
#pragma once

#include "gemm/cpu/panel_task.h"
#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// The i-th and following numbers of a group, whose steps have these units.
template <ScaleValues kValues>
CONCLAVE_KERNEL_INLINE Vec widen(const std::byte* packed, const std::byte* units, int i) {
  if constexpr (kValues == ScaleValues::kF16) return Vec::load_f16(packed + 2 * i);
  if constexpr (kValues == ScaleValues::kPowerOfTwo) return Vec::load_power_of_two(packed + i);
  if constexpr (kValues == ScaleValues::kSteps) {
    return Vec::mul(Vec::load_signed_bytes(packed + i), Vec::load(units + 4 * i));
  }
  return Vec::load(packed + 4 * i);
}
template <ScaleValues kValues>
CONCLAVE_KERNEL_INLINE void widen_group(const std::byte* packed, const std::byte* units,
                                        float* numbers) {
#pragma GCC unroll 8
  for (int i = 0; i < 64; i += Vec::kLanes) widen<kValues>(packed, units, i).store(numbers + i);
}

// Where the units of a group lie.
CONCLAVE_KERNEL_INLINE const std::byte* units_of(const GroupNumbers& numbers, int64_t group) {
  return numbers.units + (group >> numbers.log2_unit_groups) * 256;
}

// The 64 numbers of a group; `room` may take them.
CONCLAVE_KERNEL_INLINE const float* numbers_of(const GroupNumbers& numbers, int64_t group,
                                               float* room) {
  if (__builtin_expect(numbers.packed == nullptr, 1)) return numbers.floats + group * 64;
  const std::byte* const packed = numbers.packed;
  switch (numbers.values) {
    case ScaleValues::kF16:
      widen_group<ScaleValues::kF16>(packed + group * 128, nullptr, room);
      return room;
    case ScaleValues::kPowerOfTwo:
      widen_group<ScaleValues::kPowerOfTwo>(packed + group * 64, nullptr, room);
      return room;
    case ScaleValues::kSteps:
      widen_group<ScaleValues::kSteps>(packed + group * 64, units_of(numbers, group), room);
      return room;
    case ScaleValues::kFloat8:
    case ScaleValues::kFloat:
      break;
  }
  widen_group<ScaleValues::kFloat>(packed + group * 256, nullptr, room);
  return room;
}

// The 64 numbers of a group in registers.
struct GroupVectors {
  static constexpr int kVectors = 64 / Vec::kLanes;
  Vec value[kVectors];

  template <ScaleValues kValues>
  CONCLAVE_KERNEL_INLINE void set(const std::byte* packed, const std::byte* units) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) value[j] = widen<kValues>(packed, units, j * Vec::kLanes);
  }
  CONCLAVE_KERNEL_INLINE void set(const GroupNumbers& numbers, int64_t group) {
    const std::byte* const packed = numbers.packed;
    if (__builtin_expect(packed == nullptr, 1)) {
      const auto* const floats = reinterpret_cast<const std::byte*>(numbers.floats + group * 64);
      return set<ScaleValues::kFloat>(floats, nullptr);
    }
    switch (numbers.values) {
      case ScaleValues::kF16:
        return set<ScaleValues::kF16>(packed + group * 128, nullptr);
      case ScaleValues::kPowerOfTwo:
        return set<ScaleValues::kPowerOfTwo>(packed + group * 64, nullptr);
      case ScaleValues::kSteps:
        return set<ScaleValues::kSteps>(packed + group * 64, units_of(numbers, group));
      case ScaleValues::kFloat8:
      case ScaleValues::kFloat:
        return set<ScaleValues::kFloat>(packed + group * 256, nullptr);
    }
  }
};

// Fetches the numbers of a group.
CONCLAVE_KERNEL_INLINE void fetch_numbers(const GroupNumbers& numbers, int64_t group) {
  if (numbers.packed == nullptr) {
    if (numbers.floats == nullptr) return;
    const auto* const at = reinterpret_cast<const std::byte*>(numbers.floats) + group * 256;
    for (int64_t line = 0; line < 256; line += 64) prefetch_line(at + line);
    return;
  }
  if (numbers.values == ScaleValues::kF16) {
    prefetch_line(numbers.packed + group * 128);
    prefetch_line(numbers.packed + group * 128 + 64);
    return;
  }
  prefetch_line(numbers.packed + group * 64);
  if (numbers.units == nullptr || (group & ((1 << numbers.log2_unit_groups) - 1)) != 0) return;
  const std::byte* const units = units_of(numbers, group);
  for (int64_t line = 0; line < 256; line += 64) prefetch_line(units + line);
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
