#include "gguf_blocks.h"

#include "fields.h"

#include "conclave/error.h"
#include "conclave/gguf.h"

#include <algorithm>
#include <span>
#include <utility>

namespace conclave::python {
namespace {

WeightId weight_of(const std::string& name) {
  const auto* const found =
      std::ranges::find_if(weights::kAll, [&](WeightId id) { return to_string(id) == name; });
  if (found != weights::kAll.end()) return *found;
  throw Error(ErrorCode::kInvalidArgument, {.what = "no weight of a layer has this name",
                                            .tensor = "name",
                                            .expected = "gate, up, down or another weight",
                                            .found = name});
}

}  // namespace

void PyGgufBlocks::put(const std::string& name, int64_t expert, const std::string& type,
                       nb::handle rows) {
  Array array(rows, "rows");
  array.require_device({});
  const ConstTensorView view = array.matrix("[rows, row bytes]");
  const int64_t cols = view.shape[1];
  if (view.row_stride != 0 && view.row_stride != cols && view.shape[0] > 1) {
    throw Error(
        ErrorCode::kStride,
        {.what = "rows of blocks are apart", .tensor = name, .hint = "pass a contiguous copy"});
  }
  const auto bytes = static_cast<size_t>(view.shape[0] * cols * byte_size(view.dtype));
  blocks_.put(weight_of(name), expert, type, {static_cast<const std::byte*>(view.data), bytes});
  kept_.push_back(std::move(array));
}

void bind_gguf_blocks(nb::module_& module) {
  nb::class_<PyGgufBlocks> blocks(module, "GgufBlocks",
                                  "A layer's weights in blocks as GGUF files store them.");
  blocks.def(
      "__init__",
      [](PyGgufBlocks* self, const nb::dict& spec) {
        new (self) PyGgufBlocks(spec_from_dict(spec));
      },
      nb::arg("spec"), "For a layer that without blocks would be this.");
  blocks.def(
      "put", &PyGgufBlocks::put, nb::arg("name"), nb::arg("expert"), nb::arg("type"),
      nb::arg("rows"),
      "Takes rows [rows, row bytes] of a weight (\"gate\", \"down_bias\"), which must stay as "
      "they are until layers are made.");
  blocks.def(
      "spec", [](const PyGgufBlocks& self) { return spec_to_dict(self.blocks().spec()); },
      "The spec with the type of codes that holds all blocks.");
  module.def(
      "gguf_type_name", [](uint32_t id) { return std::string(gguf_type_name(id)); }, nb::arg("id"),
      "The name of a type by its number in files.");
  module.def("gguf_row_bytes", &gguf_row_bytes, nb::arg("type"), nb::arg("elements"),
             "The bytes of a row of so many elements.");
}

}  // namespace conclave::python
