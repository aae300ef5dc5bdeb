#define CONCLAVE_SIMD_AVX512_BF16

#include "activation/silu.h"
#include "experts/cpu/gated_store-inl.h"
#include "experts/cpu/mlp_functions.h"

namespace conclave::inline v0::experts {

MlpFunctions mlp_functions_avx512_bf16(activation::ActivationId activation) noexcept {
  using namespace gemm::isa_avx512_bf16;
  switch (activation) {
    case activation::ActivationId::kSilu:
      return {&compute_panel<Bf16DotWeights, GatedStore<activation::Silu, AsBf16>>,
              &compute_panel<Bf16DotWeights, StoreRows>};
  }
  return {};
}

}  // namespace conclave::inline v0::experts
