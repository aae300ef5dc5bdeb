#include "weight_arrays.h"

#include "conclave/error.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace conclave::python {
namespace {

[[noreturn]] void wrong_shape(const std::string& argument, std::string expected,
                              std::string found) {
  throw Error(ErrorCode::kShape, {.what = "weights have the wrong shape",
                                  .tensor = argument,
                                  .expected = std::move(expected),
                                  .found = std::move(found)});
}

const std::byte* offset(const std::byte* base, int64_t elements, DType dtype) {
  return base == nullptr ? nullptr : base + elements * bit_size(dtype) / 8;
}

// Takes arrays out of the dictionary and cuts them into the roles of a spec.
class Cutter {
 public:
  Cutter(const nb::dict& arrays, const MoeSpec& spec, const ArrayLayout& layout,
         WeightArrays& weights)
      : arrays_(arrays),
        spec_(spec),
        layout_(layout),
        known_(weights.names),
        kept_(weights.kept),
        roles_(weights.roles) {}

  void run();

 private:
  struct MlpNames {
    std::string prefix;  // "", "shared_", "residual_"
    int64_t inner;
    int64_t count;  // number of matrices
    bool is_stack;  // always has a leading dimension of experts
    bool gated;
    DType dtype;
    GateUpOrder order;
    WeightRole gate = {}, up = {}, down = {};
    bool has_extras = false;  // has the biases and scales below
    WeightRole gate_bias = {}, up_bias = {}, down_bias = {};
    WeightRole gate_scale = {}, up_scale = {}, down_scale = {};
    WeightRole gate_input_scale = {}, up_input_scale = {}, down_input_scale = {};
  };
  enum class Axis : uint8_t { kRows, kCols };

  nb::object take(const std::string& name);
  RoleArrays matrices(const std::string& name, nb::handle object, const MlpNames& mlp);
  RoleArrays rows_of(const std::string& name, nb::handle object, int64_t count);
  RoleArrays scales_of(const std::string& name, nb::handle object, int64_t count);
  const Array& keep(nb::handle object, const std::string& name);

  void cut_mlp(const MlpNames& mlp);
  void cut_products(const MlpNames& mlp);
  void cut_biases(const MlpNames& mlp);
  void cut_scales(const MlpNames& mlp);
  void split(const RoleArrays& both, Axis axis, GateUpOrder order, WeightRole gate, WeightRole up);
  void place(WeightRole role, RoleArrays arrays, bool by_expert);
  void cut_matrix(const char* name, WeightRole role);
  void cut_vector(const char* name, WeightRole role);
  void finish() const;

  const nb::dict& arrays_;
  const MoeSpec& spec_;
  const ArrayLayout& layout_;
  std::set<std::string>& known_;
  std::vector<Array>& kept_;
  std::array<RoleArrays, kNumWeightRoles>& roles_;
};

// None counts as absent, since callers pass all arguments that they have.
nb::object Cutter::take(const std::string& name) {
  known_.insert(name);
  if (!arrays_.contains(name.c_str())) return nb::none();
  return nb::object(arrays_[name.c_str()]);
}

const Array& Cutter::keep(nb::handle object, const std::string& name) {
  const Array& array = kept_.emplace_back(object, known_.find(name)->c_str());
  const auto element = static_cast<uintptr_t>(std::max<int64_t>(1, byte_size(array.dtype())));
  if (reinterpret_cast<uintptr_t>(array.data()) % element != 0) {
    throw Error(ErrorCode::kMisaligned, {.what = "weights are not aligned to their element",
                                         .tensor = name,
                                         .expected = "a multiple of " + std::to_string(element)});
  }
  return array;
}

RoleArrays stack_of(const Array& array, int first_axis, std::string name) {
  const auto axis = static_cast<size_t>(first_axis);
  const int64_t count = first_axis > 0 ? array.shape()[0] : 1;
  RoleArrays stack{.info = {.count = count,
                            .rows = array.shape()[axis],
                            .cols = array.shape()[axis + 1],
                            .dtype = array.dtype()},
                   .row_stride = array.strides()[axis],
                   .col_stride = array.strides()[axis + 1],
                   .argument = std::move(name)};
  const int64_t stride = first_axis > 0 ? array.strides()[0] : 0;
  for (int64_t i = 0; i < count; ++i) {
    stack.matrices.push_back(
        offset(static_cast<const std::byte*>(array.data()), i * stride, array.dtype()));
  }
  return stack;
}

std::string array_text(const RoleArrays& stack) {
  return "[" + std::to_string(stack.info.count) + ", " + std::to_string(stack.info.rows) + ", " +
         std::to_string(stack.info.cols) + "]";
}

// Describes bytes and words as the codes below a byte that they hold, the lowest bits first; arrays
// of other types as they are.
RoleArrays as_codes(RoleArrays stack, DType codes) {
  const DType stored = stack.info.dtype;
  const bool holds = stored == DType::kU8 || stored == DType::kI32 || stored == DType::kU32;
  if (bit_size(codes) >= 8 || !holds) return stack;
  if (stack.info.cols > 1 && stack.col_stride != 1) {
    throw Error(ErrorCode::kStride, {.what = "codes below a byte lie apart",
                                     .tensor = stack.argument,
                                     .expected = "a stride of 1 along the last axis",
                                     .found = std::to_string(stack.col_stride),
                                     .hint = "pass a contiguous copy"});
  }
  const int64_t count = bit_size(stored) / bit_size(codes);
  stack.info.cols *= count;
  stack.info.dtype = codes;
  stack.row_stride *= count;
  stack.col_stride = 1;
  return stack;
}

// Takes [E, rows, cols], or a list of E arrays [rows, cols]; [rows, cols] if a single matrix is
// allowed.
RoleArrays Cutter::matrices(const std::string& name, nb::handle object, const MlpNames& mlp) {
  RoleArrays stack;
  if (nb::isinstance<nb::list>(object) || nb::isinstance<nb::tuple>(object)) {
    for (const nb::handle item : object) {
      const Array& array = keep(item, name);
      if (array.rank() != 2) wrong_shape(name, "arrays of rank 2 in the list", array.shape_text());
      RoleArrays one = stack_of(array, 0, name);
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
  if (layout_.transposed && mlp.prefix.empty()) {
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
RoleArrays Cutter::rows_of(const std::string& name, nb::handle object, int64_t count) {
  const Array& array = keep(object, name);
  const bool is_one = array.rank() == 1 && count == 1;
  if (array.rank() != 2 && !is_one) wrong_shape(name, "rank 2", array.shape_text());
  const size_t axis = is_one ? 0 : 1;
  RoleArrays stack{.info = {.count = is_one ? 1 : array.shape()[0],
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

// Takes [E, rows, cols], [E, rows] as [E, rows, 1], or [E] as [E, 1, 1]. A single matrix may leave
// out E, and bytes count as exponents (e8m0), as checkpoints store them.
RoleArrays Cutter::scales_of(const std::string& name, nb::handle object, int64_t count) {
  const Array& array = keep(object, name);
  std::vector<int64_t> shape = array.shape();
  std::vector<int64_t> strides = array.strides();
  if (shape.empty() || (count == 1 && shape[0] != 1)) {
    shape.insert(shape.begin(), 1);
    strides.insert(strides.begin(), 0);
  }
  if (shape.size() > 3) wrong_shape(name, "rank 1 to 3", array.shape_text());
  shape.resize(3, 1);
  strides.resize(3, 1);
  const DType dtype = array.dtype() == DType::kU8 ? DType::kF8E8M0 : array.dtype();
  RoleArrays stack{.info = {.count = shape[0], .rows = shape[1], .cols = shape[2], .dtype = dtype},
                   .row_stride = strides[1],
                   .col_stride = shape[2] == 1 ? 1 : strides[2],
                   .argument = name};
  for (int64_t i = 0; i < shape[0]; ++i) {
    stack.matrices.push_back(
        offset(static_cast<const std::byte*>(array.data()), i * strides[0], dtype));
  }
  return stack;
}

// Experts on other ranks have no matrix but are included in the count.
void Cutter::place(WeightRole role, RoleArrays arrays, bool by_expert) {
  if (by_expert && !layout_.local_of.empty()) {
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
    arrays.matrices = std::move(of_expert);
    arrays.info.count = static_cast<int64_t>(arrays.matrices.size());
  }
  roles_[static_cast<size_t>(role)] = std::move(arrays);
}

// One array holds two roles: each has half of its rows or columns, or every other one.
void Cutter::split(const RoleArrays& both, Axis axis, GateUpOrder order, WeightRole gate,
                   WeightRole up) {
  const int64_t size = axis == Axis::kRows ? both.info.rows : both.info.cols;
  if (size % 2 != 0) {
    wrong_shape(both.argument, "gate and up halves of equal size", std::to_string(size));
  }
  const bool interleaved = order == GateUpOrder::kInterleaved;
  const bool by_expert =
      gate == WeightRole::kGate || gate == WeightRole::kGateBias || gate == WeightRole::kGateScale;
  for (const WeightRole role : {gate, up}) {
    RoleArrays half = both;
    int64_t& count = axis == Axis::kRows ? half.info.rows : half.info.cols;
    int64_t& stride = axis == Axis::kRows ? half.row_stride : half.col_stride;
    const int64_t first = role == gate ? 0 : (interleaved ? stride : size / 2 * stride);
    for (const std::byte*& matrix : half.matrices) matrix = offset(matrix, first, half.info.dtype);
    count = size / 2;
    if (interleaved) stride *= 2;
    place(role, std::move(half), by_expert);
  }
}

void Cutter::cut_products(const MlpNames& mlp) {
  const std::string names[] = {mlp.prefix + "gate_up", mlp.prefix + "gate", mlp.prefix + "up",
                               mlp.prefix + "down"};
  const nb::object gate_up = take(names[0]);
  const nb::object gate = take(names[1]);
  const nb::object up = take(names[2]);
  const nb::object down = take(names[3]);
  const bool by_expert = mlp.prefix.empty();
  if (!gate_up.is_none()) {
    RoleArrays both = matrices(names[0], gate_up, mlp);
    const int64_t rows = mlp.gated ? 2 * mlp.inner : mlp.inner;
    if (both.info.rows != rows) {
      wrong_shape(names[0], std::to_string(rows) + (mlp.gated ? " rows of gate and up" : " rows"),
                  std::to_string(both.info.rows));
    }
    if (mlp.gated) {
      split(both, Axis::kRows, mlp.order, mlp.gate, mlp.up);
    } else {
      place(mlp.up, std::move(both), by_expert);
    }
  }
  if (!gate.is_none()) place(mlp.gate, matrices(names[1], gate, mlp), by_expert);
  if (!up.is_none()) place(mlp.up, matrices(names[2], up, mlp), by_expert);
  if (!down.is_none()) place(mlp.down, matrices(names[3], down, mlp), by_expert);
}

void Cutter::cut_biases(const MlpNames& mlp) {
  const std::string both_name = mlp.prefix + "gate_up_bias";
  const std::string down_name = mlp.prefix + "down_bias";
  const nb::object both = take(both_name);
  const nb::object down = take(down_name);
  const bool by_expert = mlp.prefix.empty();
  if (!both.is_none()) {
    RoleArrays rows = rows_of(both_name, both, mlp.count);
    if (mlp.gated) {
      split(rows, Axis::kCols, mlp.order, mlp.gate_bias, mlp.up_bias);
    } else {
      place(mlp.up_bias, std::move(rows), by_expert);
    }
  }
  if (!down.is_none()) place(mlp.down_bias, rows_of(down_name, down, mlp.count), by_expert);
}

void Cutter::cut_scales(const MlpNames& mlp) {
  const std::string names[] = {mlp.prefix + "gate_up_scale", mlp.prefix + "down_scale",
                               mlp.prefix + "gate_up_input_scale", mlp.prefix + "down_input_scale"};
  const nb::object both = take(names[0]);
  const nb::object down = take(names[1]);
  const nb::object both_input = take(names[2]);
  const nb::object down_input = take(names[3]);
  const bool by_expert = mlp.prefix.empty();
  if (!both.is_none()) {
    RoleArrays scales = scales_of(names[0], both, mlp.count);
    const bool one_for_both = scales.info.rows == 1;
    if (mlp.gated && !one_for_both) {
      // Scales of several rows are concatenated like the halves; others have the order of the rows.
      const QuantSpec& quant = spec_.quant;
      const bool by_row = quant.weights == WeightScale::kChannel ||
                          (quant.weights == WeightScale::kBlock && quant.block_rows == 1);
      split(scales, Axis::kRows, by_row ? mlp.order : GateUpOrder::kConcatenated, mlp.gate_scale,
            mlp.up_scale);
    } else {
      if (mlp.gated) place(mlp.gate_scale, scales, by_expert);
      place(mlp.up_scale, std::move(scales), by_expert);
    }
  }
  if (!down.is_none()) place(mlp.down_scale, scales_of(names[1], down, mlp.count), by_expert);
  if (!both_input.is_none()) {
    const RoleArrays scales = scales_of(names[2], both_input, mlp.count);
    if (mlp.gated) place(mlp.gate_input_scale, scales, by_expert);
    place(mlp.up_input_scale, scales, by_expert);
  }
  if (!down_input.is_none()) {
    place(mlp.down_input_scale, scales_of(names[3], down_input, mlp.count), by_expert);
  }
}

void Cutter::cut_mlp(const MlpNames& mlp) {
  cut_products(mlp);
  if (!mlp.has_extras) return;
  cut_biases(mlp);
  cut_scales(mlp);
}

void Cutter::cut_matrix(const char* name, WeightRole role) {
  const nb::object object = take(name);
  if (object.is_none()) return;
  const Array& array = keep(object, name);
  if (array.rank() != 2) wrong_shape(name, "rank 2", array.shape_text());
  place(role, stack_of(array, 0, name), false);
}

void Cutter::cut_vector(const char* name, WeightRole role) {
  const nb::object object = take(name);
  if (object.is_none()) return;
  const Array& array = keep(object, name);
  const bool is_scalar = array.rank() == 0;
  if (array.rank() > 1) wrong_shape(name, "rank 1", array.shape_text());
  place(role,
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
  cut_mlp({.prefix = "",
           .inner = spec_.intermediate_size,
           .count = spec_.num_experts,
           .is_stack = true,
           .gated = is_gated(routed),
           .dtype = spec_.weight_dtype,
           .order = layout_.order,
           .gate = WeightRole::kGate,
           .up = WeightRole::kUp,
           .down = WeightRole::kDown,
           .has_extras = true,
           .gate_bias = WeightRole::kGateBias,
           .up_bias = WeightRole::kUpBias,
           .down_bias = WeightRole::kDownBias,
           .gate_scale = WeightRole::kGateScale,
           .up_scale = WeightRole::kUpScale,
           .down_scale = WeightRole::kDownScale,
           .gate_input_scale = WeightRole::kGateInputScale,
           .up_input_scale = WeightRole::kUpInputScale,
           .down_input_scale = WeightRole::kDownInputScale});
  cut_mlp({.prefix = "shared_",
           .inner = spec_.shared.intermediate_size,
           .count = spec_.shared.count,
           .is_stack = false,
           .gated = is_gated(activation(spec_.shared.activation)),
           .dtype = spec_.shared.weight_dtype.value_or(spec_.weight_dtype),
           .order = layout_.shared_order,
           .gate = WeightRole::kSharedGate,
           .up = WeightRole::kSharedUp,
           .down = WeightRole::kSharedDown,
           .has_extras = true,
           .gate_bias = WeightRole::kSharedGateBias,
           .up_bias = WeightRole::kSharedUpBias,
           .down_bias = WeightRole::kSharedDownBias,
           .gate_scale = WeightRole::kSharedGateScale,
           .up_scale = WeightRole::kSharedUpScale,
           .down_scale = WeightRole::kSharedDownScale,
           .gate_input_scale = WeightRole::kSharedGateInputScale,
           .up_input_scale = WeightRole::kSharedUpInputScale,
           .down_input_scale = WeightRole::kSharedDownInputScale});
  cut_mlp({.prefix = "residual_",
           .inner = spec_.residual.intermediate_size,
           .count = 1,
           .is_stack = false,
           .gated = is_gated(activation(spec_.residual.activation)),
           .dtype = spec_.residual.weight_dtype.value_or(spec_.weight_dtype),
           .order = GateUpOrder::kConcatenated,
           .gate = WeightRole::kResidualGate,
           .up = WeightRole::kResidualUp,
           .down = WeightRole::kResidualDown});
  cut_matrix("router", WeightRole::kRouter);
  cut_matrix("shared_expert_gate", WeightRole::kSharedExpertGate);
  cut_matrix("hash_table", WeightRole::kHashTable);
  cut_matrix("mix_gate", WeightRole::kMixGate);
  cut_matrix("latent_down", WeightRole::kLatentDown);
  cut_matrix("latent_up", WeightRole::kLatentUp);
  cut_vector("router_bias", WeightRole::kRouterBias);
  cut_vector("selection_bias", WeightRole::kSelectionBias);
  cut_vector("expert_scale", WeightRole::kExpertScale);
  cut_vector("global_scale", WeightRole::kGlobalScale);
  cut_vector("router_input_scale", WeightRole::kRouterInputScale);
  cut_vector("mix_gate_bias", WeightRole::kMixGateBias);
  cut_vector("latent_norm", WeightRole::kLatentNorm);
  cut_vector("output_bias", WeightRole::kOutputBias);
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
