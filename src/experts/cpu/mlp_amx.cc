#define CONCLAVE_SIMD_AMX

#include "activation/silu.h"
#include "experts/cpu/mlp_functions.h"
#include "gemm/cpu/tile_kernel-inl.h"

namespace conclave::inline v0::gemm::isa_amx {
namespace {

// activation(gate, up) of 16 columns as bf16. The 32 columns of a panel are one tile of the next
// product's activations: 64 bytes a row. Columns that do not exist become zeros
// (gated_store-inl.h).
template <class Formula>
struct GatedTiles {
  static CONCLAVE_KERNEL_INLINE void store(const float (&gate)[kTileRows][16],
                                           const float (&up)[kTileRows][16], int64_t num_rows,
                                           int64_t column, const PanelTask& task, std::byte* out) {
    const int64_t valid = task.valid_columns - column;
    const int64_t count = valid < 0 ? 0 : valid < Vec::kLanes ? valid : Vec::kLanes;
    for (int64_t r = 0; r < num_rows; ++r) {
      const Vec value = Formula::apply(Vec::load(gate[r]), Vec::load(up[r])).keep_first(count);
      value.store_bf16(out + r * kTileRowBytes + column * 2);
    }
  }
};

}  // namespace
}  // namespace conclave::inline v0::gemm::isa_amx

namespace conclave::inline v0::experts {

MlpFunctions mlp_functions_amx(activation::ActivationId activation) noexcept {
  using namespace gemm::isa_amx;
  switch (activation) {
    case activation::ActivationId::kSilu:
      return {&compute_panel_on_tiles<GatedTiles<activation::Silu>>,
              &compute_panel_on_tiles<StoreTiles>};
  }
  return {};
}

}  // namespace conclave::inline v0::experts
