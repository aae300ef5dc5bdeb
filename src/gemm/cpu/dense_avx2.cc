#define CONCLAVE_SIMD_AVX2

#include "gemm/cpu/dense_kernels.h"
#include "gemm/cpu/micro_kernel-inl.h"

namespace conclave::inline v0::gemm {

PanelFunction dense_panel_avx2(DType weights) noexcept {
  using namespace isa_avx2;
  switch (weights) {
    case DType::kF32:
      return &compute_panel<F32Weights>;
    case DType::kF16:
      return &compute_panel<F16Weights>;
    default:
      return &compute_panel<Bf16Weights>;
  }
}

}  // namespace conclave::inline v0::gemm
