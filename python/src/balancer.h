// Experts that follow the load, for Python.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_balancer(nb::module_& module);

}  // namespace conclave::python
