#include "checkpoint/layer_map.h"

#include "checkpoint/layer_assignment.h"
#include "checkpoint/layer_parts.h"
#include "checkpoint/layer_report.h"
#include "checkpoint/name_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>

namespace conclave::inline v0::checkpoint {
namespace {

// Tensors that are missing, over all layers.
struct Missing {
  std::vector<std::string> names;   // the first ten, with their expected shapes
  std::vector<std::string> strays;  // names in the same layers that no pattern knows
  std::string layer_summary;        // for the first incomplete layer
  int64_t count = 0;
};

void collect_missing(const LayerAssignment& layer, Missing& missing) {
  const int64_t count = count_missing(layer);
  if (count == 0) return;
  if (missing.count == 0) missing.layer_summary = summary(layer);
  missing.count += count;
  for (std::string& name : list_missing(layer, kMaxListedNames - missing.names.size())) {
    missing.names.push_back(std::move(name));
  }
  for (const int32_t stray : layer.strays) {
    missing.strays.push_back(layer.view.table.info(stray).name);
  }
}

[[noreturn]] void reject_missing(const TensorTable& table, const Missing& missing) {
  ErrorDetail detail;
  detail.file = table.listing;
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

void check_dense_layer(const ModelConfig& config, const TensorTable& table, int64_t layer,
                       std::span<const LayerTensor> tensors) {
  for (const LayerTensor& item : tensors) {
    const Architecture& architecture = *config.architecture;
    if (is_empty(table.info(item.tensor))) continue;
    if (!looks_like_expert(architecture, item.rest) && !is_router(architecture, item.rest))
      continue;
    std::vector<int64_t> moe_layers;
    for (const LayerConfig& moe_layer : config.layers) moe_layers.push_back(moe_layer.index);
    throw Error(
        ErrorCode::kTensorUnexpected,
        {.what = fmt::format("MoE weights in layer {}, which config.json makes dense", layer),
         .file = table.path_of(item.tensor),
         .tensor = table.info(item.tensor).name,
         .expected = "experts only in the layers " + render_ranges(moe_layers),
         .hint = "config.json and weights belong to different models"});
  }
}

// Calls `dense` or `moe` for each of `count` layers in order.
template <class Dense, class Moe>
void for_each_layer(const ModelConfig& config, size_t count, Dense dense, Moe moe) {
  auto next = config.layers.begin();
  for (int64_t layer = 0; layer < static_cast<int64_t>(count); ++layer) {
    if (next != config.layers.end() && next->index == layer) {
      moe(*next++);
    } else {
      dense(layer);
    }
  }
}

}  // namespace

std::vector<LayerMap> map_layers(const ModelConfig& config, const TensorTable& table,
                                 const LayerTensors& tensors) {
  std::vector<LayerMap> maps;
  maps.reserve(config.layers.size());
  Missing missing;
  LayerNaming usual;
  for_each_layer(
      config, tensors.layers.size(),
      [&](int64_t layer) {
        check_dense_layer(config, table, layer, tensors.layers[static_cast<size_t>(layer)]);
      },
      [&](const LayerConfig& layer) {
        if (layer.is_mixed) {
          if (missing.count == 0) maps.push_back(map_parts(config, table, tensors, layer));
          return;
        }
        LayerAssignment assignment = assign_layer(config, table, tensors, layer, usual);
        usual = assignment.layout.naming;
        collect_missing(assignment, missing);
        // An unknown name is reported only if nothing is missing; otherwise it serves as the hint.
        if (missing.count == 0) {
          check_strays(assignment);
          maps.push_back(finish_map(std::move(assignment)));
        }
      });
  if (missing.count > 0) reject_missing(table, missing);
  return maps;
}

LayerMap map_layer(const ModelConfig& config, const TensorTable& table, const LayerTensors& tensors,
                   const LayerConfig& layer) {
  if (layer.is_mixed) return map_parts(config, table, tensors, layer);
  LayerAssignment assignment = assign_layer(config, table, tensors, layer, {});
  Missing missing;
  collect_missing(assignment, missing);
  if (missing.count > 0) reject_missing(table, missing);
  check_strays(assignment);
  return finish_map(std::move(assignment));
}

std::vector<std::string> missing_tensors(const ModelConfig& config, const TensorTable& table,
                                         const LayerTensors& tensors, const LayerConfig& layer,
                                         size_t limit) {
  if (layer.is_mixed) return missing_of_parts(config, table, tensors, layer, limit);
  return list_missing(assign_layer(config, table, tensors, layer, {}), limit);
}

std::vector<LayerMap> survey_layers(const ModelConfig& config, const TensorTable& table,
                                    const LayerTensors& tensors) {
  std::vector<LayerMap> maps;
  for (const LayerConfig& layer : config.layers) {
    LayerMap map;
    map.index = layer.index;
    map.layout = "quantised";
    map.prefix = fmt::format("{}{}", tensors.layer_start(*config.architecture, layer.index),
                             config.architecture->bases.front());
    for (const LayerTensor& item : tensors.layers[static_cast<size_t>(layer.index)]) {
      if (!in_moe_block(*config.architecture, item.rest)) continue;
      map.bytes += table.info(item.tensor).bytes;
    }
    map.support = config.support ? layer.support : config.support;
    maps.push_back(std::move(map));
  }
  return maps;
}

}  // namespace conclave::inline v0::checkpoint
