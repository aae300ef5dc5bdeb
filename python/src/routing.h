// conclave._conclave.Router: routing without experts.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_routing(nb::module_& module);

}  // namespace conclave::python
