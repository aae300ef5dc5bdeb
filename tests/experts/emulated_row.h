// The catalog's row "cpu.amx", its own source compiled once more over emulated tiles: it runs
// wherever the tests do.
#pragma once

#include "experts/cpu/mlp_functions.h"
#include "experts/experts_kernel.h"

namespace conclave::testing {

experts::MlpFunctions mlp_functions_emulated(const activation::Activation& activation) noexcept;
const experts::KernelRow& emulated_amx_row();

}  // namespace conclave::testing
