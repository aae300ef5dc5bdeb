#include "checkpoint/layer_assignment.h"

#include "core/weight_types.h"
#include "quant/plane_types.h"
#include "routing/router_tensors.h"

#include <fmt/format.h>

#include <array>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array kExpertMatrices = {weights::kGate, weights::kUp, weights::kDown};
constexpr std::array kSharedMatrices = {weights::kSharedGate, weights::kSharedUp,
                                        weights::kSharedDown};

void check_same_type(const TensorTable& table, const LayerPlanes& planes,
                     std::span<const WeightId> ids) {
  const MatrixLocation* reference = nullptr;
  for (WeightId id : ids) {
    for (const MatrixLocation& matrix : planes.slots[id]) {
      if (matrix.tensor < 0) continue;
      if (reference == nullptr) reference = &matrix;
      const DType type = planes.type_of(table, matrix);
      const DType expected = planes.type_of(table, *reference);
      if (type == expected) continue;
      throw Error(ErrorCode::kTensorDType,
                  {.what = "weights that are used together are stored in different types",
                   .file = table.path_of(matrix.tensor),
                   .tensor = table.info(matrix.tensor).name,
                   .expected = fmt::format("{}, as {}", to_string(expected),
                                           table.info(reference->tensor).name),
                   .found = std::string(to_string(type))});
    }
  }
}

void check_plane_types(const LayerView& view, const LayerPlanes& planes) {
  for (const WeightId id : weights::kAll) {
    if (!quant::is_code_plane(id.plane()) || planes.slots[id].empty()) continue;
    const MatrixLocation& first = *planes.first(id);
    const DType type = planes.type_of(view.table, first);
    if (is_stored_as(view.shapes[id], type)) continue;
    throw Error(ErrorCode::kTensorDType,
                {.what = "scales of another type",
                 .file = view.table.path_of(first.tensor),
                 .tensor = view.table.info(first.tensor).name,
                 .expected = quant::show_types(quant::types_of(view.shapes[id].type)),
                 .found = std::string(to_string(type))});
  }
}

void check_types(const LayerView& view, const LayerPlanes& planes) {
  for (const WeightId id : weights::kAll) {
    if (planes.slots[id].size() > 1) check_same_type(view.table, planes, std::span(&id, 1));
  }
  check_same_type(view.table, planes, kExpertMatrices);
  check_same_type(view.table, planes, kSharedMatrices);
  check_plane_types(view, planes);
}

// Codes are accepted only for matrices that the spec says are quantised.
bool is_type_of(const WeightShape& shape, DType dtype) {
  const WeightId id = shape.id;
  const routing::RouterTensor* const own = routing::find_router_tensor(id);
  if (own != nullptr && own->element == routing::RouterElement::kIndex) {
    return dtype == DType::kI32 || dtype == DType::kI64;
  }
  if (quant::is_code_plane(id.plane()) || is_plain(dtype)) return true;
  const bool may_be_codes = id.mlp() == WeightMlp::kRouted || id.mlp() == WeightMlp::kShared;
  if (!may_be_codes || id.plane() != WeightPlane::kWeights) return false;
  return dtype == shape.dtype;
}

Support type_support(const LayerView& view, const std::string& foreign, const LayerPlanes& planes,
                     const WeightTable<StoredMatrices>& stored) {
  if (!foreign.empty()) {
    return Support::no(foreign +
                       " is quantised; this version reads codes of matrices of experts and shared "
                       "experts, and all others in F32, F16 or BF16");
  }
  for (const WeightId id : weights::kAll) {
    const WeightInfo& info = stored[id].info;
    if (info.count == 0 || is_type_of(view.shapes[id], info.dtype)) continue;
    return Support::no(fmt::format("{} is stored as {}; this version runs F32, F16 and BF16",
                                   view.table.info(planes.first(id)->tensor).name,
                                   to_string(info.dtype)));
  }
  if (view.layer.is_part) return Support::yes();  // the layer has them in another form
  const WeightInfo& shared = stored[weights::kSharedDown].info;
  const DType expert_type = stored[weights::kDown].info.dtype;
  if (shared.count == 0 || shared.dtype == expert_type) return Support::yes();
  if (!is_plain(expert_type)) return Support::yes();
  return Support::no(fmt::format("the shared expert is stored as {}, the routed experts as {}",
                                 to_string(shared.dtype), to_string(expert_type)));
}

}  // namespace

LayerAssignment assign_layer(const ModelConfig& config, const TensorTable& table,
                             const LayerTensors& tensors, const LayerConfig& layer,
                             const LayerNaming& usual) {
  LayerView view = view_layer(config, table, tensors, layer);
  LayerMatches matches = match_tensors(view);
  LayerLayout layout = choose_layout(view, matches.tensors, usual);
  LayerPlanes planes = place_tensors(view, layout, matches.tensors);
  return {.view = std::move(view),
          .layout = layout,
          .planes = std::move(planes),
          .strays = std::move(matches.strays),
          .foreign = std::move(matches.foreign),
          .bytes = matches.bytes};
}

LayerMap finish_map(LayerAssignment assignment) {
  const LayerView& view = assignment.view;
  const LayerNaming& naming = assignment.layout.naming;
  LayerPlanes& planes = assignment.planes;
  check_types(view, planes);
  LayerMap map;
  map.index = view.layer.index;
  map.prefix = view.prefix;
  map.prefix += view.config.architecture->bases[static_cast<size_t>(naming.base)];
  map.layout = naming.form->name;
  if (planes.transposed && map.layout.starts_with("stacked")) map.layout += "_transposed";
  map.bytes = assignment.bytes;
  map.support = view.config.support ? view.layer.support : view.config.support;
  for (const WeightId id : weights::kAll) {
    if (planes.slots[id].empty()) continue;
    map.stored[id].info = {.count = static_cast<int64_t>(planes.slots[id].size()),
                           .rows = view.shapes[id].rows,
                           .cols = view.shapes[id].cols,
                           .dtype = planes.type_of(view.table, *planes.first(id))};
  }
  if (map.support) map.support = type_support(view, assignment.foreign, planes, map.stored);
  for (const WeightId id : weights::kAll) map.stored[id].matrices = std::move(planes.slots[id]);
  map.readings = std::move(planes.readings);
  return map;
}

}  // namespace conclave::inline v0::checkpoint
