#include "checkpoint.h"

#include "arrays.h"
#include "fields.h"
#include "load_scope.h"
#include "names.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"

#include <string>
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

bool put_tensor(CheckpointFeed& feed, const std::string& name, nb::handle tensor,
                FeedMemory memory) {
  const Array array(tensor, "tensor");
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
  return feed.put(name,
                  {.data = array.data(),
                   .dtype = array.dtype(),
                   .shape = Shape(std::span<const int64_t>(array.shape()))},
                  memory);
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
  feed.def(
      "put",
      [](CheckpointFeed& self, const std::string& name, nb::handle tensor) {
        return put_tensor(self, name, tensor, FeedMemory::kCopy);
      },
      nb::arg("name"), nb::arg("tensor"),
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
