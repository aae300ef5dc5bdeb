#define CONCLAVE_SIMD_AVX512_VBMI

#include "experts/cpu/mlp_functions.h"
#include "gemm/cpu/coded_pairs-inl.h"

namespace conclave::inline v0::experts {

gemm::PanelFunction paired_product_avx512_vbmi(DType weights) noexcept {
  return gemm::isa_avx512_vbmi::paired_product(weights, quant::PanelFormats{});
}

}  // namespace conclave::inline v0::experts
