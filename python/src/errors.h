// Exceptions of the library as exceptions of Python, and the way back out of a long load.
#pragma once

#include "binding.h"

#include "conclave/error.h"

namespace conclave::python {

// From then on conclave::Error becomes what conclave.errors.from_code makes of it.
void register_error_translator();

}  // namespace conclave::python
