// Recorded routing in rings on a GPU.
#pragma once

#include "binding.h"

namespace conclave::python {

// After bind_record, whose RoutingRecord it returns.
void bind_device_record(nb::module_& module);

}  // namespace conclave::python
