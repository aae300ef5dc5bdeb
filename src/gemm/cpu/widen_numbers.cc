#include "gemm/cpu/widen_numbers.h"

#include <bit>

namespace conclave::inline v0::gemm {

GroupNumbers packed_numbers(const NumberPlane& plane, const std::byte* packed) noexcept {
  const bool in_steps = plane.values == ScaleValues::kSteps;
  return {.packed = packed,
          .values = plane.values,
          .log2_unit_groups = std::countr_zero(static_cast<uint64_t>(plane.unit_groups)),
          .units = in_steps ? packed + plane.units_at() : nullptr};
}

WidenFunction widen_function(cpu::Isa isa) noexcept {
  return isa >= cpu::Isa::kAvx512 ? widen_numbers_avx512 : widen_numbers_avx2;
}

}  // namespace conclave::inline v0::gemm
