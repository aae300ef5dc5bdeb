// Experts that move while a layer lives, for Python.
#pragma once

#include "binding.h"
#include "layer.h"

namespace conclave::python {

// Adds to the layer's class what moves its experts, and to the module the class of those under way.
void bind_migration(nb::module_& module, nb::class_<PyLayer>& layer);

}  // namespace conclave::python
