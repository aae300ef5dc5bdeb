// The part of LayerAssignment that handles what quantised matrices have beside their codes.
#include "checkpoint/code_words.h"
#include "checkpoint/layer_assignment.h"
#include "checkpoint/name_list.h"
#include "core/weight_types.h"

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
  const auto scale = match_scale_name(*config_.architecture, shapes_, item.rest);
  if (!scale) return std::nullopt;
  return Match{.name = scale->name, .tensor = item.tensor, .plane = scale->plane};
}

bool LayerAssignment::is_foreign_scale(const LayerTensor& item,
                                       std::span<const LayerTensor> items) {
  if (!config_.quant) return false;
  if (by_rest_.empty()) {
    for (const LayerTensor& other : items) by_rest_.emplace(other.rest, other.tensor);
  }
  for (const ScaleName& scale : scale_names(item.rest)) {
    const auto matrix = by_rest_.find(scale.matrix);
    if (matrix == by_rest_.end()) continue;
    const TensorInfo& info = table_.info(matrix->second);
    const auto name = match_name(*config_.architecture, scale.matrix,
                                 [this](const NamePattern& known) { return is_wanted(known); });
    if (!name || is_plain(info.dtype)) continue;
    // A surplus scale of a matrix that is read is a fault.
    const bool is_read = is_quantisable(name->pattern->part) &&
                         has_ids(ids_of(name->pattern->part, WeightPlane::kScale));
    if (is_read && info.dtype == config_.quant->element) continue;
    if (foreign_.empty()) foreign_ = info.name;
    return true;
  }
  return false;
}

TensorBlock LayerAssignment::plane_block(const NamePattern& pattern, WeightPlane plane) const {
  TensorBlock block = block_of(pattern);
  const std::vector<WeightId> ids = ids_of(pattern.part, plane);
  const quant::WeightShape& first = shapes_[ids.front()];
  block.rows = first.plane.is_single ? first.rows : first.rows * static_cast<int64_t>(ids.size());
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
  if (!plane) return expected_shape(pattern);
  return render_shape(plane_shapes(pattern, *plane).front());
}

std::string LayerAssignment::full_name(const NamePattern& pattern, std::optional<WeightPlane> plane,
                                       int64_t expert) const {
  const std::string name = full_name(pattern, expert);
  const bool in_words = config_.quant && config_.quant->in_words && is_quantisable(pattern.part);
  if (!plane) return in_words ? words_name(name) : name;
  return usual_scale_name(name, *plane, config_.quant_method);
}

void LayerAssignment::place_plane(const Match& match, int64_t expert) {
  const NamePattern& pattern = *match.name.pattern;
  const std::vector<WeightId> ids = ids_of(pattern.part, match.plane);
  const quant::PlaneShape& plane = shapes_[ids.front()].plane;
  const TensorInfo& info = table_.info(match.tensor);
  const Shapes shapes = plane_shapes(pattern, plane.plane);
  const auto reject = [&](const char* what, std::string hint) {
    throw Error(ErrorCode::kTensorShape, {.what = what,
                                          .file = table_.path_of(match.tensor),
                                          .tensor = info.name,
                                          .expected = render_shape(shapes.front()),
                                          .found = render_shape(info.shape),
                                          .hint = std::move(hint)});
  };
  if (std::find(shapes.begin(), shapes.end(), info.shape) == shapes.end()) {
    reject("scales do not fit their matrix", "quantization_config says what shares a scale");
  }
  const bool fused = ids.size() > 1 && plane.block_rows > 1 && !plane.is_single;
  const int64_t rows = shapes_[ids.front().with(WeightPlane::kWeights)].rows;
  if (fused && (rows % plane.block_rows != 0 || pattern.rows != RowOrder::kConcatenated)) {
    reject("blocks of a fused tensor hold rows of gate and of up",
           "store gate and up apart, or blocks of whole rows of each");
  }
  const TensorBlock block = plane_block(pattern, plane.plane);
  TensorShare share{.parts = plane.is_single ? 1 : static_cast<int64_t>(ids.size())};
  for (const WeightId id : ids) {
    for (share.index = 0; share.index < (block.is_stack ? block.count : 1); ++share.index) {
      fill(id, block.is_stack ? share.index : expert,
           locate(block, pattern, axes_of(pattern), share, match.tensor));
    }
    if (plane.is_single) continue;
    ++share.part;
    share.rows_before += shapes_[id].rows;
  }
}

void LayerAssignment::check_plane_types() const {
  for (const WeightId id : weights::kAll) {
    if (!quant::is_code_plane(id.plane()) || slots_[id].empty()) continue;
    const int32_t tensor = slots_[id].front().tensor;
    const TensorInfo& info = table_.info(tensor);
    if (is_stored_as(shapes_[id], info.dtype)) continue;
    throw Error(ErrorCode::kTensorDType, {.what = "scales of another type",
                                          .file = table_.path_of(tensor),
                                          .tensor = info.name,
                                          .expected = "F32, F16, BF16 or F8_E8M0",
                                          .found = std::string(to_string(info.dtype))});
  }
}

}  // namespace conclave::inline v0::checkpoint
