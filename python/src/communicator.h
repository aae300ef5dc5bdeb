// conclave._conclave: ranks that a layer of Python is split over.
#pragma once

#include "binding.h"

#include "conclave/comm.h"

namespace conclave::python {

void bind_communicator(nb::module_& module);

}  // namespace conclave::python
