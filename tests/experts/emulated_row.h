// The catalog's row "cpu.amx", compiled again from its own source over emulated tiles, so that it
// runs wherever the tests do.
#pragma once

#include "experts/catalog.h"
#include "experts/cpu/mlp_functions.h"

namespace conclave::testing {

experts::MlpFunctions mlp_functions_emulated(DType weights,
                                             const activation::Activation& activation) noexcept;
const experts::KernelRow& emulated_amx_row();

}  // namespace conclave::testing
