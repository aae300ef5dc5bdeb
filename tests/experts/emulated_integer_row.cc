#define CONCLAVE_SIMD_EMULATED "experts/emulated_wholes-inl.h"

#include "experts/cpu/activate-inl.h"
#include "experts/cpu/expert_mlp.h"
#include "experts/emulated_row.h"
#include "gemm/cpu/code_row-inl.h"
#include "gemm/cpu/integer_tiles-inl.h"
#include "quant/weight_format.h"

namespace conclave::testing {

experts::MlpFunctions integer_functions_emulated(
    DType weights, const activation::Activation& activation) noexcept {
  using namespace gemm::isa_emulated;
  return {integer_product<IntegerPanelOnTiles>(weights, quant::PanelFormats{}),
          choose_activate<AsF32>(activation), &code_row};
}

const experts::HostKernelRow& emulated_amx_int8_row() {
  static constexpr experts::HostKernelRow kRow{
      {.name = "cpu.amx_int8 (emulated)",
       .supports =
           [](const experts::ExpertsProblem& problem) {
             // What the row itself says on a CPU that has it.
             experts::ExpertsProblem on_amx = problem;
             on_amx.target =
                 experts::CpuTarget{.isa = cpu::Isa::kAmx, .arithmetic = problem.cpu().arithmetic};
             return experts::host_kernels().find("cpu.amx_int8", "kernel").supports(on_amx);
           }},
      {.arithmetic = cpu::to_string(cpu::Arithmetic::kInt8Dot),
       .make = [](const experts::ExpertsProblem& problem) {
         return experts::make_expert_mlp(
             problem, experts::integer_tile_config(
                          integer_functions_emulated(problem.weight_dtype, problem.activation), 0));
       }}};
  return kRow;
}

}  // namespace conclave::testing
