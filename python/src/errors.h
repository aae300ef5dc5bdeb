// Turns the library's exceptions into Python's.
#pragma once

#include "binding.h"

#include "conclave/error.h"

namespace conclave::python {

// From then on, conclave.errors.from_code decides what a conclave::Error becomes in Python.
void register_error_translator();

}  // namespace conclave::python
