#define CONCLAVE_SIMD_AVX512_BF16

#include "experts/cpu/activate-inl.h"
#include "experts/cpu/mlp_functions.h"
#include "gemm/cpu/micro_kernel-inl.h"

namespace conclave::inline v0::experts {

MlpFunctions mlp_functions_avx512_bf16(DType weights, const activation::Activation& activation,
                                       DType activated) noexcept {
  using namespace gemm::isa_avx512_bf16;
  const gemm::PanelFunction product = weights == DType::kBF16 ? &compute_panel<Bf16DotWeights>
                                                              : paired_product_avx512_vbmi(weights);
  return {product, choose_activate(activation, activated)};
}

}  // namespace conclave::inline v0::experts
