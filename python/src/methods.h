// What the library's readers of checkpoint methods expect, for those who load tensors by names of
// their own.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_methods(nb::module_& module);

}  // namespace conclave::python
