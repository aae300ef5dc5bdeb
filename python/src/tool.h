// conclave._conclave.run_tool: the command-line tool.
#pragma once

#include "binding.h"

namespace conclave::python {

void bind_tool(nb::module_& module);

}  // namespace conclave::python
