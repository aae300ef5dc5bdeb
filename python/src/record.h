// Recorded routing: rings, files, replay and comparison.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_record(nb::module_& module);

}  // namespace conclave::python
