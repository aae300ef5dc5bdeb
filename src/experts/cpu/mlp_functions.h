// Functions that one translation unit per instruction set offers to expert_mlp.cc.
#pragma once

#include "activation/activations.h"
#include "gemm/cpu/code_row.h"
#include "gemm/cpu/panel_task.h"

#include "conclave/dtype.h"

namespace conclave::inline v0::experts {

struct MlpFunctions {
  gemm::PanelFunction product = nullptr;       // rows x panel of 64 columns, of gate and up
  gemm::EpilogueFunction activate = nullptr;   // takes activation::FormulaParameters
  gemm::CodeRowFunction code_row = nullptr;    // null: quantised rows hold the values of codes
  gemm::PanelFunction down_product = nullptr;  // where down has other codes; null: `product`
};

// Rows and activated rows are float32; weights f32, f16, bf16, or codes with scales.
MlpFunctions mlp_functions_avx2(DType weights, const activation::Activation& activation) noexcept;
MlpFunctions mlp_functions_avx512(DType weights, const activation::Activation& activation) noexcept;
// Rows are int8 codes, activated rows float32 before they are coded; weights are codes whose values
// are whole numbers.
MlpFunctions mlp_functions_avx2_int8(DType weights,
                                     const activation::Activation& activation) noexcept;
MlpFunctions mlp_functions_avx_vnni(DType weights,
                                    const activation::Activation& activation) noexcept;
MlpFunctions mlp_functions_avx512_vnni(DType weights,
                                       const activation::Activation& activation) noexcept;
MlpFunctions mlp_functions_amx_int8(DType weights,
                                    const activation::Activation& activation) noexcept;
// Rows are bf16; weights bf16, or codes with scales, for which the CPU must have avx512_vbmi too.
// Activated rows are of the type given, kBF16 or, to become codes, kF32.
MlpFunctions mlp_functions_avx512_bf16(DType weights, const activation::Activation& activation,
                                       DType activated) noexcept;
gemm::PanelFunction paired_product_avx512_vbmi(DType weights) noexcept;
// The same. Rows that are not codes are in groups of 16 interleaved rows: `product` takes no row
// index, and `activate` writes groups.
MlpFunctions mlp_functions_amx(DType weights, const activation::Activation& activation,
                               DType activated) noexcept;

}  // namespace conclave::inline v0::experts
