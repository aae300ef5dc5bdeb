#include "checkpoint.h"

#include "arrays.h"
#include "fields.h"
#include "load_scope.h"
#include "names.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/gguf.h"

#include <cstdint>
#include <nanobind/stl/optional.h>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

nb::dict layer_dict(const CheckpointLayer& layer) {
  nb::dict dict;
  dict["index"] = layer.index;
  dict["prefix"] = layer.prefix;
  dict["layout"] = layer.layout;
  dict["spec"] = spec_to_dict(layer.spec);
  dict["bytes"] = layer.bytes;
  dict["total_parameters"] = layer.parameters.total;
  dict["active_parameters"] = layer.parameters.active;
  dict["supported"] = static_cast<bool>(layer.support);
  dict["reason"] = layer.support.reason();
  return dict;
}

Checkpoint open(const std::string& directory, const std::string& experts, bool extra_layers,
                bool verify) {
  const CheckpointOptions options{.experts = parse_word<ExpertSet>("experts", experts),
                                  .extra_layers = extra_layers,
                                  .verify_manifest = verify};
  return run_interruptible([&] { return Checkpoint::open(directory, options); });
}

// A tensor that is pushed: dense and on the host.
Array pushed_array(const std::string& name, nb::handle tensor) {
  Array array(tensor, "tensor");
  array.require_device({});
  if (array.rank() > kMaxRank) {
    throw Error(
        ErrorCode::kShape,
        {.what = "a tensor has too many dimensions", .tensor = name, .found = array.shape_text()});
  }
  int64_t dense = 1;
  for (size_t axis = array.shape().size(); axis-- > 0;) {
    const int64_t size = array.shape()[axis];
    if (size > 1 && array.strides()[axis] != dense) {
      throw Error(
          ErrorCode::kStride,
          {.what = "a tensor is not dense", .tensor = name, .hint = "pass a contiguous copy"});
    }
    dense *= size;
  }
  return array;
}

bool put_tensor(CheckpointFeed& feed, const std::string& name, nb::handle tensor,
                FeedMemory memory) {
  const Array array = pushed_array(name, tensor);
  return feed.put(name,
                  {.data = array.data(),
                   .dtype = array.dtype(),
                   .shape = Shape(std::span<const int64_t>(array.shape()))},
                  memory);
}

// The number of a type that is given by number or by name.
uint32_t gguf_type_of(const std::string& name, nb::handle type) {
  if (nb::isinstance<nb::str>(type)) {
    try {
      return gguf_type_number(nb::cast<std::string>(type));
    } catch (const Error& error) {
      ErrorDetail detail = error.detail();
      detail.tensor = name;
      throw Error(error.code(), std::move(detail));
    }
  }
  uint32_t number = 0;
  if (nb::try_cast(type, number)) return number;
  throw Error(ErrorCode::kGgufTensorType, {.what = "the type of the tensor is not known",
                                           .tensor = name,
                                           .expected = "the number of a type or its name",
                                           .found = nb::cast<std::string>(nb::repr(type))});
}

// Bytes, the last axis of which holds whole rows, become so many elements of a type.
Shape shape_of_rows(const std::string& name, uint32_t type, const Array& array) {
  std::vector<int64_t> sizes = array.shape();
  if (byte_size(array.dtype()) != 1 || sizes.empty()) return Shape(std::span<const int64_t>(sizes));
  constexpr int64_t kElements = 256;  // whole blocks of any type
  const auto bytes = static_cast<int64_t>(gguf_row_bytes(gguf_type_name(type), kElements));
  const int64_t row = sizes.back();
  if (row > INT64_MAX / kElements || row * kElements % bytes != 0) {
    throw Error(ErrorCode::kShape,
                {.what = "rows of bytes are no rows of " + std::string(gguf_type_name(type)),
                 .tensor = name,
                 .found = array.shape_text()});
  }
  sizes.back() = row * kElements / bytes;
  return Shape(std::span<const int64_t>(sizes));
}

bool put_gguf(CheckpointFeed& feed, const std::string& name, nb::handle tensor, nb::handle type,
              const std::optional<std::vector<int64_t>>& shape) {
  const Array array = pushed_array(name, tensor);
  const uint32_t number = gguf_type_of(name, type);
  int64_t bytes = byte_size(array.dtype());
  for (const int64_t size : array.shape()) bytes *= size;
  GgufTensorView view{
      .type = number,
      .bytes = {static_cast<const std::byte*>(array.data()), static_cast<size_t>(bytes)}};
  try {
    view.shape =
        shape ? Shape(std::span<const int64_t>(*shape)) : shape_of_rows(name, number, array);
  } catch (const Error& error) {
    ErrorDetail detail = error.detail();
    detail.tensor = name;
    throw Error(error.code(), std::move(detail));
  }
  return feed.put(name, view);
}

std::span<const std::byte> header_bytes(const Array& array) {
  array.require_device({});
  if (array.rank() != 1 || byte_size(array.dtype()) != 1 || array.strides()[0] != 1) {
    throw Error(ErrorCode::kShape, {.what = "the header of a GGUF file is bytes",
                                    .tensor = array.name(),
                                    .expected = "bytes, or a dense array of uint8",
                                    .found = array.shape_text()});
  }
  return {static_cast<const std::byte*>(array.data()), static_cast<size_t>(array.shape()[0])};
}

CheckpointFeed feed_of_gguf(nb::handle header, const std::vector<nb::object>& other_parts) {
  const Array first(header, "gguf");
  std::vector<Array> arrays;
  std::vector<std::span<const std::byte>> others;
  for (const nb::object& part : other_parts) {
    others.push_back(header_bytes(arrays.emplace_back(part, "gguf_parts")));
  }
  return CheckpointFeed::from_gguf(header_bytes(first), others);
}

void bind_feed(nb::module_& module) {
  nb::class_<CheckpointFeed> feed(module, "Feed",
                                  "Weights of a model pushed tensor by tensor, in any order.");
  feed.def_static(
      "from_config", [](const std::string& json) { return CheckpointFeed::from_config(json); },
      nb::arg("config_json"), "For the model of a config.json, given as text.");
  feed.def_static(
      "from_spec",
      [](const nb::dict& spec, const std::string& model_type, const std::vector<int64_t>& layers) {
        return CheckpointFeed::from_spec(spec_from_dict(spec), model_type, layers);
      },
      nb::arg("spec"), nb::arg("model_type"), nb::arg("layers"),
      "For layers of one spec, by the names of a family.");
  feed.def_static(
      "from_method",
      [](const nb::dict& spec, const std::string& model_type, const std::vector<int64_t>& layers,
         const std::string& quantization, const std::vector<std::string>& modules) {
        return CheckpointFeed::from_spec(spec_from_dict(spec), model_type, layers, quantization,
                                         modules);
      },
      nb::arg("spec"), nb::arg("model_type"), nb::arg("layers"), nb::arg("quantization"),
      nb::arg("modules") = std::vector<std::string>(),
      "The same for experts that a method packs, by the text of a quantization_config and as its "
      "rules say of modules.");
  feed.def_static("from_gguf", &feed_of_gguf, nb::arg("header"),
                  nb::arg("other_parts") = std::vector<nb::object>(),
                  "For a GGUF model, by the first bytes of its file; those of the other parts of a "
                  "split model complete the list of its tensors.");
  feed.def(
      "put_gguf", &put_gguf, nb::arg("name"), nb::arg("tensor"), nb::arg("type"),
      nb::arg("shape") = nb::none(),
      "Takes a copy of a tensor of a type by its number or name: values, rows of bytes, or with "
      "a shape, the length of a row last, any bytes.");
  feed.def(
      "put",
      [](CheckpointFeed& self, const std::string& name, nb::handle tensor) {
        return put_tensor(self, name, tensor, FeedMemory::kCopy);
      },
      nb::arg("name"), nb::arg("tensor").none(),
      "Takes a copy of a tensor under its full name. True if a MoE layer has a use for it.");
  feed.def(
      "put_in_place",
      [](CheckpointFeed& self, const std::string& name, nb::handle tensor) {
        return put_tensor(self, name, tensor, FeedMemory::kKeep);
      },
      nb::arg("name"), nb::arg("tensor"),
      "As put, without a copy: the tensor must live and stay as it is until layers are made.");
  feed.def(
      "layers",
      [](const CheckpointFeed& self) {
        return std::vector<int64_t>(self.layers().begin(), self.layers().end());
      },
      "Numbers of the MoE layers.");
  feed.def("missing", &CheckpointFeed::missing, nb::arg("limit") = 10, "What has not come yet.");
  feed.def("is_complete", &CheckpointFeed::is_complete, nb::arg("layer"));
  feed.def(
      "layer",
      [](const CheckpointFeed& self, int64_t index) { return layer_dict(self.layer(index)); },
      nb::arg("index"), "A complete layer, as inspect() describes it.");
  feed.def("release", &CheckpointFeed::release, nb::arg("layer"), "Frees the copies of a layer.");
}

}  // namespace

void bind_checkpoint(nb::module_& module) {
  nb::class_<Checkpoint> checkpoint(module, "Checkpoint",
                                    "A model directory: config.json and safetensors files.");
  checkpoint.def_static("open", &open, nb::arg("directory"), nb::arg("experts") = "text",
                        nb::arg("extra_layers") = false, nb::arg("verify") = false,
                        "Reads and checks headers; no tensor data.");
  checkpoint.def_prop_ro("directory",
                         [](const Checkpoint& self) { return self.directory().string(); });
  checkpoint.def_prop_ro("model_type", &Checkpoint::model_type);
  checkpoint.def_prop_ro("architecture", &Checkpoint::architecture);
  checkpoint.def_prop_ro("num_hidden_layers", &Checkpoint::num_hidden_layers);
  checkpoint.def_prop_ro("total_bytes", &Checkpoint::total_bytes);
  checkpoint.def_prop_ro("total_parameters", &Checkpoint::total_parameters);
  checkpoint.def(
      "notes",
      [](const Checkpoint& self) {
        return std::vector<std::string>(self.notes().begin(), self.notes().end());
      },
      "Skipped parts and oddities.");
  checkpoint.def(
      "layers",
      [](const Checkpoint& self) {
        nb::list layers;
        for (const CheckpointLayer& layer : self.layers()) {
          layers.append(layer_dict(layer));
        }
        return layers;
      },
      "The MoE layers as dictionaries, ascending.");
  bind_feed(module);
  module.def("known_model_types", &known_model_types, "Names of the model types known.");
}

}  // namespace conclave::python
