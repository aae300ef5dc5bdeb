#include "checkpoint/coded_values.h"

#include "checkpoint/layer_source.h"
#include "checkpoint/methods/module_rules.h"
#include "checkpoint/module_names.h"
#include "checkpoint/name_list.h"
#include "checkpoint/scale_names.h"
#include "core/weight_types.h"
#include "quant/plane_types.h"
#include "quant/scale_type.h"

#include "conclave/error.h"
#include "conclave/quantise.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

// Its planes depend on no other matrix.
constexpr WeightId kOnly = weights::kDown;

// The form for rows that stay as they are: steps of rows are of no use.
QuantSpec without_rows(const QuantSpec& spec) {
  QuantSpec plain = spec;
  const QuantSpec usual;
  plain.activations = usual.activations;
  plain.activation_group = usual.activation_group;
  plain.activation_dtype = usual.activation_dtype;
  plain.activation_scale_rule = usual.activation_scale_rule;
  return plain;
}

// Scales may be stored without axes of size one, or with those inside a block.
StoredShapes usual_shapes(const quant::PlaneShape& plane) {
  StoredShapes shapes = {{plane.rows, plane.cols}};
  if (plane.cols == 1) shapes.push_back({plane.rows});
  if (plane.cols == 1 && plane.rows == 1) shapes.emplace_back();
  shapes.push_back({plane.rows, 1, plane.cols, 1});
  return shapes;
}

class PlaneFinder {
 public:
  PlaneFinder(const LayerView& view, const CodesTensor& codes, const TensorsByName& by_name,
              std::vector<std::string>& missing)
      : view_(view),
        codes_(codes),
        by_name_(by_name),
        missing_(missing),
        spec_(without_rows(codes.quant.spec)) {
    const TensorInfo& info = view.table.info(codes.tensor);
    matrix_ = codes.row != nullptr ? matrix_of(*codes.row, info.name) : info.name;
    const quant::PlaneShape scale =
        quant::plane_of(WeightPlane::kScale, codes.quant.element, spec_, codes.rows, codes.cols);
    form_ = {.rows = codes.rows,
             .cols = codes.cols,
             .scale_rows = scale.rows,
             .groups = scale.cols,
             .group_cols = scale.block_cols,
             .quant = &codes.quant};
  }

  PlaneReading find() {
    auto coded = std::make_shared<CodedMatrix>();
    coded->spec = spec_;
    PlaneReading values{.row = codes_.row,
                        .form = form_,
                        .dtype = DType::kF32,
                        .slice_elements = codes_.rows * codes_.cols,
                        .inputs = {codes_.tensor},
                        .as_values = true};
    for (const quant::PlaneShape& plane :
         quant::planes_of(codes_.quant.element, spec_, codes_.rows, codes_.cols)) {
      const bool is_codes = plane.plane == WeightPlane::kWeights;
      const auto [tensor, row] =
          is_codes ? Found{.tensor = codes_.tensor, .row = codes_.row} : tensor_of(plane);
      if (tensor >= 0) add(plane, tensor, row, coded->planes);
      if (tensor >= 0 && !is_codes) values.inputs.push_back(tensor);
    }
    for (const PlaneReading& reading : coded->planes.readings) {
      std::copy(reading.inputs.begin() + 1, reading.inputs.end(),
                std::back_inserter(values.inputs));
    }
    values.coded = std::move(coded);
    return values;
  }

 private:
  struct Found {
    int32_t tensor = -1;
    const StoredPlane* row = nullptr;  // null: under a usual name
  };

  static std::string matrix_of(const StoredPlane& row, std::string_view name) {
    return std::string(name.substr(0, name.size() - row.suffix.size())).append(row.ending);
  }

  // Two names for a plane are two claims about it.
  Found tensor_of(const quant::PlaneShape& plane) {
    Found found;
    std::string first;
    const auto consider = [&](const std::string& name, const StoredPlane* row) {
      if (first.empty()) first = name;
      const auto at = by_name_.find(name);
      if (at == by_name_.end()) return;
      if (found.tensor >= 0) reject_second(at->second, found.tensor);
      found = {.tensor = at->second, .row = row};
    };
    for (const StoredPlane& row : codes_.quant.planes) {
      const bool is_plane = row.use == StoredPlane::Use::kPlane && row.plane == plane.plane;
      if (is_plane && matrix_.ends_with(row.ending)) consider(stored_name(row, matrix_), &row);
    }
    if (first.empty()) {
      first = usual_scale_name(matrix_, plane.plane, view_.config.quant_method);
      for (const std::string& name : usual_names(matrix_, plane.plane)) consider(name, nullptr);
    }
    if (found.tensor < 0 && !plane.is_optional) missing_.push_back(first);
    return found;
  }

  void add(const quant::PlaneShape& plane, int32_t tensor, const StoredPlane* row, LayerMap& map) {
    MatrixLocation location{.tensor = tensor, .row_stride = plane.cols, .col_stride = 1};
    DType type = view_.table.info(tensor).dtype;
    if (row != nullptr) {
      PlaneReading reading = read_as(*row,
                                     {.form = form_,
                                      .rows = plane.rows,
                                      .cols = plane.cols,
                                      .spec_type = codes_.quant.element},
                                     view_.table, tensor);
      add_inputs(view_.table, by_name_, reading, missing_);
      type = reading.dtype;
      location.reading = static_cast<int32_t>(map.readings.size());
      map.readings.push_back(std::move(reading));
    } else {
      check_shape(plane, tensor);
      if (plane.plane == WeightPlane::kScale) {
        type = quant::scale_type_of(codes_.quant.element, codes_.quant.spec, type);
      }
    }
    check_type(plane, tensor, type);
    map.stored[kOnly.with(plane.plane)] = {
        .info = {.count = 1, .rows = plane.rows, .cols = plane.cols, .dtype = type},
        .matrices = {location}};
  }

  void check_shape(const quant::PlaneShape& plane, int32_t tensor) const {
    const StoredShapes shapes = usual_shapes(plane);
    const std::vector<int64_t>& shape = view_.table.info(tensor).shape;
    if (std::ranges::find(shapes, shape) != shapes.end()) return;
    throw Error(ErrorCode::kTensorShape, {.what = "scales do not fit their matrix",
                                          .file = view_.table.path_of(tensor),
                                          .tensor = view_.table.info(tensor).name,
                                          .expected = render_shape(shapes.front()),
                                          .found = render_shape(shape),
                                          .hint = "quantization_config says what shares a scale"});
  }

  void check_type(const quant::PlaneShape& plane, int32_t tensor, DType type) const {
    if (plane.plane == WeightPlane::kWeights) return;
    const auto types = quant::types_of(plane.type);
    if (std::ranges::find(types, type) != types.end()) return;
    throw Error(ErrorCode::kTensorDType, {.what = "scales of another type",
                                          .file = view_.table.path_of(tensor),
                                          .tensor = view_.table.info(tensor).name,
                                          .expected = quant::show_types(types),
                                          .found = std::string(to_string(type))});
  }

  [[noreturn]] void reject_second(int32_t tensor, int32_t other) const {
    throw Error(ErrorCode::kTensorDuplicate, {.what = "two tensors hold the same scales",
                                              .file = view_.table.path_of(tensor),
                                              .tensor = view_.table.info(tensor).name,
                                              .expected = "one tensor for each matrix",
                                              .found = view_.table.info(other).name + " too"});
  }

  const LayerView& view_;
  const CodesTensor& codes_;
  const TensorsByName& by_name_;
  std::vector<std::string>& missing_;
  QuantSpec spec_;
  std::string matrix_;  // the name that plain values would have
  MatrixForm form_;
};

}  // namespace

void CodedMatrix::decode(const TensorTable& table, const TensorData& data, const Verifier* verifier,
                         std::span<std::byte> values) const {
  const LayerSource source(table, data, planes, verifier);
  const WeightInfo info = source.describe(kOnly);
  auto* const floats = static_cast<float*>(static_cast<void*>(values.data()));
  read_values(spec, source, kOnly, 0, {0, info.rows, 0, info.cols},
              {floats, values.size() / sizeof(float)});
}

const std::optional<QuantizedWeights>* form_of_values(const MethodForms& forms,
                                                      std::string_view name) {
  if (!forms.model || !forms.model->by_module) return forms.layer ? &forms.layer : nullptr;
  try {
    const ModuleScheme* const scheme = scheme_of_tensor(*forms.model, name);
    return scheme != nullptr && scheme->weights ? &scheme->weights : nullptr;
  } catch (const NotRead&) {
    return nullptr;  // The layer then says which tensor it does not read.
  }
}

DType type_of_values(DType stored) { return is_plain(stored) ? stored : DType::kF32; }

bool holds_codes(const QuantizedWeights& quant, const StoredPlane* row, const TensorInfo& info) {
  return row != nullptr || (!is_plain(quant.element) && info.dtype == quant.element);
}

std::optional<ValueAid> match_value_aid(const Architecture& architecture,
                                        const std::optional<QuantizedWeights>& quant,
                                        const LayerShapes& shapes, std::string_view rest) {
  const auto is_value = [&](const std::string& matrix) {
    return match_name(architecture, matrix,
                      [&](const NamePattern& pattern) {
                        const auto ids = ids_of(pattern.part);
                        return !is_quantisable(pattern.part) && !ids.empty() &&
                               has_all(shapes, ids);
                      })
        .has_value();
  };
  for (StoredName& stored : stored_names(quant, rest)) {
    if (!is_value(stored.matrix)) continue;
    const bool is_unused = stored.row->use == StoredPlane::Use::kUnused;
    return ValueAid{.matrix = std::move(stored.matrix),
                    .use = is_unused ? StoredPlane::Use::kUnused : StoredPlane::Use::kInput};
  }
  for (ScaleName& scale : scale_names(rest)) {
    if (!is_value(scale.matrix)) continue;
    const bool is_unused = scale.plane == WeightPlane::kInputScale;
    return ValueAid{.matrix = std::move(scale.matrix),
                    .use = is_unused ? StoredPlane::Use::kUnused : StoredPlane::Use::kInput};
  }
  return std::nullopt;
}

PlaneReading read_codes_as_values(const LayerView& view, const CodesTensor& codes,
                                  const TensorsByName& by_name, std::vector<std::string>& missing) {
  return PlaneFinder(view, codes, by_name, missing).find();
}

void add_inputs(const TensorTable& table, const TensorsByName& by_name, PlaneReading& reading,
                std::vector<std::string>& missing) {
  const StoredPlane& row = *reading.row;
  const auto needed = reading.as_values ? row.value_inputs : row.inputs;
  const auto optional =
      reading.as_values ? std::span<const std::string_view>() : row.optional_inputs;
  const std::string& name = table.info(reading.inputs.front()).name;
  const std::string matrix = name.substr(0, name.size() - row.suffix.size());
  const auto add = [&](std::string_view suffix) {
    const auto found = by_name.find(matrix + std::string(suffix));
    reading.inputs.push_back(found == by_name.end() ? -1 : found->second);
    return found != by_name.end();
  };
  for (const std::string_view suffix : needed) {
    if (!add(suffix)) missing.push_back(matrix + std::string(suffix));
  }
  for (const std::string_view suffix : optional) add(suffix);
}

}  // namespace conclave::inline v0::checkpoint
