#define CONCLAVE_SIMD_AVX2

#include "activation/silu.h"
#include "experts/cpu/gated_store-inl.h"
#include "experts/cpu/mlp_functions.h"

namespace conclave::inline v0::experts {
namespace {

using namespace gemm::isa_avx2;

template <class Formula>
MlpFunctions functions(DType weights) noexcept {
  using Activate = GatedStore<Formula, AsF32>;
  switch (weights) {
    case DType::kF32:
      return {&compute_panel<F32Weights, Activate>, &compute_panel<F32Weights, StoreRows>};
    case DType::kF16:
      return {&compute_panel<F16Weights, Activate>, &compute_panel<F16Weights, StoreRows>};
    default:
      return {&compute_panel<Bf16Weights, Activate>, &compute_panel<Bf16Weights, StoreRows>};
  }
}

}  // namespace

MlpFunctions mlp_functions_avx2(DType weights, activation::ActivationId activation) noexcept {
  switch (activation) {
    case activation::ActivationId::kSilu:
      return functions<activation::Silu>(weights);
  }
  return {};
}

}  // namespace conclave::inline v0::experts
