#define CONCLAVE_SIMD_AVX2_INT8

#include "experts/cpu/activate-inl.h"
#include "experts/cpu/mlp_functions.h"
#include "gemm/cpu/code_row-inl.h"
#include "gemm/cpu/integer_narrow-inl.h"

namespace conclave::inline v0::experts {

MlpFunctions mlp_functions_avx2_int8(DType weights,
                                     const activation::Activation& activation) noexcept {
  using namespace gemm::isa_avx2_int8;
  return {integer_product<IntegerPanelByStrips>(weights, quant::PanelFormats{}),
          choose_activate<AsF32>(activation), &code_row};
}

}  // namespace conclave::inline v0::experts
