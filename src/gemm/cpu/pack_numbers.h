// Vector code that packs the numbers of groups, one function per instruction set. The bytes are
// those of pack_numbers without it.
#pragma once

#include "cpu/isa.h"
#include "gemm/panel_scales.h"

#include <cstddef>

namespace conclave::inline v0::gemm {

// Null for instruction sets without vectors.
NumbersFunction numbers_function(cpu::Isa isa) noexcept;

bool pack_numbers_avx2(const NumberPlane& plane, const float* const* columns,
                       std::byte* packed) noexcept;
bool pack_numbers_avx512(const NumberPlane& plane, const float* const* columns,
                         std::byte* packed) noexcept;

}  // namespace conclave::inline v0::gemm
