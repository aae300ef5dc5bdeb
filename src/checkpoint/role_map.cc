#include "checkpoint/role_map.h"

#include "checkpoint/layer_assignment.h"
#include "checkpoint/name_list.h"
#include "checkpoint/tensor_name.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>

namespace conclave::inline v0::checkpoint {
namespace {

// Tensors that should be there and are not, over all layers.
struct Missing {
  std::vector<std::string> names;   // the first ten, with the shape expected
  std::vector<std::string> strays;  // names nobody knows in the same layers
  std::string layer_summary;        // of the first incomplete layer
  int64_t count = 0;
};

void collect_missing(const LayerAssignment& layer, Missing& missing) {
  const int64_t count = layer.missing_count();
  if (count == 0) return;
  if (missing.count == 0) missing.layer_summary = layer.summary();
  missing.count += count;
  for (std::string& name : layer.missing(kMaxListedNames - missing.names.size())) {
    missing.names.push_back(std::move(name));
  }
  for (const std::string& name : layer.stray_names()) missing.strays.push_back(name);
}

[[noreturn]] void reject_missing(const ShardSet& shards, const Missing& missing) {
  ErrorDetail detail;
  detail.file = shards.listing;
  const std::string& first = missing.names.front();
  detail.tensor = first.substr(0, first.find(' '));
  if (missing.count == 1) {
    detail.what = "a tensor of the model is missing";
    detail.expected = first.substr(std::min(first.size(), first.find(' ') + 1));
  } else {
    detail.what =
        fmt::format("this and {} more tensors of the model are missing", missing.count - 1);
    detail.expected = first_few(missing.names);
    if (missing.count > static_cast<int64_t>(missing.names.size())) {
      detail.expected +=
          fmt::format(" and {} more", missing.count - static_cast<int64_t>(missing.names.size()));
    }
  }
  detail.found = missing.layer_summary;
  if (!missing.strays.empty()) {
    detail.hint = "names there that no pattern knows: " + first_few(missing.strays, 3);
  }
  throw Error(ErrorCode::kTensorMissing, std::move(detail));
}

void check_dense_layer(const ModelConfig& config, const ShardSet& shards, int64_t layer,
                       std::span<const LayerTensor> tensors) {
  for (const LayerTensor& item : tensors) {
    const auto& once = config.architecture->once;
    const bool moe = looks_like_expert(*config.architecture, item.rest) ||
                     std::any_of(once.begin(), once.end(), [&](const NamePattern& pattern) {
                       return match_pattern(pattern.text, item.rest).has_value();
                     });
    if (!moe) continue;
    const StoredTensor& tensor = shards.tensors[static_cast<size_t>(item.tensor)];
    std::vector<int64_t> moe_layers;
    for (const LayerConfig& moe_layer : config.layers) moe_layers.push_back(moe_layer.index);
    throw Error(
        ErrorCode::kTensorUnexpected,
        {.what = fmt::format("MoE weights in layer {}, which config.json makes dense", layer),
         .file = shards.files[static_cast<size_t>(tensor.shard)].path().string(),
         .tensor = tensor.info->name,
         .expected = "experts only in the layers " + render_ranges(moe_layers),
         .hint = "config.json and weights belong to different models"});
  }
}

// Calls `dense` or `moe` for each layer in order.
template <class Dense, class Moe>
void for_each_layer(const ModelConfig& config, Dense dense, Moe moe) {
  auto next = config.layers.begin();
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (next != config.layers.end() && next->index == layer) {
      moe(*next++);
    } else {
      dense(layer);
    }
  }
}

}  // namespace

std::vector<LayerMap> map_roles(const ModelConfig& config, const ShardSet& shards,
                                const LayerTensors& tensors) {
  std::vector<LayerMap> maps;
  maps.reserve(config.layers.size());
  Missing missing;
  const ExpertForm* usual_form = &config.architecture->expert_forms.front();
  for_each_layer(
      config,
      [&](int64_t layer) {
        check_dense_layer(config, shards, layer, tensors.layers[static_cast<size_t>(layer)]);
      },
      [&](const LayerConfig& layer) {
        LayerAssignment assignment(config, shards, tensors, layer, *usual_form);
        collect_missing(assignment, missing);
        // An unknown name is news only where nothing is missing: otherwise it is the hint.
        if (missing.count == 0) {
          assignment.check_strays();
          maps.push_back(assignment.finish());
        }
        usual_form = &assignment.form();
      });
  if (missing.count > 0) reject_missing(shards, missing);
  return maps;
}

std::vector<LayerMap> survey_layers(const ModelConfig& config, const ShardSet& shards,
                                    const LayerTensors& tensors) {
  std::vector<LayerMap> maps;
  for (const LayerConfig& layer : config.layers) {
    LayerMap map;
    map.index = layer.index;
    map.layout = "quantised";
    map.prefix = fmt::format("{}{}.{}.{}.", tensors.trunk, config.architecture->layers, layer.index,
                             config.architecture->blocks.front());
    for (const LayerTensor& item : tensors.layers[static_cast<size_t>(layer.index)]) {
      if (!in_moe_block(*config.architecture, item.rest)) continue;
      map.bytes += shards.tensors[static_cast<size_t>(item.tensor)].info->bytes;
    }
    map.support = config.support;
    maps.push_back(std::move(map));
  }
  return maps;
}

}  // namespace conclave::inline v0::checkpoint
