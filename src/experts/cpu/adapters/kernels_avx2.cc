#define CONCLAVE_SIMD_AVX2

#include "experts/cpu/adapters/functions.h"
#include "experts/cpu/adapters/kernels-inl.h"

namespace conclave::inline v0::experts {

AdapterFunctions adapter_functions_avx2(DType rows, DType factors) noexcept {
  return gemm::isa_avx2::functions_of(rows, factors);
}

}  // namespace conclave::inline v0::experts
