// What a translation unit per instruction set offers to the scheduler of expert_mlp.cc.
#pragma once

#include "activation/activations.h"
#include "gemm/cpu/panel_task.h"

#include "conclave/dtype.h"

namespace conclave::inline v0::experts {

struct MlpFunctions {
  gemm::PanelFunction gate_up = nullptr;  // rows x panel of 32 gate + 32 up -> 32 activated columns
  gemm::PanelFunction down = nullptr;     // activated rows x panel of 64 -> 64 float32 columns
};

// Rows and activated rows are float32; weights f32, f16 or bf16.
MlpFunctions mlp_functions_avx2(DType weights, activation::ActivationId activation) noexcept;
MlpFunctions mlp_functions_avx512(DType weights, activation::ActivationId activation) noexcept;
// Rows, weights and activated rows are bf16.
MlpFunctions mlp_functions_avx512_bf16(activation::ActivationId activation) noexcept;
// The same in groups of 16 interleaved rows: both functions take no row index, and gate_up writes
// groups.
MlpFunctions mlp_functions_amx(activation::ActivationId activation) noexcept;

}  // namespace conclave::inline v0::experts
