#define CONCLAVE_SIMD_AVX512

#include "experts/cpu/activate-inl.h"
#include "experts/cpu/mlp_functions.h"
#include "gemm/cpu/coded_kernel-inl.h"
#include "gemm/cpu/micro_kernel-inl.h"

namespace conclave::inline v0::experts {

MlpFunctions mlp_functions_avx512(DType weights,
                                  const activation::Activation& activation) noexcept {
  using namespace gemm::isa_avx512;
  const gemm::EpilogueFunction activate = choose_activate<AsF32>(activation);
  switch (weights) {
    case DType::kF32:
      return {&compute_panel<F32Weights>, activate};
    case DType::kF16:
      return {&compute_panel<F16Weights>, activate};
    case DType::kBF16:
      return {&compute_panel<Bf16Weights>, activate};
    default:
      return {coded_product(weights, quant::PanelFormats{}), activate};
  }
}

}  // namespace conclave::inline v0::experts
