#include "checkpoint/methods/tensor_rows.h"

#include "checkpoint/scale_names.h"
#include "checkpoint/stored_planes.h"
#include "quant/plane_types.h"
#include "quant/planes.h"
#include "quant/weight_format.h"

#include <algorithm>

namespace conclave::inline v0::checkpoint {
namespace {

using Use = MethodTensor::Use;

constexpr bool is_codes(const StoredPlane& row) { return row.plane == WeightPlane::kWeights; }

class TensorList {
 public:
  TensorList(const QuantizedWeights& quant, std::string_view method, std::string_view matrix)
      : quant_(quant), method_(method), matrix_(matrix) {}

  std::vector<TensorRow> list() {
    add_rows([](const StoredPlane& row) { return is_codes(row) && row.use == Use::kPlane; });
    add_usual(WeightPlane::kWeights);
    add_rows([](const StoredPlane& row) { return is_codes(row) && row.use != Use::kPlane; });
    if (!has_row(WeightPlane::kScale)) add_usual(WeightPlane::kScale);
    add_rows([](const StoredPlane& row) { return !is_codes(row); });
    add_usual(WeightPlane::kInputScale);
    return std::move(rows_);
  }

 private:
  template <class Wanted>
  void add_rows(const Wanted& wanted) {
    for (const StoredPlane& row : quant_.planes) {
      if (!wanted(row) || !matrix_.ends_with(row.ending)) continue;
      if (row.use == Use::kPlane && has(row.plane)) continue;
      rows_.push_back(
          {.name = stored_name(row, matrix_), .use = row.use, .plane = row.plane, .row = &row});
    }
  }

  bool has_row(WeightPlane plane) const { return row_of(quant_, matrix_, plane) != nullptr; }

  // The list has a plane under a name before, or the matrix none.
  bool has(WeightPlane plane) const {
    return std::ranges::any_of(rows_, [&](const TensorRow& listed) {
      return listed.use == Use::kPlane && listed.plane == plane;
    });
  }

  void add_usual(WeightPlane plane) {
    const auto planes = quant::planes_of(quant_.element, quant_.spec, 1, 1);
    if (has(plane) || std::ranges::find(planes, plane, &quant::PlaneShape::plane) == planes.end()) {
      return;
    }
    const std::string name = plane == WeightPlane::kWeights
                                 ? std::string(matrix_)
                                 : usual_scale_name(matrix_, plane, method_);
    rows_.push_back({.name = name, .plane = plane});
  }

  const QuantizedWeights& quant_;
  std::string_view method_;
  std::string_view matrix_;
  std::vector<TensorRow> rows_;
};

quant::PlaneShape plane_of(const TensorRow& tensor, const MatrixForm& form) {
  return quant::plane_of(tensor.plane, form.quant->element, form.quant->spec, form.rows, form.cols);
}

}  // namespace

MatrixForm matrix_form(const QuantizedWeights& quant, int64_t rows, int64_t cols) {
  const quant::PlaneShape scale =
      quant::plane_of(WeightPlane::kScale, quant.element, quant.spec, rows, cols);
  return {.rows = rows,
          .cols = cols,
          .scale_rows = scale.rows,
          .groups = scale.cols,
          .group_cols = scale.block_cols,
          .quant = &quant};
}

std::vector<TensorRow> tensor_rows(const QuantizedWeights& quant, std::string_view method,
                                   std::string_view matrix) {
  return TensorList(quant, method, matrix).list();
}

std::vector<int64_t> shape_of(const TensorRow& tensor, const MatrixForm& form) {
  if (tensor.row != nullptr) {
    return tensor.row->shapes == nullptr ? std::vector<int64_t>()
                                         : tensor.row->shapes(form).front();
  }
  const quant::PlaneShape plane = plane_of(tensor, form);
  return {plane.rows, plane.cols};
}

std::vector<DType> types_of(const TensorRow& tensor, const MatrixForm& form) {
  if (tensor.row != nullptr) return {tensor.row->types.begin(), tensor.row->types.end()};
  if (tensor.plane == WeightPlane::kWeights) return {form.quant->element};
  const auto known = quant::types_of(plane_of(tensor, form).type);
  std::vector<DType> types(known.begin(), known.end());
  if (tensor.plane == WeightPlane::kScale) {
    MoeSpec layer;
    layer.weight_dtype = form.quant->element;
    layer.quant = form.quant->spec;
    const auto at = std::ranges::find(types, quant::scale_dtype(layer));
    if (at != types.end()) std::rotate(types.begin(), at, at + 1);
  }
  return types;
}

}  // namespace conclave::inline v0::checkpoint
