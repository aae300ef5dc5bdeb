#include "methods.h"

#include "arrays.h"
#include "fields.h"
#include "names.h"

#include "conclave/dtype.h"
#include "conclave/format.h"
#include "conclave/methods.h"

#include <optional>
#include <string>
#include <vector>

namespace conclave::python {
namespace {

nb::dict tensor_to_dict(const MethodTensor& tensor) {
  nb::list dtypes;
  for (const DType dtype : tensor.dtypes) dtypes.append(dtype_to_python(dtype));
  nb::dict dict;
  dict["name"] = tensor.name;
  dict["use"] = word_of(tensor.use);
  dict["plane"] = word_of(tensor.plane);
  dict["dtypes"] = dtypes;
  dict["shape"] = tensor.shape;
  dict["rows_axis"] = tensor.rows_axis;
  dict["cols_axis"] = tensor.cols_axis;
  return dict;
}

nb::dict layout_to_dict(const MethodLayout& layout) {
  nb::list tensors;
  for (const MethodTensor& tensor : layout.tensors) tensors.append(tensor_to_dict(tensor));
  nb::dict dict;
  dict["method"] = layout.method;
  dict["reason"] = layout.reason;
  dict["kernel_order"] = layout.kernel_order;
  dict["codes"] = dtype_to_python(layout.codes);
  dict["code_bits"] = layout.code_bits;
  dict["weights"] = word_of(layout.quant.weights);
  dict["block_rows"] = layout.quant.block_rows;
  dict["block_cols"] = layout.quant.block_cols;
  dict["activations"] = word_of(layout.quant.activations);
  dict["activation_group"] = layout.quant.activation_group;
  dict["power_of_two_scales"] = layout.quant.power_of_two_scales;
  dict["has_module_schemes"] = layout.has_module_schemes;
  dict["leaves_out"] = layout.leaves_out;
  dict["tensors"] = tensors;
  return dict;
}

}  // namespace

void bind_methods(nb::module_& module) {
  module.def("checkpoint_methods", &checkpoint_methods, "Methods of checkpoints that are read.");
  module.def("kept_modules", &kept_modules, nb::arg("config"),
             "The modules that a quantization_config leaves as they are, as it names them.");
  module.def(
      "method_layout",
      [](const std::string& config, const std::string& matrix, int64_t rows, int64_t cols,
         const std::vector<std::string>& modules) {
        return layout_to_dict(method_layout(config, matrix, rows, cols, modules));
      },
      nb::arg("config"), nb::arg("matrix"), nb::arg("rows"), nb::arg("cols"),
      nb::arg("modules") = std::vector<std::string>(),
      "The tensors in which a method stores a matrix [rows, cols] of this name, one of modules.");
  module.def(
      "gpu_rows_reason",
      [](const nb::dict& spec) {
        const MoeSpec read = spec_from_dict(spec);
        return gpu_rows_support(read.weight_dtype, read.quant).reason();
      },
      nb::arg("spec"), "Why a GPU does not make a layer's rows of codes; empty if it does.");
  module.def(
      "element_bits",
      [](const std::string& name) {
        const std::optional<DType> type = parse_dtype(name);
        return type ? bit_size(*type) : 0;
      },
      nb::arg("name"),
      "Bits of one element of the type that files or torch call so; 0 for other names.");
}

}  // namespace conclave::python
