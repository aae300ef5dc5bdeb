#include "frameworks.h"

namespace conclave::python {

// Kept for the life of the process, since modules are not unloaded.
const Torch* loaded_torch() {
  static const Torch* known = nullptr;
  if (known != nullptr) return known;
  PyObject* modules = PyImport_GetModuleDict();  // borrowed
  PyObject* torch = PyDict_GetItemString(modules, "torch");
  if (torch == nullptr) return nullptr;
  const auto module = nb::borrow<nb::object>(torch);
  // The module is only half imported: its last parts are still missing.
  if (!nb::hasattr(module, "Tensor") || !nb::hasattr(module, "utils")) return nullptr;
  const nb::object utils = module.attr("utils");
  if (!nb::hasattr(utils, "dlpack")) return nullptr;
  known = new Torch{.module = module,
                    .tensor_type = module.attr("Tensor"),
                    .to_dlpack = utils.attr("dlpack").attr("to_dlpack")};
  return known;
}

}  // namespace conclave::python
