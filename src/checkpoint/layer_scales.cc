// The part of LayerAssignment that handles the scales of quantised matrices.
#include "checkpoint/code_words.h"
#include "checkpoint/layer_assignment.h"
#include "core/layer_roles.h"
#include "core/weight_types.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

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

std::string render(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// Whether all roles of a fused tensor share one number.
bool is_single(const MoeSpec& spec, TensorKind kind) {
  return kind == TensorKind::kInputScale || spec.quant.weights == WeightScale::kTensor;
}

}  // namespace

std::optional<LayerAssignment::Match> LayerAssignment::match_scale(const LayerTensor& item) const {
  if (!item.canonical) return std::nullopt;
  const auto scale = match_scale_name(*config_.architecture, layer_.spec, item.rest);
  if (!scale) return std::nullopt;
  return Match{.name = scale->name, .tensor = item.tensor, .kind = scale->kind};
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
                         has_roles(roles_of(name->pattern->part, TensorKind::kScale));
    if (is_read && info.dtype == config_.quant->element) continue;
    if (foreign_.empty()) foreign_ = info.name;
    return true;
  }
  return false;
}

TensorBlock LayerAssignment::scale_block(const NamePattern& pattern, TensorKind kind) const {
  TensorBlock block = block_of(pattern);
  const std::vector<WeightRole> roles = roles_of(pattern.part, kind);
  const RoleShape first = shape_of(roles.front());
  block.rows =
      is_single(layer_.spec, kind) ? first.rows : first.rows * static_cast<int64_t>(roles.size());
  block.cols = first.cols;
  block.is_vector = false;
  return block;
}

Shapes LayerAssignment::scale_shapes(const NamePattern& pattern, TensorKind kind) const {
  TensorBlock block = scale_block(pattern, kind);
  if (axes_of(pattern) == AxisOrder::kColsFirst) std::swap(block.rows, block.cols);
  Shapes shapes;
  add_shapes(block, shapes);
  return shapes;
}

std::string LayerAssignment::expected_shape(const NamePattern& pattern, TensorKind kind) const {
  if (kind == TensorKind::kPlain) return expected_shape(pattern);
  return render(scale_shapes(pattern, kind).front());
}

std::string LayerAssignment::full_name(const NamePattern& pattern, TensorKind kind,
                                       int64_t expert) const {
  const std::string name = full_name(pattern, expert);
  const bool in_words = config_.quant && config_.quant->in_words && is_quantisable(pattern.part);
  if (kind == TensorKind::kPlain) return in_words ? words_name(name) : name;
  return usual_scale_name(name, kind, config_.quant_method);
}

void LayerAssignment::place_scale(const Match& match, int64_t expert) {
  const NamePattern& pattern = *match.name.pattern;
  const std::vector<WeightRole> roles = roles_of(pattern.part, match.kind);
  const TensorInfo& info = table_.info(match.tensor);
  const Shapes shapes = scale_shapes(pattern, match.kind);
  const auto reject = [&](const char* what, std::string hint) {
    throw Error(ErrorCode::kTensorShape, {.what = what,
                                          .file = table_.path_of(match.tensor),
                                          .tensor = info.name,
                                          .expected = render(shapes.front()),
                                          .found = render(info.shape),
                                          .hint = std::move(hint)});
  };
  if (std::find(shapes.begin(), shapes.end(), info.shape) == shapes.end()) {
    reject("scales do not fit their matrix", "quantization_config says what shares a scale");
  }
  const bool in_blocks = layer_.spec.quant.weights == WeightScale::kBlock;
  const bool fused = roles.size() > 1 && match.kind == TensorKind::kScale && in_blocks;
  const int64_t rows = shape_of(roles_of(pattern.part).front()).rows;
  if (fused &&
      (rows % layer_.spec.quant.block_rows != 0 || pattern.rows != RowOrder::kConcatenated)) {
    reject("blocks of a fused tensor hold rows of gate and of up",
           "store gate and up apart, or blocks of whole rows of each");
  }
  const TensorBlock block = scale_block(pattern, match.kind);
  const bool single = is_single(layer_.spec, match.kind);
  RoleShare share{.parts = single ? 1 : static_cast<int64_t>(roles.size())};
  for (const WeightRole role : roles) {
    for (share.index = 0; share.index < (block.is_stack ? block.count : 1); ++share.index) {
      fill(role, block.is_stack ? share.index : expert,
           locate(block, pattern, axes_of(pattern), share, match.tensor));
    }
    if (single) continue;
    ++share.part;
    share.rows_before += shape_of(role).rows;
  }
}

void LayerAssignment::check_scale_types() const {
  for (size_t i = 0; i < kNumRoles; ++i) {
    if (!is_scale_role(static_cast<WeightRole>(i)) || slots_[i].empty()) continue;
    const int32_t tensor = slots_[i].front().tensor;
    const TensorInfo& info = table_.info(tensor);
    if (is_plain(info.dtype) || info.dtype == DType::kF8E8M0) continue;
    throw Error(ErrorCode::kTensorDType, {.what = "scales of another type",
                                          .file = table_.path_of(tensor),
                                          .tensor = info.name,
                                          .expected = "F32, F16, BF16 or F8_E8M0",
                                          .found = std::string(to_string(info.dtype))});
  }
}

}  // namespace conclave::inline v0::checkpoint
