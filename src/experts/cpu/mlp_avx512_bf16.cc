#define CONCLAVE_SIMD_AVX512_BF16

#include "experts/cpu/activate-inl.h"
#include "experts/cpu/mlp_functions.h"
#include "gemm/cpu/micro_kernel-inl.h"

namespace conclave::inline v0::experts {

MlpFunctions mlp_functions_avx512_bf16(const activation::Activation& activation) noexcept {
  using namespace gemm::isa_avx512_bf16;
  return {&compute_panel<Bf16DotWeights>, choose_activate<AsBf16>(activation)};
}

}  // namespace conclave::inline v0::experts
