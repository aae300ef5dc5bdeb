#define CONCLAVE_SIMD_AVX512

#include "experts/cpu/adapters/functions.h"
#include "experts/cpu/adapters/kernels-inl.h"

namespace conclave::inline v0::experts {

AdapterFunctions adapter_functions_avx512(DType rows, DType factors) noexcept {
  return gemm::isa_avx512::functions_of(rows, factors);
}

}  // namespace conclave::inline v0::experts
