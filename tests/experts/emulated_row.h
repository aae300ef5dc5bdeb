// The catalog's rows "cpu.amx" and "cpu.amx_int8", compiled again from their own source over
// emulated tiles, so that they run wherever the tests do.
#pragma once

#include "experts/catalog.h"
#include "experts/cpu/mlp_functions.h"

namespace conclave::testing {

experts::MlpFunctions mlp_functions_emulated(DType weights,
                                             const activation::Activation& activation,
                                             DType activated) noexcept;
const experts::HostKernelRow& emulated_amx_row();
experts::MlpFunctions integer_functions_emulated(DType weights,
                                                 const activation::Activation& activation) noexcept;
const experts::HostKernelRow& emulated_amx_int8_row();

}  // namespace conclave::testing
