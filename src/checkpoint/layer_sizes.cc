#include "checkpoint/layer_sizes.h"

#include "checkpoint/layer_names.h"
#include "checkpoint/name_list.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

// The tensors of a layer say this of its sizes.
struct Counted {
  int64_t rows = 0;     // that the router has; 0 without one
  int64_t experts = 0;  // one more than the largest number of an expert, or the stacks' first axis
  int32_t router = -1;
};

Counted count_experts(const Architecture& architecture, const TensorTable& table,
                      std::span<const LayerTensor> items) {
  Counted found;
  const auto any = [](const NamePattern&) { return true; };
  for (const LayerTensor& item : items) {
    const auto match = item.canonical ? match_name(architecture, item.rest, any) : std::nullopt;
    if (!match) continue;
    const std::vector<int64_t>& shape = table.info(item.tensor).shape;
    if (match->pattern->part == Part::kRouter && shape.size() == 2) {
      found.rows = shape[0];
      found.router = item.tensor;
    } else if (is_stack(*match->pattern) && !shape.empty()) {
      found.experts = std::max(found.experts, shape[0]);
    } else if (is_expert_part(match->pattern->part)) {
      found.experts = std::max(found.experts, match->expert + 1);
    }
  }
  return found;
}

void check_choices(const TensorTable& table, const LayerConfig& layer, const Counted& counted) {
  const MoeSpec& spec = layer.spec;
  if (spec.top_k <= counted.experts) return;
  throw Error(ErrorCode::kTensorShape,
              {.what = fmt::format("layer {} has fewer experts than a token chooses", layer.index),
               .file = table.path_of(counted.router),
               .tensor = table.info(counted.router).name,
               .expected = fmt::format("{} rows or more", spec.top_k),
               .found = fmt::format("{} rows", counted.rows)});
}

}  // namespace

void settle_experts(const LayerTensors& tensors, const TensorTable& table, ModelConfig& config) {
  std::vector<Counted> counted;
  for (const LayerConfig& layer : config.layers) {
    const auto& items = tensors.layers[static_cast<size_t>(layer.index)];
    counted.push_back(count_experts(*config.architecture, table, items));
  }
  const bool differ = std::ranges::any_of(
      counted, [&](const Counted& layer) { return layer.rows != counted.front().rows; });
  if (!differ) return;
  std::vector<int64_t> changed;
  for (size_t i = 0; i < counted.size(); ++i) {
    LayerConfig& layer = config.layers[i];
    const bool is_plain = num_logits(layer.spec) == layer.spec.num_experts;
    const bool agree = counted[i].rows == counted[i].experts && counted[i].rows > 0;
    if (!is_plain || !agree || counted[i].rows == layer.spec.num_experts) continue;
    if (layer.spec.router.num_groups > 1) continue;
    check_choices(table, layer, counted[i]);
    layer.spec.num_experts = counted[i].rows;
    changed.push_back(layer.index);
  }
  if (changed.empty()) return;
  config.notes.push_back(
      fmt::format("layers {} have as many experts as their routers have rows, not as many as the "
                  "configuration says",
                  render_ranges(changed)));
}

}  // namespace conclave::inline v0::checkpoint
