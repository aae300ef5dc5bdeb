#include "checkpoint/layer_planes.h"

#include "checkpoint/coded_values.h"
#include "checkpoint/methods/inputs.h"
#include "checkpoint/name_list.h"
#include "checkpoint/scale_names.h"
#include "checkpoint/tensor_name.h"
#include "quant/scale_type.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>

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

// The layer's tensors by their names, listed when the first is looked for.
class NamedTensors {
 public:
  explicit NamedTensors(const LayerView& view) : view_(view) {}

  const TensorsByName& all() {
    if (!by_name_.empty()) return by_name_;
    for (const LayerTensor& item : view_.items) {
      by_name_.emplace(view_.table.info(item.tensor).name, item.tensor);
    }
    return by_name_;
  }

 private:
  const LayerView& view_;
  TensorsByName by_name_;
};

// The form of a matrix that is packed as experts' are, though the layer has it as values; null for
// others, and where the method decodes such matrices itself.
const std::optional<QuantizedWeights>* packed_form(const LayerView& view, const TensorMatch& match,
                                                   const TensorBlock& block) {
  if (match.plane || is_quantisable(match.name.pattern->part)) return nullptr;
  if (match.row != nullptr && match.row->decode_values != nullptr) return nullptr;
  if (block.is_stack || block.is_vector) return nullptr;
  const TensorInfo& info = view.table.info(match.tensor);
  const auto* const form =
      form_of_values({.model = view.config.quant, .layer = view.quant}, info.name);
  return form != nullptr && holds_codes(**form, match.row, info) ? form : nullptr;
}

// Adds the reading of a tensor that the method stores in a way of its own; -1 for others.
int32_t add_reading(const LayerView& view, const TensorMatch& match, const TensorBlock& block,
                    NamedTensors& names, LayerPlanes& planes) {
  const NamePattern& pattern = *match.name.pattern;
  if (const auto* const form = packed_form(view, match, block)) {
    const CodesTensor codes{.quant = **form,
                            .row = match.row,
                            .tensor = match.tensor,
                            .rows = block.rows,
                            .cols = block.cols};
    planes.readings.push_back(
        read_codes_as_values(view, codes, names.all(), planes.missing_inputs));
  } else if (match.row != nullptr) {
    WantedPlane wanted = wanted_plane(view, pattern, block);
    const bool has_values = !is_quantisable(pattern.part);
    wanted.as_values = has_values && match.row->decode_values != nullptr;
    planes.readings.push_back(read_as(*match.row, wanted, view.table, match.tensor));
    planes.readings.back().is_read = wanted.as_values || !has_values;
  } else {
    return -1;
  }
  return static_cast<int32_t>(planes.readings.size() - 1);
}

DType scale_type(const LayerView& view, const TensorMatch& match) {
  const DType stored = view.table.info(match.tensor).dtype;
  if (view.quant) return quant::scale_type_of(view.quant->element, view.quant->spec, stored);
  return quant::scale_type_of(view.layer.spec.weight_dtype, view.layer.spec.quant, stored);
}

// Fills the matrices of the block, or their planes, from the tensor.
void fill_block(const LayerView& view, const TensorMatch& match, AxisOrder axes, int64_t expert,
                NamedTensors& names, LayerPlanes& planes) {
  const NamePattern& pattern = *match.name.pattern;
  const TensorBlock block = block_of(view, pattern, match.plane);
  const std::vector<WeightId> ids = ids_of(pattern.part, match.plane);
  const bool shared = match.plane && is_common(view.shapes[ids.front()].plane);
  const int32_t reading = add_reading(view, match, block, names, planes);
  TensorShare share{.parts = shared ? 1 : static_cast<int64_t>(ids.size())};
  for (WeightId id : ids) {
    for (share.index = 0; share.index < (block.is_stack ? block.count : 1); ++share.index) {
      MatrixLocation location = locate(block, pattern, axes, share, match.tensor);
      location.reading = reading;
      if (reading < 0 && match.plane == WeightPlane::kScale)
        location.type = scale_type(view, match);
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

// Groups end where rows do, unless the method may have a partial last one.
void check_groups(const LayerView& view, const NamePattern& pattern, WeightId id) {
  if (!view.quant || !view.quant->whole_groups) return;
  const int64_t width = view.shapes[id].plane.block_cols;
  const int64_t cols = view.shapes[id.with(WeightPlane::kWeights)].cols;
  if (view.layer.spec.quant.weights != WeightScale::kBlock || cols % width == 0) return;
  const GroupKey& key = *view.quant->whole_groups;
  throw Error(ErrorCode::kConfigValue,
              {.what = "groups of columns do not fill the rows of a matrix",
               .file = key.file,
               .tensor = key.path,
               .found = std::to_string(width),
               .limit = fmt::format("a divisor of {}, the columns of {}", cols, pattern.text)});
}

void check_plane(const LayerView& view, const LayerLayout& layout, const TensorMatch& match) {
  const NamePattern& pattern = *match.name.pattern;
  if (match.plane == WeightPlane::kScale || match.plane == WeightPlane::kZero) {
    check_groups(view, pattern, ids_of(pattern.part, match.plane).front());
  }
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
           NamedTensors& names, LayerPlanes& planes) {
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
  fill_block(view, match, axes, expert, names, planes);
}

// Completes the readings with the tensors that stand beside their own.
void find_inputs(const LayerView& view, NamedTensors& names, LayerPlanes& planes) {
  for (PlaneReading& reading : planes.readings) {
    if (reading.coded) continue;
    const StoredPlane& row = *reading.row;
    const bool has_needs = !(reading.as_values ? row.value_inputs : row.inputs).empty();
    const bool has_options = !reading.as_values && !row.optional_inputs.empty();
    if (!has_needs && !has_options) continue;
    add_inputs(view.table, names.all(), reading, planes.missing_inputs);
  }
}

// In a layer all codes lie in words in one way, which tensors tell whose shapes fit only one.
void settle_words(const LayerView& view, LayerPlanes& planes) {
  WordLayout known = WordLayout::kEither;
  int32_t first = -1;
  for (const PlaneReading& reading : planes.readings) {
    if (reading.coded || reading.row->words == nullptr) continue;
    const int32_t tensor = reading.inputs.front();
    const TensorInfo& info = view.table.info(tensor);
    const WordLayout own = reading.row->words(reading.form, info.shape);
    if (own != WordLayout::kAcross && own != WordLayout::kWhole) continue;
    if (first >= 0 && own != known) {
      throw Error(ErrorCode::kTensorShape,
                  {.what = "codes of a layer lie in words in two ways",
                   .file = view.table.path_of(tensor),
                   .tensor = info.name,
                   .expected = "words as those of " + view.table.info(first).name,
                   .found = render_shape(info.shape)});
    }
    known = own;
    first = tensor;
  }
  for (PlaneReading& reading : planes.readings) {
    if (reading.coded || reading.row->words == nullptr) continue;
    const int32_t tensor = reading.inputs.front();
    const TensorInfo& info = view.table.info(tensor);
    reading.form.words = known;
    const bool is_open =
        known == WordLayout::kEither && reading.form.quant->stored.words == WordLayout::kEither;
    if (is_open && reading.row->words(reading.form, info.shape) == WordLayout::kEither) {
      reject_words(view.table.path_of(tensor), info);
    }
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
  if (location.type) return *location.type;
  if (location.reading < 0) return table.info(location.tensor).dtype;
  return readings[static_cast<size_t>(location.reading)].dtype;
}

LayerPlanes place_tensors(const LayerView& view, const LayerLayout& layout,
                          std::span<const TensorMatch> matches) {
  LayerPlanes planes;
  NamedTensors names(view);
  for (const TensorMatch& match : matches) place(view, layout, match, names, planes);
  find_inputs(view, names, planes);
  settle_words(view, planes);
  return planes;
}

}  // namespace conclave::inline v0::checkpoint
