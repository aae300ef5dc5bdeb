// Tells Python which tensors the library's readers of checkpoint methods expect, for those who load
// them by names of their own.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_methods(nb::module_& module);

}  // namespace conclave::python
