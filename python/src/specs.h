// Tells Python of specs, options and splits that no layer has yet.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_specs(nb::module_& module);

}  // namespace conclave::python
