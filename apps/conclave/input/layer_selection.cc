#include "input/layer_selection.h"

#include "input/ranges.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace conclave::tool {
namespace {

constexpr int64_t kLargestLayer = 1 << 20;

const CheckpointLayer* find(const Checkpoint& checkpoint, int64_t index) {
  const auto layers = checkpoint.layers();
  const auto found = std::find_if(layers.begin(), layers.end(), [&](const CheckpointLayer& layer) {
    return layer.index == index;
  });
  return found == layers.end() ? nullptr : &*found;
}

void require_supported(const CheckpointLayer& layer, const Checkpoint& checkpoint) {
  if (layer.support) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = fmt::format("layer {} cannot run: {}", layer.index, layer.support.reason()),
               .file = checkpoint.directory().string(),
               .hint = "conclave inspect shows every layer"});
}

}  // namespace

std::vector<const CheckpointLayer*> select_layers(const Checkpoint& checkpoint,
                                                  const std::string& layers) {
  std::map<int64_t, const CheckpointLayer*> chosen;
  if (layers.empty()) {
    for (const CheckpointLayer& layer : checkpoint.layers()) chosen[layer.index] = &layer;
    if (chosen.empty()) {
      throw Error(ErrorCode::kLayerNotFound, {.what = "the model has no MoE layers",
                                              .file = checkpoint.directory().string(),
                                              .found = checkpoint.model_type()});
    }
  } else {
    const ListLimits limits{.option = "--layers", .highest = kLargestLayer};
    for (const RangeItem& item : parse_range_items(layers, limits)) {
      bool any = false;
      for (const int64_t index : expand(item)) {
        const CheckpointLayer* layer = find(checkpoint, index);
        if (layer != nullptr) chosen[index] = layer;
        any = any || layer != nullptr;
        // Throws, naming the layers that exist.
        if (index >= checkpoint.num_hidden_layers()) checkpoint.layer(index);
      }
      if (!any) checkpoint.layer(item.first);
    }
  }
  std::vector<const CheckpointLayer*> selected;
  for (const auto& [index, layer] : chosen) {
    require_supported(*layer, checkpoint);
    selected.push_back(layer);
  }
  return selected;
}

void add_model_argument(Command& command, std::string& model_dir) {
  command
      .positional(kModelDir, model_dir,
                  "Hugging Face model directory, or a GGUF file (of a split model the first)")
      .required();
}

void add_layers_option(Command& command, std::string& layers) {
  command.text("-l,--layers", "LIST", layers, "Layers such as 0-3,7 (default: all)");
}

void add_extra_layers_option(Command& command, bool& extra_layers) {
  command.flag("--extra-layers", extra_layers,
               "Also the MoE layers beyond num_hidden_layers, for multi-token prediction");
}

void add_expert_set_option(Command& command, std::string& experts) {
  command.choice("--experts", experts, {"text", "vision"},
                 "Which experts, where a model has a set for text and one for images");
}

ExpertSet parse_expert_set(const std::string& experts) {
  return experts == "vision" ? ExpertSet::kVision : ExpertSet::kText;
}

}  // namespace conclave::tool
