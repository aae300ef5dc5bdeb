#define CONCLAVE_SIMD_AVX512

#include "gemm/cpu/widen_numbers-inl.h"
#include "gemm/cpu/widen_numbers.h"

namespace conclave::inline v0::gemm {

void widen_numbers_avx512(const GroupNumbers& numbers, int64_t groups, float* floats) noexcept {
  isa_avx512::widen_numbers(numbers, groups, floats);
}

}  // namespace conclave::inline v0::gemm
