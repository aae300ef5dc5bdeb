// Numbers of a panel widened by vectors, one function per instruction set. The result has the bits
// of number_at.
#pragma once

#include "cpu/isa.h"
#include "gemm/cpu/panel_task.h"
#include "gemm/panel_scales.h"

namespace conclave::inline v0::gemm {

// Packed numbers of a plane, as tasks of few rows have them.
GroupNumbers packed_numbers(const NumberPlane& plane, const std::byte* packed) noexcept;

// Widens packed numbers to [groups, 64].
using WidenFunction = void (*)(const GroupNumbers& numbers, int64_t groups, float* floats) noexcept;
// For instruction sets that have vectors.
WidenFunction widen_function(cpu::Isa isa) noexcept;

void widen_numbers_avx2(const GroupNumbers& numbers, int64_t groups, float* floats) noexcept;
void widen_numbers_avx512(const GroupNumbers& numbers, int64_t groups, float* floats) noexcept;

}  // namespace conclave::inline v0::gemm
