// conclave._conclave.Checkpoint and Feed.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_checkpoint(nb::module_& module);

}  // namespace conclave::python
