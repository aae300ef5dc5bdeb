#include "core/code_bits.h"
#include "core/weight_types.h"
#include "layer/pointer_stack.h"
#include "routing/router_tensors.h"

#include "conclave/error.h"
#include "conclave/weights.h"

#include <array>
#include <cstring>
#include <string>
#include <string_view>

namespace conclave::inline v0 {
namespace {

// The matrices of one id inside a caller's tensor: `count` matrices whose rows and columns may lie
// apart, like the halves of an interleaved tensor. Strides are in elements.
struct IdView {
  const std::byte* data = nullptr;
  WeightInfo info;
  int64_t matrix_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
};

// A plane that gives the codes of an MLP a meaning.
struct PlaneTensors {
  WeightPlane plane = WeightPlane::kScale;
  std::string_view suffix = {};  // what names end with
  ConstTensorView gate_up = {};
  ConstTensorView down = {};
};
using MlpPlanes = std::array<PlaneTensors, 6>;

MlpPlanes routed_planes(const ExpertWeights& weights) {
  return {PlaneTensors{WeightPlane::kScale, "_scale", weights.gate_up_scale, weights.down_scale},
          PlaneTensors{WeightPlane::kZero, "_zero", weights.gate_up_zero, weights.down_zero},
          PlaneTensors{WeightPlane::kGlobalScale, "_global_scale", weights.gate_up_global_scale,
                       weights.down_global_scale},
          PlaneTensors{WeightPlane::kInputScale, "_input_scale", weights.gate_up_input_scale,
                       weights.down_input_scale},
          PlaneTensors{WeightPlane::kColumnOrder, "_column_order", weights.gate_up_column_order,
                       weights.down_column_order},
          PlaneTensors{WeightPlane::kColumnFactor, "_column_factor", weights.gate_up_column_factor,
                       weights.down_column_factor}};
}

MlpPlanes shared_planes(const ExpertWeights& weights) {
  return {PlaneTensors{WeightPlane::kScale, "_scale", weights.shared_gate_up_scale,
                       weights.shared_down_scale},
          PlaneTensors{WeightPlane::kZero, "_zero", weights.shared_gate_up_zero,
                       weights.shared_down_zero},
          PlaneTensors{WeightPlane::kGlobalScale, "_global_scale",
                       weights.shared_gate_up_global_scale, weights.shared_down_global_scale},
          PlaneTensors{WeightPlane::kInputScale, "_input_scale", weights.shared_gate_up_input_scale,
                       weights.shared_down_input_scale},
          PlaneTensors{WeightPlane::kColumnOrder, "_column_order",
                       weights.shared_gate_up_column_order, weights.shared_down_column_order},
          PlaneTensors{WeightPlane::kColumnFactor, "_column_factor",
                       weights.shared_gate_up_column_factor, weights.shared_down_column_factor}};
}

// One MLP as the caller gives it.
struct MlpTensors {
  WeightMlp mlp = WeightMlp::kRouted;
  GateUpOrder order = GateUpOrder::kConcatenated;
  std::string prefix;  // what names begin with
  const ConstTensorView& gate_up;
  const ConstTensorView& down;
  const ConstTensorView& gate_up_bias;
  const ConstTensorView& down_bias;
  MlpPlanes planes;

  // All but routed experts may leave out the first dimension.
  bool may_be_one() const { return mlp != WeightMlp::kRouted; }
  bool is_gated() const { return order != GateUpOrder::kSingle; }
  WeightId gate(WeightPlane plane) const { return {mlp, WeightMatrix::kGate, plane}; }
  WeightId up(WeightPlane plane) const { return {mlp, WeightMatrix::kUp, plane}; }
  WeightId down_of(WeightPlane plane) const { return {mlp, WeightMatrix::kDown, plane}; }
};

void check_same(const std::string& name, const char* what, int64_t expected, int64_t found) {
  if (expected == found) return;
  throw Error(ErrorCode::kShape, {.what = what,
                                  .tensor = name,
                                  .expected = std::to_string(expected),
                                  .found = std::to_string(found)});
}

class PointerSource final : public WeightSource {
 public:
  explicit PointerSource(const ExpertWeights& weights) : memory_(weights.memory) {
    add_mlps(weights);
    add_matrix(weights::kRouter, "router", weights.router);
    add_matrix(weights::kSharedExpertGate, "shared_expert_gate", weights.shared_expert_gate);
    add_matrix(weights::kMixGate, "mix_gate", weights.mix_gate);
    add_matrix(weights::kLatentDown, "latent_down", weights.latent_down);
    add_matrix(weights::kLatentUp, "latent_up", weights.latent_up);
    add_vector(weights::kRouterBias, "router_bias", weights.router_bias);
    add_vector(weights::kSelectionBias, "selection_bias", weights.selection_bias);
    add_vector(weights::kExpertScale, "expert_scale", weights.expert_scale);
    add_vector(weights::kGlobalScale, "global_scale", weights.global_scale);
    add_vector(weights::kRouterInputScale, "router_input_scale", weights.router_input_scale);
    add_vector(weights::kMixGateBias, "mix_gate_bias", weights.mix_gate_bias);
    add_vector(weights::kLatentNorm, "latent_norm", weights.latent_norm);
    add_vector(weights::kOutputBias, "output_bias", weights.output_bias);
    add_router_tensors(weights);
  }

  WeightInfo describe(WeightId id) const override { return at(id).info; }

  ConstTensorView view(WeightId id, int64_t expert) const override {
    const IdView& matrix = checked_at(id, expert);
    if (matrix.col_stride != 1) return {};
    return {.data = offset_by(matrix.data, expert * matrix.matrix_stride, matrix.info.dtype),
            .dtype = matrix.info.dtype,
            .shape = {matrix.info.rows, matrix.info.cols},
            .row_stride = matrix.row_stride == matrix.info.cols ? 0 : matrix.row_stride};
  }

  MemoryKind memory() const override { return memory_; }

  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    const IdView& matrix = checked_at(id, expert);
    if (memory_ == MemoryKind::kDevice) refuse_read(id, expert);
    std::byte* out = destination.data();
    if (bit_size(matrix.info.dtype) < 8) return read_codes(matrix, expert, block, out);
    const auto element = static_cast<size_t>(byte_size(matrix.info.dtype));
    const auto cols = static_cast<size_t>(block.col_end - block.col_begin);
    for (int64_t row = block.row_begin; row < block.row_end; ++row, out += cols * element) {
      const std::byte* from = offset_by(matrix.data,
                                        expert * matrix.matrix_stride + row * matrix.row_stride +
                                            block.col_begin * matrix.col_stride,
                                        matrix.info.dtype);
      if (matrix.col_stride == 1) {
        std::memcpy(out, from, cols * element);
        continue;
      }
      const auto step = static_cast<size_t>(matrix.col_stride) * element;
      for (size_t col = 0; col < cols; ++col) {
        std::memcpy(out + col * element, from + col * step, element);
      }
    }
  }

 private:
  static void read_codes(const IdView& matrix, int64_t expert, const WeightBlock& block,
                         std::byte* out) {
    const DType dtype = matrix.info.dtype;
    const int64_t cols = block.col_end - block.col_begin;
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      const int64_t begin = expert * matrix.matrix_stride + row * matrix.row_stride;
      copy_codes(offset_by(matrix.data, begin, dtype), block.col_begin, cols, bit_size(dtype), out);
      out += packed_bytes(dtype, cols);
    }
  }

  const IdView& at(WeightId id) const { return views_[id]; }

  const IdView& checked_at(WeightId id, int64_t expert) const {
    const IdView& matrix = at(id);
    if (expert >= 0 && expert < matrix.info.count) return matrix;
    throw Error(ErrorCode::kInvalidArgument, {.what = "no such weight matrix",
                                              .tensor = locate(id, expert),
                                              .found = std::to_string(expert),
                                              .limit = std::to_string(matrix.info.count - 1)});
  }

  [[noreturn]] void refuse_read(WeightId id, int64_t expert) const {
    throw Error(ErrorCode::kDevice,
                {.what = "weights in device memory are not read by the host",
                 .tensor = locate(id, expert),
                 .hint = "columns that lie apart, as of interleaved biases, need host memory"});
  }

  void set(WeightId id, const IdView& view) { views_[id] = view; }

  void add_matrix(WeightId id, const char* name, const ConstTensorView& tensor) {
    if (tensor.empty()) return;
    check_tensor({name, tensor}, 2);
    set_dense(id, stack_of({name, tensor}, 3, true));
  }

  void add_vector(WeightId id, const char* name, const ConstTensorView& tensor) {
    if (tensor.empty()) return;
    check_tensor({name, tensor}, 1);
    set_dense(id, stack_of({name, tensor}, 2, true));
  }

  void add_router_tensors(const ExpertWeights& weights) {
    routing::check_router_tensor_names(weights.router_tensors);
    for (const routing::RouterTensor* own : routing::all_router_tensors()) {
      const std::string name(own->name);
      const ConstTensorView view =
          routing::find_view(weights, weights.router_tensors, own->weights_field, own->name);
      if (own->is_vector) {
        add_vector(*own->id, name.c_str(), view);
      } else {
        add_matrix(*own->id, name.c_str(), view);
      }
    }
  }

  void set_dense(WeightId id, const Stack& stack) {
    set(id, {.data = stack.data,
             .info = {stack.count, stack.rows, stack.cols, stack.dtype},
             .matrix_stride = stack.rows * stack.cols,
             .row_stride = stack.cols});
  }

  // The rows of a fused tensor are the gate half and the up half, or all of them are up.
  void set_halves(const MlpTensors& mlp, WeightPlane plane, const Stack& fused, GateUpOrder order) {
    if (order == GateUpOrder::kSingle) return set_dense(mlp.up(plane), fused);
    const bool interleaved = order == GateUpOrder::kInterleaved;
    IdView half{.data = fused.data,
                .info = {fused.count, fused.rows / 2, fused.cols, fused.dtype},
                .matrix_stride = fused.rows * fused.cols,
                .row_stride = interleaved ? 2 * fused.cols : fused.cols};
    set(mlp.gate(plane), half);
    half.data =
        offset_by(fused.data, interleaved ? fused.cols : fused.rows / 2 * fused.cols, fused.dtype);
    set(mlp.up(plane), half);
  }

  // Does what set_halves does, for vectors whose entries are the rows.
  void set_bias_halves(const MlpTensors& mlp, const Stack& fused) {
    if (!mlp.is_gated()) return set_dense(mlp.up(WeightPlane::kBias), fused);
    const bool interleaved = mlp.order == GateUpOrder::kInterleaved;
    const int64_t half_size = fused.cols / 2;
    IdView half{.data = fused.data,
                .info = {fused.count, 1, half_size, fused.dtype},
                .matrix_stride = fused.cols,
                .row_stride = half_size,
                .col_stride = interleaved ? 2 : 1};
    set(mlp.gate(WeightPlane::kBias), half);
    half.data = offset_by(fused.data, interleaved ? 1 : half_size, fused.dtype);
    set(mlp.up(WeightPlane::kBias), half);
  }

  void add_mlps(const ExpertWeights& weights) {
    add_mlp({.mlp = WeightMlp::kRouted,
             .order = weights.order,
             .prefix = "",
             .gate_up = weights.gate_up,
             .down = weights.down,
             .gate_up_bias = weights.gate_up_bias,
             .down_bias = weights.down_bias,
             .planes = routed_planes(weights)});
    if (!weights.shared_gate_up.empty() || !weights.shared_down.empty()) {
      add_mlp({.mlp = WeightMlp::kShared,
               .order = weights.shared_order,
               .prefix = "shared_",
               .gate_up = weights.shared_gate_up,
               .down = weights.shared_down,
               .gate_up_bias = weights.shared_gate_up_bias,
               .down_bias = weights.shared_down_bias,
               .planes = shared_planes(weights)});
    }
    if (!weights.residual_gate_up.empty() || !weights.residual_down.empty()) {
      const ConstTensorView none;
      add_mlp({.mlp = WeightMlp::kResidual,
               .order = weights.residual_order,
               .prefix = "residual_",
               .gate_up = weights.residual_gate_up,
               .down = weights.residual_down,
               .gate_up_bias = none,
               .down_bias = none,
               .planes = {}});
    }
  }

  void add_mlp(const MlpTensors& mlp) {
    const std::string down_name = mlp.prefix + "down";
    const Stack gate_up = stack_of({mlp.prefix + "gate_up", mlp.gate_up}, 3, mlp.may_be_one());
    const Stack down = stack_of({down_name, mlp.down}, 3, mlp.may_be_one());
    const int64_t halves = mlp.is_gated() ? 2 : 1;
    check_same(down_name, "gate_up and down hold different numbers of experts", gate_up.count,
               down.count);
    if (gate_up.rows != halves * down.cols || gate_up.cols != down.rows) {
      throw Error(ErrorCode::kShape,
                  {.what = "gate_up and down do not fit each other",
                   .tensor = down_name,
                   .expected = halves == 1 ? "gate_up [.., I, H] and down [.., H, I]"
                                           : "gate_up [.., 2*I, H] and down [.., H, I]",
                   .found = Shape{gate_up.rows, gate_up.cols}.to_string() + " and " +
                            Shape{down.rows, down.cols}.to_string()});
    }
    if (gate_up.dtype != down.dtype) {
      throw Error(ErrorCode::kDType, {.what = "gate_up and down differ in type",
                                      .tensor = down_name,
                                      .expected = std::string(to_string(gate_up.dtype)),
                                      .found = std::string(to_string(down.dtype))});
    }
    set_halves(mlp, WeightPlane::kWeights, gate_up, mlp.order);
    set_dense(mlp.down_of(WeightPlane::kWeights), down);
    add_biases(mlp, gate_up, down);
    for (const PlaneTensors& plane : mlp.planes) add_plane(mlp, plane);
  }

  void add_plane(const MlpTensors& mlp, const PlaneTensors& tensors) {
    const auto named = [&](const char* matrix, const ConstTensorView& tensor) {
      return Named{mlp.prefix + matrix + std::string(tensors.suffix), tensor};
    };
    if (!tensors.gate_up.empty()) {
      add_gate_up_plane(mlp, tensors.plane, named("gate_up", tensors.gate_up));
    }
    if (tensors.down.empty()) return;
    const Named down = named("down", tensors.down);
    set_dense(mlp.down_of(tensors.plane), plane_stack(down, tensors.plane, mlp.may_be_one()));
  }

  void add_biases(const MlpTensors& mlp, const Stack& gate_up, const Stack& down) {
    if (!mlp.gate_up_bias.empty()) {
      const Named named{mlp.prefix + "gate_up_bias", mlp.gate_up_bias};
      const Stack bias = stack_of(named, 2, mlp.may_be_one());
      check_same(named.name, "another number of experts", gate_up.count, bias.count);
      check_same(named.name, "another size than gate_up", gate_up.rows, bias.cols);
      set_bias_halves(mlp, bias);
    }
    if (!mlp.down_bias.empty()) {
      const Named named{mlp.prefix + "down_bias", mlp.down_bias};
      const Stack bias = stack_of(named, 2, mlp.may_be_one());
      check_same(named.name, "another number of experts", down.count, bias.count);
      check_same(named.name, "another size than down", down.rows, bias.cols);
      set_dense(mlp.down_of(WeightPlane::kBias), bias);
    }
  }

  // The plane of gate, then of up: each has half of the rows, or both share one row.
  void add_gate_up_plane(const MlpTensors& mlp, WeightPlane plane, const Named& named) {
    const Stack both = plane_stack(named, plane, mlp.may_be_one());
    if (!mlp.is_gated()) return set_dense(mlp.up(plane), both);
    if (both.rows == 1) {
      set_dense(mlp.gate(plane), both);
      return set_dense(mlp.up(plane), both);
    }
    if (both.rows % 2 != 0) {
      throw Error(ErrorCode::kShape,
                  {.what = "gate and up must have as many rows of scales or zeros",
                   .tensor = named.name,
                   .expected = "an even number of rows, or one",
                   .found = std::to_string(both.rows),
                   .hint = "blocks that hold rows of both gate and up cannot be told apart"});
    }
    // Rows are interleaved only if there is one scale per row.
    const bool interleaved = mlp.order == GateUpOrder::kInterleaved;
    const bool per_row = both.rows == 2 * at(mlp.up(WeightPlane::kWeights)).info.rows;
    if (interleaved && !per_row && both.rows != 2) {
      throw Error(ErrorCode::kShape, {.what = "interleaved rows of gate and up have no blocks",
                                      .tensor = named.name,
                                      .expected = "one row of scales per row, or one per matrix",
                                      .found = std::to_string(both.rows)});
    }
    set_halves(mlp, plane, both, interleaved && per_row ? mlp.order : GateUpOrder::kConcatenated);
  }

  MemoryKind memory_;
  WeightTable<IdView> views_;
};

}  // namespace

std::unique_ptr<WeightSource> make_pointer_source(const ExpertWeights& weights) {
  return std::make_unique<PointerSource>(weights);
}

}  // namespace conclave::inline v0
