#define CONCLAVE_SIMD_AVX512

#include "gemm/cpu/square_avx512-inl.h"
#include "gemm/cpu/transpose_lanes-inl.h"
#include "gemm/cpu/transpose_lanes.h"

namespace conclave::inline v0::gemm {

int64_t transpose_lanes_avx512(const ColumnLanes& lanes, std::byte* panel) noexcept {
  return isa_avx512::transpose_lanes<isa_avx512::Square16>(lanes, panel);
}

}  // namespace conclave::inline v0::gemm
