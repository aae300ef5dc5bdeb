#define CONCLAVE_SIMD_AMX

#include "experts/cpu/activate-inl.h"
#include "experts/cpu/mlp_functions.h"
#include "gemm/cpu/tile_kernel-inl.h"

namespace conclave::inline v0::experts {

MlpFunctions mlp_functions_amx(const activation::Activation& activation) noexcept {
  using namespace gemm::isa_amx;
  return {&compute_panel_on_tiles, choose_activate<AsBf16>(activation)};
}

}  // namespace conclave::inline v0::experts
