#define CONCLAVE_SIMD_AVX2

#include "gemm/cpu/widen_numbers-inl.h"
#include "gemm/cpu/widen_numbers.h"

namespace conclave::inline v0::gemm {

void widen_numbers_avx2(const GroupNumbers& numbers, int64_t groups, float* floats) noexcept {
  isa_avx2::widen_numbers(numbers, groups, floats);
}

}  // namespace conclave::inline v0::gemm
