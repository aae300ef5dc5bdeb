#define CONCLAVE_SIMD_AMX

#include "experts/cpu/activate-inl.h"
#include "experts/cpu/mlp_functions.h"
#include "gemm/cpu/coded_tiles-inl.h"
#include "gemm/cpu/tile_kernel-inl.h"

namespace conclave::inline v0::experts {

MlpFunctions mlp_functions_amx(DType weights, const activation::Activation& activation,
                               DType activated) noexcept {
  using namespace gemm::isa_amx;
  const gemm::PanelFunction product = weights == DType::kBF16
                                          ? &compute_panel_on_tiles
                                          : product_on_tiles(weights, quant::PanelFormats{});
  return {product, choose_activate(activation, activated)};
}

}  // namespace conclave::inline v0::experts
