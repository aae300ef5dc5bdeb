#define CONCLAVE_SIMD_AVX512_VNNI

#include "experts/cpu/activate-inl.h"
#include "experts/cpu/mlp_functions.h"
#include "gemm/cpu/code_row-inl.h"
#include "gemm/cpu/integer_stored-inl.h"

namespace conclave::inline v0::experts {

MlpFunctions mlp_functions_avx512_vnni(DType weights,
                                       const activation::Activation& activation) noexcept {
  using namespace gemm::isa_avx512_vnni;
  return {integer_product<IntegerPanelByStored>(weights, quant::PanelFormats{}),
          choose_activate<AsF32>(activation), &code_row};
}

}  // namespace conclave::inline v0::experts
