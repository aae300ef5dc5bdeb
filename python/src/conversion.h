// Models that are written anew with their experts in another form.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_conversion(nb::module_& module);

}  // namespace conclave::python
