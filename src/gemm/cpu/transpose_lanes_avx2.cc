#define CONCLAVE_SIMD_AVX2

#include "gemm/cpu/square_avx2-inl.h"
#include "gemm/cpu/transpose_lanes-inl.h"
#include "gemm/cpu/transpose_lanes.h"

namespace conclave::inline v0::gemm {

int64_t transpose_lanes_avx2(const ColumnLanes& lanes, std::byte* panel) noexcept {
  return isa_avx2::transpose_lanes<isa_avx2::Square8>(lanes, panel);
}

}  // namespace conclave::inline v0::gemm
