#include "balancer.h"
#include "binding.h"
#include "checkpoint.h"
#include "communicator.h"
#include "context.h"
#include "conversion.h"
#include "device_record.h"
#include "errors.h"
#include "gguf_blocks.h"
#include "layer.h"
#include "methods.h"
#include "permute.h"
#include "record.h"
#include "refit.h"
#include "routing.h"
#include "specs.h"
#include "tool.h"
#include "tuning.h"
#include "wording.h"

NB_MODULE(_conclave, module) {
  module.doc() = "The compiled part of conclave. Use the functions of the package instead.";
  // Caches of the package, and the layers in them, live until the interpreter ends.
  nanobind::set_leak_warnings(false);
  conclave::python::register_error_translator();
  conclave::python::bind_communicator(module);
  conclave::python::bind_context(module);
  conclave::python::bind_checkpoint(module);
  conclave::python::bind_conversion(module);
  conclave::python::bind_gguf_blocks(module);
  conclave::python::bind_methods(module);
  conclave::python::bind_tuning(module);
  conclave::python::bind_specs(module);
  conclave::python::bind_layer(module);
  conclave::python::bind_refit(module);
  conclave::python::bind_shared_weights(module);
  conclave::python::bind_routing(module);
  conclave::python::bind_record(module);
  conclave::python::bind_device_record(module);
  conclave::python::bind_permute(module);
  conclave::python::bind_placement(module);
  conclave::python::bind_balance(module);
  conclave::python::bind_balancer(module);
  conclave::python::bind_tool(module);
  conclave::python::bind_wording(module);
}
