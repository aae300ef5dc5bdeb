// PyTorch, if the program has loaded it. It is never imported from here.
#pragma once

#include "binding.h"

namespace conclave::python {

struct Torch {
  nb::object module;
  nb::object tensor_type;  // torch.Tensor
  nb::object to_dlpack;    // torch.utils.dlpack.to_dlpack
};

// Null until `import torch` has finished somewhere. Requires the GIL.
const Torch* loaded_torch();

}  // namespace conclave::python
