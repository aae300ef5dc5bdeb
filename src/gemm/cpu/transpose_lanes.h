// Vector code that turns columns of a matrix into rows of a panel, one function per instruction
// set, for matrices that are packed in every forward. The bytes are those of pack_panel without it.
#pragma once

#include "cpu/isa.h"
#include "gemm/packed_layout.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm {

// Null for instruction sets without vectors.
TransposeFunction transpose_function(cpu::Isa isa) noexcept;

int64_t transpose_lanes_avx2(const ColumnLanes& lanes, std::byte* panel) noexcept;
int64_t transpose_lanes_avx512(const ColumnLanes& lanes, std::byte* panel) noexcept;

}  // namespace conclave::inline v0::gemm
