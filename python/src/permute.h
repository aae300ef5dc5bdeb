// conclave._conclave: groups rows by expert, and tells which rank holds which expert.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_permute(nb::module_& module);
void bind_placement(nb::module_& module);
void bind_balance(nb::module_& module);

}  // namespace conclave::python
