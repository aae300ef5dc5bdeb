#include "checkpoint/layer_planes.h"

#include "checkpoint/name_list.h"
#include "checkpoint/scale_names.h"
#include "checkpoint/tensor_name.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

namespace conclave::inline v0::checkpoint {
namespace {

// Throws the error, with what it says of the tensor in any case.
[[noreturn]] void reject(const LayerView& view, const TensorMatch& match, ErrorCode code,
                         ErrorDetail detail) {
  const TensorInfo& info = view.table.info(match.tensor);
  detail.file = view.table.path_of(match.tensor);
  detail.tensor = info.name;
  if (detail.found.empty()) detail.found = render_shape(info.shape);
  throw Error(code, std::move(detail));
}

// Whether the tensor belongs to a zero expert or to an expert of another modality.
bool is_surplus(const LayerView& view, const NameMatch& name) {
  if (!is_expert_part(name.pattern->part) || !has_expert_placeholder(name.pattern->text)) {
    return false;
  }
  const int64_t experts = view.layer.spec.num_experts;
  const bool two_sets = view.config.architecture->modality != Architecture::Modality::kOnly;
  const int64_t known = experts + view.layer.spec.num_zero_experts + (two_sets ? experts : 0);
  const int64_t number = name.expert - view.first_expert;
  return (number < 0 || number >= experts) && name.expert < known;
}

// The expert whose matrix the tensor is, from 0; 0 for a tensor that is not of one expert.
int64_t expert_of(const LayerView& view, const TensorMatch& match) {
  if (!has_expert_placeholder(match.name.pattern->text)) return 0;
  const int64_t expert = match.name.expert - view.first_expert;
  const int64_t count = view.layer.spec.num_experts;
  if (expert < count) return expert;
  reject(view, match, ErrorCode::kTensorUnexpected,
         {.what = "an expert beyond the number that config.json gives",
          .found = "expert " + std::to_string(match.name.expert),
          .limit = fmt::format("{} experts, 0 to {}", count, count - 1),
          .hint = "config.json and weights belong to different models"});
}

void fill(const LayerView& view, WeightId id, int64_t expert, const MatrixLocation& location,
          LayerPlanes& planes) {
  std::vector<MatrixLocation>& slots = planes.slots[id];
  const int64_t count = view.shapes[id].count;
  if (slots.empty()) slots.resize(static_cast<size_t>(count));
  MatrixLocation& slot = slots[static_cast<size_t>(expert)];
  if (slot.tensor >= 0) {
    const std::string expert_name = count > 1 ? fmt::format(" of expert {}", expert) : "";
    throw Error(ErrorCode::kTensorDuplicate,
                {.what = fmt::format("two tensors hold the {} matrix{} of layer {}", to_string(id),
                                     expert_name, view.layer.index),
                 .file = view.table.path_of(location.tensor),
                 .tensor = view.table.info(location.tensor).name,
                 .expected = "one tensor for each matrix",
                 .found = fmt::format("{} in {} too", view.table.info(slot.tensor).name,
                                      view.table.name_of(slot.tensor)),
                 .hint = "the file mixes two layouts or two saves of the model"});
  }
  slot = location;
}

// Adds the reading of a tensor that the method stores in a way of its own; -1 for others.
int32_t add_reading(const LayerView& view, const TensorMatch& match, const TensorBlock& block,
                    LayerPlanes& planes) {
  if (match.row == nullptr) return -1;
  const NamePattern& pattern = *match.name.pattern;
  WantedPlane wanted = wanted_plane(view, pattern, block);
  const bool has_values = !is_quantisable(pattern.part);
  wanted.as_values = has_values && match.row->decode_values != nullptr;
  planes.readings.push_back(read_as(*match.row, wanted, view.table, match.tensor));
  planes.readings.back().is_read = wanted.as_values || !has_values;
  return static_cast<int32_t>(planes.readings.size() - 1);
}

// Fills the matrices of the block, or their planes, from the tensor.
void fill_block(const LayerView& view, const TensorMatch& match, AxisOrder axes, int64_t expert,
                LayerPlanes& planes) {
  const NamePattern& pattern = *match.name.pattern;
  const TensorBlock block = block_of(view, pattern, match.plane);
  const std::vector<WeightId> ids = ids_of(pattern.part, match.plane);
  const bool shared = match.plane && is_common(view.shapes[ids.front()].plane);
  const int32_t reading = add_reading(view, match, block, planes);
  TensorShare share{.parts = shared ? 1 : static_cast<int64_t>(ids.size())};
  for (WeightId id : ids) {
    for (share.index = 0; share.index < (block.is_stack ? block.count : 1); ++share.index) {
      MatrixLocation location = locate(block, pattern, axes, share, match.tensor);
      location.reading = reading;
      fill(view, id, block.is_stack ? share.index : expert, location, planes);
    }
    if (shared) continue;
    ++share.part;
    share.rows_before += block.is_vector ? view.shapes[id].cols : view.shapes[id].rows;
  }
}

void check_matrix(const LayerView& view, const TensorMatch& match, AxisOrder axes) {
  const NamePattern& pattern = *match.name.pattern;
  const TensorInfo& info = view.table.info(match.tensor);
  if (match.row == nullptr && !fits(info.shape, block_of(view, pattern), pattern, axes)) {
    reject(view, match, ErrorCode::kTensorShape,
           {.what = "the shape does not fit config.json", .expected = usual_shape(view, pattern)});
  }
  if (axes == AxisOrder::kColsFirst && bit_size(info.dtype) < 8) {
    reject(view, match, ErrorCode::kUnsupportedQuantization,
           {.what = "codes narrower than a byte are stored by columns",
            .expected = "rows of " + std::string(to_string(info.dtype)) + " codes"});
  }
}

void check_plane(const LayerView& view, const LayerLayout& layout, const TensorMatch& match) {
  const NamePattern& pattern = *match.name.pattern;
  const auto expected = [&] { return expected_shape(view, layout, pattern, match.plane); };
  const auto fits_matrix = [&] {
    const auto shapes = plane_shapes(view, layout, pattern, *match.plane);
    return std::ranges::find(shapes, view.table.info(match.tensor).shape) != shapes.end();
  };
  if (match.row == nullptr && !fits_matrix()) {
    reject(view, match, ErrorCode::kTensorShape,
           {.what = "scales do not fit their matrix",
            .expected = expected(),
            .hint = "quantization_config says what shares a scale"});
  }
  const std::vector<WeightId> ids = ids_of(pattern.part, match.plane);
  const quant::PlaneShape& plane = view.shapes[ids.front()].plane;
  const bool fused = ids.size() > 1 && plane.block_rows > 1 && !is_common(plane);
  const int64_t rows = view.shapes[ids.front().with(WeightPlane::kWeights)].rows;
  if (fused && (rows % plane.block_rows != 0 || pattern.rows != RowOrder::kConcatenated)) {
    reject(view, match, ErrorCode::kTensorShape,
           {.what = "blocks of a fused tensor hold rows of gate and of up",
            .expected = expected(),
            .hint = "store gate and up apart, or blocks of whole rows of each"});
  }
}

void place(const LayerView& view, const LayerLayout& layout, const TensorMatch& match,
           LayerPlanes& planes) {
  const NamePattern& pattern = *match.name.pattern;
  if (pattern.part == Part::kNotRead || is_surplus(view, match.name)) return;
  const int64_t expert = expert_of(view, match);
  const AxisOrder axes =
      match.row != nullptr ? AxisOrder::kRowsFirst : axes_of(view, layout, pattern);
  if (match.plane) {
    check_plane(view, layout, match);
  } else {
    check_matrix(view, match, axes);
    const bool by_columns = is_expert_part(pattern.part) && axes == AxisOrder::kColsFirst;
    planes.transposed = planes.transposed || by_columns;
  }
  fill_block(view, match, axes, expert, planes);
}

// Completes the readings with the tensors that stand beside their own.
void find_inputs(const LayerView& view, LayerPlanes& planes) {
  std::unordered_map<std::string_view, int32_t> by_name;
  for (PlaneReading& reading : planes.readings) {
    const StoredPlane& row = *reading.row;
    const auto needed = reading.as_values ? row.value_inputs : row.inputs;
    const auto optional =
        reading.as_values ? std::span<const std::string_view>() : row.optional_inputs;
    if (needed.empty() && optional.empty()) continue;
    if (by_name.empty()) {
      for (const LayerTensor& item : view.items) {
        by_name.emplace(view.table.info(item.tensor).name, item.tensor);
      }
    }
    const std::string& name = view.table.info(reading.inputs.front()).name;
    const std::string matrix = name.substr(0, name.size() - row.suffix.size());
    const auto add = [&](std::string_view suffix) {
      const auto found = by_name.find(matrix + std::string(suffix));
      reading.inputs.push_back(found == by_name.end() ? -1 : found->second);
      return found != by_name.end();
    };
    for (const std::string_view suffix : needed) {
      if (!add(suffix)) planes.missing_inputs.push_back(matrix + std::string(suffix));
    }
    for (const std::string_view suffix : optional) add(suffix);
  }
}

}  // namespace

bool LayerPlanes::has(WeightId id, int64_t expert) const {
  return !slots[id].empty() && slots[id][static_cast<size_t>(expert)].tensor >= 0;
}

bool LayerPlanes::has_all(std::span<const WeightId> ids, int64_t expert) const {
  return std::ranges::all_of(ids, [&](WeightId id) { return has(id, expert); });
}

bool LayerPlanes::has_any_of(WeightId matrix, int64_t expert) const {
  return has(matrix, expert) || std::ranges::any_of(quant::kCodePlanes, [&](WeightPlane plane) {
           return has(matrix.with(plane), expert);
         });
}

const MatrixLocation* LayerPlanes::first(WeightId id) const {
  const auto found = std::ranges::find_if(
      slots[id], [](const MatrixLocation& matrix) { return matrix.tensor >= 0; });
  return found == slots[id].end() ? nullptr : &*found;
}

DType LayerPlanes::type_of(const TensorTable& table, const MatrixLocation& location) const {
  if (location.reading < 0) return table.info(location.tensor).dtype;
  return readings[static_cast<size_t>(location.reading)].dtype;
}

LayerPlanes place_tensors(const LayerView& view, const LayerLayout& layout,
                          std::span<const TensorMatch> matches) {
  LayerPlanes planes;
  for (const TensorMatch& match : matches) place(view, layout, match, planes);
  find_inputs(view, planes);
  return planes;
}

}  // namespace conclave::inline v0::checkpoint
