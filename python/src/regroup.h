// Layers that go from some ranks to others.
#pragma once

#include "binding.h"
#include "layer.h"

namespace conclave::python {

void bind_regroup(nb::module_& module, nb::class_<PyLayer>& layer);

}  // namespace conclave::python
