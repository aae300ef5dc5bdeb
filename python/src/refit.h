// New weights for a layer that serves, and weights in memory that processes share, for Python.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_refit(nb::module_& module);
void bind_shared_weights(nb::module_& module);

}  // namespace conclave::python
