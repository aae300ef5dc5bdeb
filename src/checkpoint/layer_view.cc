#include "checkpoint/layer_view.h"

#include "checkpoint/scale_names.h"
#include "checkpoint/tensor_name.h"

namespace conclave::inline v0::checkpoint {

LayerView view_layer(const ModelConfig& config, const TensorTable& table,
                     const LayerTensors& tensors, const LayerConfig& layer) {
  const bool second = config.architecture->modality == Architecture::Modality::kSecond;
  return {.config = config,
          .table = table,
          .layer = layer,
          .quant = layer.quant != nullptr ? *layer.quant : config.quant,
          .items = tensors.layers[static_cast<size_t>(layer.index)],
          .shapes = layer_shapes(layer.spec),
          .prefix = tensors.layer_start(*config.architecture, layer.index),
          .first_expert = second ? layer.spec.num_experts : 0};
}

bool is_wanted(const LayerView& view, const NamePattern& pattern) {
  return has_all(view.shapes, ids_of(pattern.part));
}

TensorBlock block_of(const LayerView& view, const NamePattern& pattern,
                     std::optional<WeightPlane> plane) {
  TensorBlock block;
  for (WeightId id : ids_of(pattern.part)) {
    const WeightShape& shape = view.shapes[id];
    block.count = shape.count;
    block.is_vector = shape.is_vector;
    block.rows += shape.is_vector ? shape.cols : shape.rows;
    block.cols = shape.is_vector ? 1 : shape.cols;
  }
  const MoeSpec& spec = view.layer.spec;
  const bool shared_stack =
      !is_expert_part(pattern.part) && spec.shared.count > 1 && block.count == spec.shared.count;
  block.is_stack = is_stack(pattern) || shared_stack;
  if (is_stack(pattern)) block.surplus = spec.num_zero_experts;
  if (!plane) return block;
  const std::vector<WeightId> ids = ids_of(pattern.part, plane);
  const WeightShape& first = view.shapes[ids.front()];
  block.rows = is_common(first.plane) ? first.rows : first.rows * static_cast<int64_t>(ids.size());
  block.cols = first.cols;
  block.is_vector = false;
  return block;
}

WantedPlane wanted_plane(const LayerView& view, const NamePattern& pattern,
                         const TensorBlock& block) {
  WantedPlane wanted{.form = {.rows = block.rows, .cols = block.cols, .quant = &*view.quant},
                     .rows = block.rows,
                     .cols = block.cols,
                     .slices = block.is_stack ? block.count : 1,
                     .is_stack = block.is_stack,
                     .spec_type = view.quant->element};
  const auto ids = ids_of(pattern.part);
  if (!ids.front().mlp()) return wanted;
  wanted.form.rows = 0;
  for (const WeightId id : ids) wanted.form.rows += view.shapes[id].rows;
  wanted.form.cols = view.shapes[ids.front()].cols;
  const WeightShape& scale = view.shapes[ids.front().with(WeightPlane::kScale)];
  wanted.form.scale_rows =
      is_common(scale.plane) ? scale.rows : scale.rows * static_cast<int64_t>(ids.size());
  wanted.form.groups = scale.cols;
  wanted.form.group_cols = scale.plane.block_cols;
  return wanted;
}

const StoredPlane* expected_row(const LayerView& view, const NamePattern& pattern,
                                std::optional<WeightPlane> plane) {
  if (!is_quantisable(pattern.part)) return nullptr;
  if (!has_all(view.shapes, ids_of(pattern.part, WeightPlane::kScale))) return nullptr;
  return row_of(view.quant, pattern.text, plane.value_or(WeightPlane::kWeights));
}

}  // namespace conclave::inline v0::checkpoint
