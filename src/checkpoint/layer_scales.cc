// The part of LayerAssignment that handles what quantised matrices have beside their codes.
#include "checkpoint/layer_assignment.h"
#include "checkpoint/name_list.h"
#include "core/weight_types.h"
#include "quant/plane_types.h"

#include <algorithm>

namespace conclave::inline v0::checkpoint {
namespace {

using Shapes = std::vector<std::vector<int64_t>>;

// Trailing axes of size one may be left out, and a stack has one more axis in front.
void add_shapes(const TensorBlock& block, Shapes& shapes) {
  const auto add = [&](std::vector<int64_t> shape, int64_t count) {
    if (block.is_stack) shape.insert(shape.begin(), count);
    shapes.push_back(std::move(shape));
  };
  for (const int64_t count : {block.count, block.count + block.surplus}) {
    add({block.rows, block.cols}, count);
    if (block.cols == 1) add({block.rows}, count);
    if (block.cols == 1 && block.rows == 1) add({}, count);
    // ModelOpt also keeps the axes inside a block.
    add({block.rows, 1, block.cols, 1}, count);
    if (block.surplus == 0) return;
  }
}

}  // namespace

std::optional<LayerAssignment::Match> LayerAssignment::match_scale(const LayerTensor& item) const {
  if (!item.canonical) return std::nullopt;
  const auto scale = match_scale_name(*config_.architecture, quant_, shapes_, item.rest);
  if (!scale) return std::nullopt;
  return Match{
      .name = scale->name, .tensor = item.tensor, .plane = scale->plane, .row = scale->row};
}

bool LayerAssignment::is_aid(const LayerTensor& item) {
  if (!item.canonical) return false;
  if (!match_aid(*config_.architecture, quant_, shapes_, item.rest)) return false;
  bytes_ += table_.info(item.tensor).bytes;
  return true;
}

bool LayerAssignment::is_foreign_scale(const LayerTensor& item) {
  if (!quant_) return false;
  if (by_rest_.empty()) {
    for (const LayerTensor& other : items_) by_rest_.emplace(other.rest, other.tensor);
  }
  std::vector<std::string> matrices;
  for (StoredName& stored : stored_names(quant_, item.rest)) {
    matrices.push_back(std::move(stored.matrix));
  }
  for (ScaleName& scale : scale_names(item.rest)) matrices.push_back(std::move(scale.matrix));
  for (const std::string& matrix : matrices) {
    const auto found = by_rest_.find(matrix);
    if (found == by_rest_.end()) continue;
    const TensorInfo& info = table_.info(found->second);
    const auto name = match_name(*config_.architecture, matrix,
                                 [this](const NamePattern& known) { return is_wanted(known); });
    const DType type = type_as_codes(quant_, info);
    if (!name || is_plain(type)) continue;
    // A surplus scale of a matrix that is read is a fault.
    const bool is_read = is_quantisable(name->pattern->part) &&
                         has_ids(ids_of(name->pattern->part, WeightPlane::kScale));
    if (is_read && type == quant_->element) continue;
    if (foreign_.empty()) foreign_ = info.name;
    return true;
  }
  return false;
}

WantedPlane LayerAssignment::wanted_plane(const NamePattern& pattern,
                                          const TensorBlock& block) const {
  WantedPlane wanted{.form = {.rows = block.rows, .cols = block.cols, .quant = &*quant_},
                     .rows = block.rows,
                     .cols = block.cols,
                     .slices = block.is_stack ? block.count : 1,
                     .is_stack = block.is_stack,
                     .spec_type = quant_->element};
  const auto ids = ids_of(pattern.part);
  if (!ids.front().mlp()) return wanted;
  wanted.form.rows = 0;
  for (const WeightId id : ids) wanted.form.rows += shapes_[id].rows;
  wanted.form.cols = shapes_[ids.front()].cols;
  const WeightShape& scale = shapes_[ids.front().with(WeightPlane::kScale)];
  wanted.form.scale_rows =
      is_common(scale.plane) ? scale.rows : scale.rows * static_cast<int64_t>(ids.size());
  wanted.form.groups = scale.cols;
  wanted.form.group_cols = scale.plane.block_cols;
  return wanted;
}

int32_t LayerAssignment::add_reading(const Match& match, const TensorBlock& block) {
  if (match.row == nullptr) return -1;
  WantedPlane wanted = wanted_plane(*match.name.pattern, block);
  wanted.as_values =
      !is_quantisable(match.name.pattern->part) && match.row->decode_values != nullptr;
  readings_.push_back(read_as(*match.row, wanted, table_, match.tensor));
  find_inputs(readings_.back());
  return static_cast<int32_t>(readings_.size() - 1);
}

void LayerAssignment::find_inputs(PlaneReading& reading) {
  const StoredPlane& row = *reading.row;
  const auto needed = reading.as_values ? row.value_inputs : row.inputs;
  const auto optional =
      reading.as_values ? std::span<const std::string_view>() : row.optional_inputs;
  if (needed.empty() && optional.empty()) return;
  if (by_name_.empty()) {
    for (const LayerTensor& item : items_) {
      by_name_.emplace(table_.info(item.tensor).name, item.tensor);
    }
  }
  const std::string& name = table_.info(reading.inputs.front()).name;
  const std::string matrix = name.substr(0, name.size() - row.suffix.size());
  const auto add = [&](std::string_view suffix) {
    const auto found = by_name_.find(matrix + std::string(suffix));
    reading.inputs.push_back(found == by_name_.end() ? -1 : found->second);
    return found != by_name_.end();
  };
  for (const std::string_view suffix : needed) {
    if (!add(suffix)) missing_inputs_.push_back(matrix + std::string(suffix));
  }
  for (const std::string_view suffix : optional) add(suffix);
}

TensorBlock LayerAssignment::plane_block(const NamePattern& pattern, WeightPlane plane) const {
  TensorBlock block = block_of(pattern);
  const std::vector<WeightId> ids = ids_of(pattern.part, plane);
  const WeightShape& first = shapes_[ids.front()];
  block.rows = is_common(first.plane) ? first.rows : first.rows * static_cast<int64_t>(ids.size());
  block.cols = first.cols;
  block.is_vector = false;
  return block;
}

Shapes LayerAssignment::plane_shapes(const NamePattern& pattern, WeightPlane plane) const {
  TensorBlock block = plane_block(pattern, plane);
  if (axes_of(pattern) == AxisOrder::kColsFirst) std::swap(block.rows, block.cols);
  Shapes shapes;
  add_shapes(block, shapes);
  return shapes;
}

std::string LayerAssignment::expected_shape(const NamePattern& pattern,
                                            std::optional<WeightPlane> plane) const {
  if (const StoredPlane* const row = expected_row(pattern, plane)) {
    const TensorBlock block = plane ? plane_block(pattern, *plane) : block_of(pattern);
    return render_shape(shapes_of(*row, wanted_plane(pattern, block)).front());
  }
  if (!plane) return expected_shape(pattern);
  return render_shape(plane_shapes(pattern, *plane).front());
}

const StoredPlane* LayerAssignment::expected_row(const NamePattern& pattern,
                                                 std::optional<WeightPlane> plane) const {
  if (!is_quantisable(pattern.part)) return nullptr;
  if (!has_ids(ids_of(pattern.part, WeightPlane::kScale))) return nullptr;
  return row_of(quant_, pattern.text, plane.value_or(WeightPlane::kWeights));
}

std::string LayerAssignment::full_name(const NamePattern& pattern, std::optional<WeightPlane> plane,
                                       int64_t expert) const {
  const std::string name = full_name(pattern, expert);
  if (const StoredPlane* const row = expected_row(pattern, plane)) return stored_name(*row, name);
  if (!plane) return name;
  return usual_scale_name(name, *plane, config_.quant_method);
}

void LayerAssignment::place_plane(const Match& match, int64_t expert) {
  const NamePattern& pattern = *match.name.pattern;
  const std::vector<WeightId> ids = ids_of(pattern.part, match.plane);
  const quant::PlaneShape& plane = shapes_[ids.front()].plane;
  const AxisOrder axes = match.row != nullptr ? AxisOrder::kRowsFirst : axes_of(pattern);
  if (match.row == nullptr) check_plane_shape(match, plane);
  const bool fused = ids.size() > 1 && plane.block_rows > 1 && !is_common(plane);
  const int64_t rows = shapes_[ids.front().with(WeightPlane::kWeights)].rows;
  if (fused && (rows % plane.block_rows != 0 || pattern.rows != RowOrder::kConcatenated)) {
    reject_plane(match, "blocks of a fused tensor hold rows of gate and of up",
                 "store gate and up apart, or blocks of whole rows of each");
  }
  fill_block(match, plane_block(pattern, plane.plane), axes, expert);
}

void LayerAssignment::check_plane_shape(const Match& match, const quant::PlaneShape& plane) const {
  const Shapes shapes = plane_shapes(*match.name.pattern, plane.plane);
  const std::vector<int64_t>& found = table_.info(match.tensor).shape;
  if (std::find(shapes.begin(), shapes.end(), found) != shapes.end()) return;
  reject_plane(match, "scales do not fit their matrix",
               "quantization_config says what shares a scale");
}

void LayerAssignment::reject_plane(const Match& match, const char* what, std::string hint) const {
  const TensorInfo& info = table_.info(match.tensor);
  throw Error(ErrorCode::kTensorShape,
              {.what = what,
               .file = table_.path_of(match.tensor),
               .tensor = info.name,
               .expected = expected_shape(*match.name.pattern, match.plane),
               .found = render_shape(info.shape),
               .hint = std::move(hint)});
}

void LayerAssignment::check_plane_types() const {
  for (const WeightId id : weights::kAll) {
    if (!quant::is_code_plane(id.plane()) || slots_[id].empty()) continue;
    const MatrixLocation& first = *first_filled(id);
    const int32_t tensor = first.tensor;
    const DType type = type_of(first);
    if (is_stored_as(shapes_[id], type)) continue;
    throw Error(ErrorCode::kTensorDType,
                {.what = "scales of another type",
                 .file = table_.path_of(tensor),
                 .tensor = table_.info(tensor).name,
                 .expected = quant::show_types(quant::types_of(shapes_[id].type)),
                 .found = std::string(to_string(type))});
  }
}

}  // namespace conclave::inline v0::checkpoint
