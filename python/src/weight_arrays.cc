#include "weight_arrays.h"

#include "conclave/error.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace conclave::python {
namespace {

// Takes arrays out of the dictionary and cuts them into the weights of a spec.
class Cutter {
 public:
  Cutter(const nb::dict& arrays, const MoeSpec& spec, const ArrayLayout& layout,
         WeightArrays& weights)
      : arrays_(arrays),
        spec_(spec),
        layout_(layout),
        known_(weights.names),
        kept_(weights.kept),
        by_id_(weights.by_id) {}

  void run();

 private:
  struct MlpNames {
    WeightMlp mlp;
    std::string prefix;  // "", "shared_", "residual_"
    int64_t inner;
    int64_t count;  // number of matrices
    bool is_stack;  // always has a leading dimension of experts
    bool gated;
    DType dtype;
    GateUpOrder order;
    // The residual MLP has neither biases nor scales.
    bool has_extras() const { return mlp != WeightMlp::kResidual; }
    // Experts may be on other ranks, and have an index there.
    bool by_expert() const { return mlp == WeightMlp::kRouted; }
    WeightId id(WeightMatrix matrix, WeightPlane plane = WeightPlane::kWeights) const {
      return {mlp, matrix, plane};
    }
  };

  nb::object take(const std::string& name);
  MatrixArrays matrices(const std::string& name, nb::handle object, const MlpNames& mlp);
  MatrixArrays rows_of(const std::string& name, nb::handle object, int64_t count);
  MatrixArrays plane_of(const std::string& name, nb::handle object, WeightPlane plane,
                        int64_t count);
  const Array& keep(nb::handle object, const std::string& name);

  void cut_mlp(const MlpNames& mlp);
  void cut_products(const MlpNames& mlp);
  void cut_biases(const MlpNames& mlp);
  void cut_plane(const MlpNames& mlp, WeightPlane plane, const std::string& suffix);
  void split(const MlpNames& mlp, WeightPlane plane, const MatrixArrays& both, GateUpOrder order);
  void place(WeightId id, MatrixArrays arrays, bool by_expert);
  void cut_matrix(const char* name, WeightId id);
  void cut_vector(const char* name, WeightId id);
  void cut_router_tensor(const std::string& name, WeightId id);
  void finish() const;

  const nb::dict& arrays_;
  const MoeSpec& spec_;
  const ArrayLayout& layout_;
  std::set<std::string>& known_;
  std::vector<Array>& kept_;
  WeightTable<MatrixArrays>& by_id_;
};

// None counts as absent, since callers pass all arguments that they have.
nb::object Cutter::take(const std::string& name) {
  known_.insert(name);
  if (!arrays_.contains(name.c_str())) return nb::none();
  return nb::object(arrays_[name.c_str()]);
}

const Array& Cutter::keep(nb::handle object, const std::string& name) {
  const Array& array = kept_.emplace_back(object, known_.find(name)->c_str());
  const auto element = static_cast<uintptr_t>(std::max<int64_t>(1, bit_size(array.dtype()) / 8));
  if (reinterpret_cast<uintptr_t>(array.data()) % element != 0) {
    throw Error(ErrorCode::kMisaligned, {.what = "weights are not aligned to their element",
                                         .tensor = name,
                                         .expected = "a multiple of " + std::to_string(element)});
  }
  return array;
}

// Takes [E, rows, cols], or a list of E arrays [rows, cols]; [rows, cols] if a single matrix is
// allowed.
MatrixArrays Cutter::matrices(const std::string& name, nb::handle object, const MlpNames& mlp) {
  MatrixArrays stack;
  if (nb::isinstance<nb::list>(object) || nb::isinstance<nb::tuple>(object)) {
    for (const nb::handle item : object) {
      const Array& array = keep(item, name);
      if (array.rank() != 2) wrong_shape(name, "arrays of rank 2 in the list", array.shape_text());
      MatrixArrays one = stack_of(array, 0, name);
      if (stack.matrices.empty()) {
        stack = std::move(one);
        continue;
      }
      const bool same = one.info.rows == stack.info.rows && one.info.cols == stack.info.cols &&
                        one.info.dtype == stack.info.dtype && one.row_stride == stack.row_stride &&
                        one.col_stride == stack.col_stride;
      if (!same) wrong_shape(name, "arrays of equal shape, strides and type", array.shape_text());
      stack.matrices.push_back(one.matrices[0]);
    }
    stack.info.count = static_cast<int64_t>(stack.matrices.size());
  } else {
    const Array& array = keep(object, name);
    const bool is_one = array.rank() == 2 && !mlp.is_stack && mlp.count == 1;
    if (array.rank() != 3 && !is_one) {
      wrong_shape(name, "rank 3, or a list of arrays of rank 2", array.shape_text());
    }
    stack = stack_of(array, is_one ? 0 : 1, name);
  }
  if (layout_.transposed && mlp.by_expert()) {
    if (bit_size(mlp.dtype) < 8) {
      throw Error(ErrorCode::kUnsupported, {.what = "codes below a byte are stored by rows only",
                                            .tensor = name,
                                            .expected = "transposed=False",
                                            .found = array_text(stack)});
    }
    std::swap(stack.info.rows, stack.info.cols);
    std::swap(stack.row_stride, stack.col_stride);
  }
  return as_codes(std::move(stack), mlp.dtype);
}

// Takes [E, n] as E rows, or [n] if there is one row.
MatrixArrays Cutter::rows_of(const std::string& name, nb::handle object, int64_t count) {
  const Array& array = keep(object, name);
  const bool is_one = array.rank() == 1 && count == 1;
  if (array.rank() != 2 && !is_one) wrong_shape(name, "rank 2", array.shape_text());
  const size_t axis = is_one ? 0 : 1;
  MatrixArrays stack{.info = {.count = is_one ? 1 : array.shape()[0],
                              .rows = 1,
                              .cols = array.shape()[axis],
                              .dtype = array.dtype()},
                     .row_stride = array.shape()[axis],
                     .col_stride = array.strides()[axis],
                     .argument = name};
  const int64_t stride = is_one ? 0 : array.strides()[0];
  for (int64_t i = 0; i < stack.info.count; ++i) {
    stack.matrices.push_back(
        offset(static_cast<const std::byte*>(array.data()), i * stride, array.dtype()));
  }
  return stack;
}

// Takes [E, rows, cols], [E, rows] as [E, rows, 1], or [E] as [E, 1, 1]; an order or factors
// of columns [E, cols] as [E, 1, cols]. A single matrix may leave out E, and bytes of scales count
// as exponents (e8m0), as checkpoints store them.
MatrixArrays Cutter::plane_of(const std::string& name, nb::handle object, WeightPlane plane,
                              int64_t count) {
  const Array& array = keep(object, name);
  std::vector<int64_t> shape = array.shape();
  std::vector<int64_t> strides = array.strides();
  if (shape.empty() || (count == 1 && shape[0] != 1)) {
    shape.insert(shape.begin(), 1);
    strides.insert(strides.begin(), 0);
  }
  const bool by_column = plane == WeightPlane::kColumnOrder || plane == WeightPlane::kColumnFactor;
  if (shape.size() == 2 && by_column) {
    shape.insert(shape.begin() + 1, 1);
    strides.insert(strides.begin() + 1, shape[2]);
  }
  if (shape.size() > 3) wrong_shape(name, "rank 1 to 3", array.shape_text());
  shape.resize(3, 1);
  strides.resize(3, 1);
  const bool is_exponent = array.dtype() == DType::kU8 && plane == WeightPlane::kScale;
  const DType dtype = is_exponent ? DType::kF8E8M0 : array.dtype();
  MatrixArrays stack{
      .info = {.count = shape[0], .rows = shape[1], .cols = shape[2], .dtype = dtype},
      .row_stride = strides[1],
      .col_stride = shape[2] == 1 ? 1 : strides[2],
      .argument = name};
  for (int64_t i = 0; i < shape[0]; ++i) {
    stack.matrices.push_back(
        offset(static_cast<const std::byte*>(array.data()), i * strides[0], dtype));
  }
  return stack;
}

// Experts on other ranks have no matrix but are included in the count. Of the steps of rows the
// largest of all experts counts: an array may have those of other ranks too, and else these have
// the step of an expert that is here.
void Cutter::place(WeightId id, MatrixArrays arrays, bool by_expert) {
  const bool is_step = id.plane() == WeightPlane::kInputScale;
  const bool has_all = is_step && std::ssize(layout_.local_of) == arrays.info.count;
  if (by_expert && !layout_.local_of.empty() && !has_all) {
    std::vector<const std::byte*> of_expert(layout_.local_of.size(), nullptr);
    for (size_t expert = 0; expert < of_expert.size(); ++expert) {
      const int32_t local = layout_.local_of[expert];
      if (local < 0) continue;
      if (local >= arrays.info.count) {
        wrong_shape(arrays.argument, std::to_string(local + 1) + " experts or more",
                    std::to_string(arrays.info.count));
      }
      of_expert[expert] = arrays.matrices[static_cast<size_t>(local)];
    }
    if (is_step && arrays.info.count > 0) {
      std::ranges::replace(of_expert, nullptr, arrays.matrices.front());
    }
    arrays.matrices = std::move(of_expert);
    arrays.info.count = static_cast<int64_t>(arrays.matrices.size());
  }
  by_id_[id] = std::move(arrays);
}

// One array holds a plane of gate and of up: each has half of its rows, or every other one. The
// rows of a bias are its columns.
void Cutter::split(const MlpNames& mlp, WeightPlane plane, const MatrixArrays& both,
                   GateUpOrder order) {
  const bool by_rows = plane != WeightPlane::kBias;
  const int64_t size = by_rows ? both.info.rows : both.info.cols;
  if (size % 2 != 0) {
    wrong_shape(both.argument, "gate and up halves of equal size", std::to_string(size));
  }
  const bool interleaved = order == GateUpOrder::kInterleaved;
  for (const WeightMatrix matrix : {WeightMatrix::kGate, WeightMatrix::kUp}) {
    MatrixArrays half = both;
    int64_t& count = by_rows ? half.info.rows : half.info.cols;
    int64_t& stride = by_rows ? half.row_stride : half.col_stride;
    const bool is_first = matrix == WeightMatrix::kGate;
    const int64_t first = is_first ? 0 : (interleaved ? stride : size / 2 * stride);
    for (const std::byte*& data : half.matrices) data = offset(data, first, half.info.dtype);
    count = size / 2;
    if (interleaved) stride *= 2;
    place(mlp.id(matrix, plane), std::move(half), mlp.by_expert());
  }
}

void Cutter::cut_products(const MlpNames& mlp) {
  const std::string names[] = {mlp.prefix + "gate_up", mlp.prefix + "gate", mlp.prefix + "up",
                               mlp.prefix + "down"};
  const nb::object gate_up = take(names[0]);
  const nb::object gate = take(names[1]);
  const nb::object up = take(names[2]);
  const nb::object down = take(names[3]);
  const auto place_one = [&](WeightMatrix matrix, const std::string& name, nb::handle object) {
    if (!object.is_none()) place(mlp.id(matrix), matrices(name, object, mlp), mlp.by_expert());
  };
  if (!gate_up.is_none()) {
    MatrixArrays both = matrices(names[0], gate_up, mlp);
    const int64_t rows = mlp.gated ? 2 * mlp.inner : mlp.inner;
    if (both.info.rows != rows) {
      wrong_shape(names[0], std::to_string(rows) + (mlp.gated ? " rows of gate and up" : " rows"),
                  std::to_string(both.info.rows));
    }
    if (mlp.gated) {
      split(mlp, WeightPlane::kWeights, both, mlp.order);
    } else {
      place(mlp.id(WeightMatrix::kUp), std::move(both), mlp.by_expert());
    }
  }
  place_one(WeightMatrix::kGate, names[1], gate);
  place_one(WeightMatrix::kUp, names[2], up);
  place_one(WeightMatrix::kDown, names[3], down);
}

void Cutter::cut_biases(const MlpNames& mlp) {
  const std::string both_name = mlp.prefix + "gate_up_bias";
  const std::string down_name = mlp.prefix + "down_bias";
  const nb::object both = take(both_name);
  const nb::object down = take(down_name);
  if (!both.is_none()) {
    MatrixArrays rows = rows_of(both_name, both, mlp.count);
    if (mlp.gated) {
      split(mlp, WeightPlane::kBias, rows, mlp.order);
    } else {
      place(mlp.id(WeightMatrix::kUp, WeightPlane::kBias), std::move(rows), mlp.by_expert());
    }
  }
  if (down.is_none()) return;
  place(mlp.id(WeightMatrix::kDown, WeightPlane::kBias), rows_of(down_name, down, mlp.count),
        mlp.by_expert());
}

// Takes "gate_up_SUFFIX" and "down_SUFFIX".
void Cutter::cut_plane(const MlpNames& mlp, WeightPlane plane, const std::string& suffix) {
  const std::string both_name = mlp.prefix + "gate_up_" + suffix;
  const std::string down_name = mlp.prefix + "down_" + suffix;
  const nb::object both = take(both_name);
  const nb::object down = take(down_name);
  if (!both.is_none()) {
    MatrixArrays planes = plane_of(both_name, both, plane, mlp.count);
    if (mlp.gated && planes.info.rows > 1) {
      // Scales of several rows are concatenated like the halves; others have the order of the rows.
      const QuantSpec& quant = spec_.quant;
      const bool has_rows = plane == WeightPlane::kScale || plane == WeightPlane::kZero;
      const bool by_row = quant.weights == WeightScale::kChannel ||
                          (quant.weights == WeightScale::kBlock && quant.block_rows == 1);
      split(mlp, plane, planes, has_rows && by_row ? mlp.order : GateUpOrder::kConcatenated);
    } else {
      if (mlp.gated) place(mlp.id(WeightMatrix::kGate, plane), planes, mlp.by_expert());
      place(mlp.id(WeightMatrix::kUp, plane), std::move(planes), mlp.by_expert());
    }
  }
  if (down.is_none()) return;
  place(mlp.id(WeightMatrix::kDown, plane), plane_of(down_name, down, plane, mlp.count),
        mlp.by_expert());
}

void Cutter::cut_mlp(const MlpNames& mlp) {
  cut_products(mlp);
  if (!mlp.has_extras()) return;
  cut_biases(mlp);
  cut_plane(mlp, WeightPlane::kScale, "scale");
  cut_plane(mlp, WeightPlane::kZero, "zero");
  cut_plane(mlp, WeightPlane::kGlobalScale, "global_scale");
  cut_plane(mlp, WeightPlane::kInputScale, "input_scale");
  cut_plane(mlp, WeightPlane::kColumnOrder, "column_order");
  cut_plane(mlp, WeightPlane::kColumnFactor, "column_factor");
}

void Cutter::cut_matrix(const char* name, WeightId id) {
  const nb::object object = take(name);
  if (object.is_none()) return;
  const Array& array = keep(object, name);
  if (array.rank() != 2) wrong_shape(name, "rank 2", array.shape_text());
  place(id, stack_of(array, 0, name), false);
}

// A tensor of one axis is a vector.
void Cutter::cut_router_tensor(const std::string& name, WeightId id) {
  const bool is_there = arrays_.contains(name.c_str()) && !arrays_[name.c_str()].is_none();
  if (is_there && Array(arrays_[name.c_str()], name.c_str()).rank() <= 1) {
    return cut_vector(name.c_str(), id);
  }
  cut_matrix(name.c_str(), id);
}

void Cutter::cut_vector(const char* name, WeightId id) {
  const nb::object object = take(name);
  if (object.is_none()) return;
  const Array& array = keep(object, name);
  const bool is_scalar = array.rank() == 0;
  if (array.rank() > 1) wrong_shape(name, "rank 1", array.shape_text());
  place(id,
        {.matrices = {static_cast<const std::byte*>(array.data())},
         .info = {.count = 1,
                  .rows = 1,
                  .cols = is_scalar ? 1 : array.shape()[0],
                  .dtype = array.dtype()},
         .row_stride = is_scalar ? 1 : array.shape()[0],
         .col_stride = is_scalar ? 1 : array.strides()[0],
         .argument = name},
        false);
}

void Cutter::run() {
  const ActivationSpec& routed = spec_.activation;
  const auto activation = [&](const ActivationSpec& own) {
    return own.name.empty() ? routed : own;
  };
  cut_mlp({.mlp = WeightMlp::kRouted,
           .prefix = "",
           .inner = spec_.intermediate_size,
           .count = spec_.num_experts,
           .is_stack = true,
           .gated = is_gated(routed),
           .dtype = spec_.weight_dtype,
           .order = layout_.order});
  cut_mlp({.mlp = WeightMlp::kShared,
           .prefix = "shared_",
           .inner = spec_.shared.intermediate_size,
           .count = spec_.shared.count,
           .is_stack = false,
           .gated = is_gated(activation(spec_.shared.activation)),
           .dtype = spec_.shared.weight_dtype.value_or(spec_.weight_dtype),
           .order = layout_.shared_order});
  cut_mlp({.mlp = WeightMlp::kResidual,
           .prefix = "residual_",
           .inner = spec_.residual.intermediate_size,
           .count = 1,
           .is_stack = false,
           .gated = is_gated(activation(spec_.residual.activation)),
           .dtype = spec_.residual.weight_dtype.value_or(spec_.weight_dtype),
           .order = GateUpOrder::kConcatenated});
  cut_matrix("router", weights::kRouter);
  cut_matrix("shared_expert_gate", weights::kSharedExpertGate);
  for (const WeightId id : router_tensors()) cut_router_tensor(to_string(id), id);
  cut_matrix("mix_gate", weights::kMixGate);
  cut_matrix("latent_down", weights::kLatentDown);
  cut_matrix("latent_up", weights::kLatentUp);
  cut_vector("router_bias", weights::kRouterBias);
  cut_vector("selection_bias", weights::kSelectionBias);
  cut_vector("expert_scale", weights::kExpertScale);
  cut_vector("global_scale", weights::kGlobalScale);
  cut_vector("router_input_scale", weights::kRouterInputScale);
  cut_vector("mix_gate_bias", weights::kMixGateBias);
  cut_vector("latent_norm", weights::kLatentNorm);
  cut_vector("output_bias", weights::kOutputBias);
  finish();
}

void Cutter::finish() const {
  for (const auto& [key, value] : arrays_) {
    const auto name = nb::cast<std::string>(nb::str(key));
    if (known_.contains(name)) continue;
    std::string known;
    for (const std::string& one : known_) known += (known.empty() ? "" : ", ") + one;
    throw Error(ErrorCode::kInvalidArgument, {.what = "there are no weights of this name",
                                              .tensor = name,
                                              .expected = "one of " + known});
  }
}

}  // namespace

void cut_weights(const nb::dict& arrays, const MoeSpec& spec, const ArrayLayout& layout,
                 WeightArrays& weights) {
  Cutter(arrays, spec, layout, weights).run();
}

}  // namespace conclave::python
