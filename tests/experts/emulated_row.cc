#define CONCLAVE_SIMD_EMULATED "experts/emulated_simd-inl.h"

#include "experts/emulated_row.h"

#include "experts/cpu/activate-inl.h"
#include "experts/cpu/expert_mlp.h"
#include "gemm/cpu/coded_tiles-inl.h"
#include "gemm/cpu/tile_kernel-inl.h"

namespace conclave::testing {

experts::MlpFunctions mlp_functions_emulated(DType weights,
                                             const activation::Activation& activation,
                                             DType activated) noexcept {
  using namespace gemm::isa_emulated;
  const gemm::PanelFunction product = weights == DType::kBF16
                                          ? &compute_panel_on_tiles
                                          : product_on_tiles(weights, quant::PanelFormats{});
  return {product, choose_activate(activation, activated)};
}

const experts::HostKernelRow& emulated_amx_row() {
  static constexpr experts::HostKernelRow kRow{
      {.name = "cpu.amx (emulated)",
       .supports =
           [](const experts::ExpertsProblem& problem) {
             return problem.weight_dtype == DType::kBF16 ? Support::yes()
                                                         : Support::no("takes BF16 weights");
           }},
      {.arithmetic = cpu::to_string(cpu::Arithmetic::kAmxBf16),
       .make = [](const experts::ExpertsProblem& problem) {
         return experts::make_expert_mlp(
             problem,
             experts::tile_mlp_config(
                 mlp_functions_emulated(problem.weight_dtype, problem.activation, DType::kBF16),
                 0));
       }}};
  return kRow;
}

}  // namespace conclave::testing
