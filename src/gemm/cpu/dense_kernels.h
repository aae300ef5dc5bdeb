// The dense product's panel functions, one set per instruction set.
#pragma once

#include "gemm/cpu/panel_task.h"

#include "conclave/dtype.h"

namespace conclave::inline v0::gemm {

// Multiply float32 rows by a panel of `weights` (f32, f16, bf16) into float32 rows.
PanelFunction dense_panel_avx2(DType weights) noexcept;
PanelFunction dense_panel_avx512(DType weights) noexcept;
PanelFunction dense_panel_scalar(DType weights) noexcept;

}  // namespace conclave::inline v0::gemm
