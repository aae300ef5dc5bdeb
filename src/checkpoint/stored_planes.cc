#include "checkpoint/stored_planes.h"

#include "checkpoint/name_list.h"
#include "core/weight_types.h"
#include "quant/plane_types.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>

namespace conclave::inline v0::checkpoint {
namespace {

std::span<const StoredPlane> rows_of(const std::optional<QuantizedWeights>& quant) {
  return quant ? quant->planes : std::span<const StoredPlane>();
}

bool is_codes(const StoredPlane& row) {
  return row.use == StoredPlane::Use::kPlane && row.plane == WeightPlane::kWeights;
}

bool ends_in(const StoredPlane& row, std::string_view name) {
  return name.size() > row.suffix.size() && name.ends_with(row.suffix);
}

std::string in_place_of(std::string_view name, std::string_view ending, std::string_view other) {
  return std::string(name.substr(0, name.size() - ending.size())).append(other);
}

}  // namespace

std::vector<StoredName> stored_names(const std::optional<QuantizedWeights>& quant,
                                     std::string_view name) {
  std::vector<StoredName> names;
  for (const StoredPlane& row : rows_of(quant)) {
    if (is_codes(row) || !ends_in(row, name)) continue;
    names.push_back({.matrix = in_place_of(name, row.suffix, row.ending), .row = &row});
  }
  return names;
}

namespace {

const StoredPlane* first_with_codes(const std::optional<QuantizedWeights>& quant,
                                    const TensorInfo& info) {
  for (const StoredPlane& row : rows_of(quant)) {
    if (!is_codes(row) || !ends_in(row, info.name)) continue;
    if (row.has_codes == nullptr || row.has_codes(info)) return &row;
  }
  return nullptr;
}

}  // namespace

const StoredPlane* codes_row(const std::optional<QuantizedWeights>& quant, const TensorInfo& info) {
  const StoredPlane* const row = first_with_codes(quant, info);
  if (row == nullptr || row->has_codes != nullptr) return row;
  return info.dtype == quant->element ? nullptr : row;
}

const StoredPlane* values_row(const std::optional<QuantizedWeights>& quant,
                              const TensorInfo& info) {
  const StoredPlane* const row = first_with_codes(quant, info);
  return row != nullptr && row->decode_values != nullptr ? row : codes_row(quant, info);
}

std::optional<std::string> matrix_name(const std::optional<QuantizedWeights>& quant,
                                       std::string_view name) {
  for (const StoredPlane& row : rows_of(quant)) {
    if (!is_codes(row) || row.suffix == row.ending || !ends_in(row, name)) continue;
    return in_place_of(name, row.suffix, row.ending);
  }
  if (!quant || !quant->by_module) return std::nullopt;
  for (const ModuleScheme& scheme : quant->by_module->schemes) {
    if (auto matrix = matrix_name(scheme.weights, name)) return matrix;
  }
  return std::nullopt;
}

DType type_as_codes(const std::optional<QuantizedWeights>& quant, const TensorInfo& info) {
  const StoredPlane* const row = codes_row(quant, info);
  const bool fits = row != nullptr && std::ranges::find(row->types, info.dtype) != row->types.end();
  return fits ? quant->element : info.dtype;
}

const StoredPlane* row_of(const std::optional<QuantizedWeights>& quant, std::string_view matrix,
                          WeightPlane plane) {
  for (const StoredPlane& row : rows_of(quant)) {
    if (row.use != StoredPlane::Use::kPlane || row.plane != plane) continue;
    if (matrix.ends_with(row.ending)) return &row;
  }
  return nullptr;
}

std::string stored_name(const StoredPlane& row, std::string_view matrix) {
  return in_place_of(matrix, row.ending, row.suffix);
}

bool PlaneReading::lies_in_place() const {
  if (as_values || !is_read) return false;
  return row->decode == nullptr || (row->lies_in_place != nullptr && row->lies_in_place(form));
}

StoredShapes shapes_of(const StoredPlane& row, const WantedPlane& wanted) {
  StoredShapes shapes = wanted.as_values ? row.value_shapes(wanted.form) : row.shapes(wanted.form);
  if (!wanted.is_stack) return shapes;
  for (std::vector<int64_t>& shape : shapes) shape.insert(shape.begin(), wanted.slices);
  return shapes;
}

PlaneReading read_as(const StoredPlane& row, const WantedPlane& wanted, const TensorTable& table,
                     int32_t tensor) {
  const TensorInfo& info = table.info(tensor);
  const auto reject = [&](ErrorCode code, const char* what, std::string expected,
                          std::string found) {
    throw Error(code, {.what = what,
                       .file = table.path_of(tensor),
                       .tensor = info.name,
                       .expected = std::move(expected),
                       .found = std::move(found)});
  };
  if (std::ranges::find(row.types, info.dtype) == row.types.end()) {
    reject(ErrorCode::kTensorDType, "a tensor of quantised weights has another type",
           quant::show_types(row.types), std::string(to_string(info.dtype)));
  }
  const StoredShapes shapes = shapes_of(row, wanted);
  if (std::ranges::find(shapes, info.shape) == shapes.end()) {
    reject(ErrorCode::kTensorShape, "the shape does not fit config.json",
           render_shape(shapes.front()), render_shape(info.shape));
  }
  const bool is_codes_plane = row.plane == WeightPlane::kWeights;
  PlaneReading reading{.row = &row,
                       .form = wanted.form,
                       .dtype = row.type.value_or(is_codes_plane ? wanted.spec_type : info.dtype),
                       .slices = wanted.slices,
                       .slice_elements = wanted.rows * wanted.cols,
                       .inputs = {tensor},
                       .as_values = wanted.as_values};
  if (wanted.as_values) reading.dtype = DType::kF32;
  if (!reading.lies_in_place()) return reading;
  // Elements of several bytes may leave some of the last one unused.
  const auto needed =
      static_cast<uint64_t>(packed_bytes(reading.dtype, reading.slices * reading.slice_elements));
  const auto element = static_cast<uint64_t>(byte_size(info.dtype));
  if (info.bytes < needed || info.bytes - needed >= element) {
    reject(ErrorCode::kTensorShape, "the tensor holds another number of codes",
           fmt::format("{} bytes", needed), fmt::format("{} bytes", info.bytes));
  }
  return reading;
}

}  // namespace conclave::inline v0::checkpoint
