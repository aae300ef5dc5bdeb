// Adapters of a layer's experts, from PEFT's directories or from arrays.
#pragma once

#include "binding.h"
#include "layer.h"

namespace conclave::python {

void bind_adapters(nb::class_<PyLayer>& layer);

}  // namespace conclave::python
