#include "layer/pointer_source.h"

#include "core/code_bits.h"
#include "core/weight_types.h"
#include "layer/pointer_stack.h"
#include "quant/planes.h"
#include "routing/router_tensors.h"
#include "spec/weight_names.h"

#include "conclave/error.h"
#include "conclave/weights.h"

#include <array>
#include <cstring>
#include <optional>
#include <string>

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

using Field = ConstTensorView ExpertWeights::*;
using Weights = ExpertWeights;

// The fields with a plane of an MLP: of gate and up in one tensor, and of down. Null: it has none.
struct PlaneFields {
  Field gate_up = nullptr;
  Field down = nullptr;
};
struct PlaneRow {
  WeightPlane plane = WeightPlane::kWeights;
  PlaneFields routed;
  PlaneFields shared;
  PlaneFields residual = {};
};
// A matrix comes first, then its bias; the others give codes a meaning.
constexpr std::array kPlanes = {
    PlaneRow{WeightPlane::kWeights,
             {&Weights::gate_up, &Weights::down},
             {&Weights::shared_gate_up, &Weights::shared_down},
             {&Weights::residual_gate_up, &Weights::residual_down}},
    PlaneRow{WeightPlane::kBias,
             {&Weights::gate_up_bias, &Weights::down_bias},
             {&Weights::shared_gate_up_bias, &Weights::shared_down_bias}},
    PlaneRow{WeightPlane::kScale,
             {&Weights::gate_up_scale, &Weights::down_scale},
             {&Weights::shared_gate_up_scale, &Weights::shared_down_scale}},
    PlaneRow{WeightPlane::kZero,
             {&Weights::gate_up_zero, &Weights::down_zero},
             {&Weights::shared_gate_up_zero, &Weights::shared_down_zero}},
    PlaneRow{WeightPlane::kGlobalScale,
             {&Weights::gate_up_global_scale, &Weights::down_global_scale},
             {&Weights::shared_gate_up_global_scale, &Weights::shared_down_global_scale}},
    PlaneRow{WeightPlane::kInputScale,
             {&Weights::gate_up_input_scale, &Weights::down_input_scale},
             {&Weights::shared_gate_up_input_scale, &Weights::shared_down_input_scale}},
    PlaneRow{WeightPlane::kColumnOrder,
             {&Weights::gate_up_column_order, &Weights::down_column_order},
             {&Weights::shared_gate_up_column_order, &Weights::shared_down_column_order}},
    PlaneRow{WeightPlane::kColumnFactor,
             {&Weights::gate_up_column_factor, &Weights::down_column_factor},
             {&Weights::shared_gate_up_column_factor, &Weights::shared_down_column_factor}},
};
constexpr const PlaneRow& kMatrices = kPlanes[0];
constexpr const PlaneRow& kBiases = kPlanes[1];

struct LayerRow {
  WeightId id;
  Field field;
  int rank = 2;
};
constexpr std::array kOfLayer = {
    LayerRow{weights::kRouter, &Weights::router},
    LayerRow{weights::kSharedExpertGate, &Weights::shared_expert_gate},
    LayerRow{weights::kMixGate, &Weights::mix_gate},
    LayerRow{weights::kLatentDown, &Weights::latent_down},
    LayerRow{weights::kLatentUp, &Weights::latent_up},
    LayerRow{weights::kRouterBias, &Weights::router_bias, 1},
    LayerRow{weights::kSelectionBias, &Weights::selection_bias, 1},
    LayerRow{weights::kExpertScale, &Weights::expert_scale, 1},
    LayerRow{weights::kGlobalScale, &Weights::global_scale, 1},
    LayerRow{weights::kRouterInputScale, &Weights::router_input_scale, 1},
    LayerRow{weights::kMixGateBias, &Weights::mix_gate_bias, 1},
    LayerRow{weights::kLatentNorm, &Weights::latent_norm, 1},
    LayerRow{weights::kOutputBias, &Weights::output_bias, 1},
};

// One MLP as the caller gives it.
struct MlpTensors {
  const ExpertWeights& weights;
  WeightMlp mlp = WeightMlp::kRouted;
  PlaneFields PlaneRow::*fields = nullptr;
  GateUpOrder order = GateUpOrder::kConcatenated;

  // All but routed experts may leave out the first dimension.
  bool may_be_one() const { return mlp != WeightMlp::kRouted; }
  bool is_gated() const { return order != GateUpOrder::kSingle; }
  WeightId gate(WeightPlane plane) const { return {mlp, WeightMatrix::kGate, plane}; }
  WeightId up(WeightPlane plane) const { return {mlp, WeightMatrix::kUp, plane}; }
  WeightId down_of(WeightPlane plane) const { return {mlp, WeightMatrix::kDown, plane}; }

  Named gate_up(const PlaneRow& row) const {
    return named("gate_up", row.plane, (row.*fields).gate_up);
  }
  Named down(const PlaneRow& row) const { return named("down", row.plane, (row.*fields).down); }
  bool is_there() const {
    return !gate_up(kMatrices).tensor.empty() || !down(kMatrices).tensor.empty();
  }

 private:
  Named named(const char* matrix, WeightPlane plane, Field field) const {
    static const ConstTensorView kNone;
    return {.name = std::string(prefix_of(mlp)) + matrix + std::string(suffix_of(plane)),
            .tensor = field != nullptr ? weights.*field : kNone};
  }
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
  PointerSource(const ExpertWeights& weights, GivenTensors given)
      : memory_(weights.memory), given_(given) {
    add_mlp({weights, WeightMlp::kRouted, &PlaneRow::routed, weights.order});
    for (const MlpTensors& mlp :
         {MlpTensors{weights, WeightMlp::kShared, &PlaneRow::shared, weights.shared_order},
          MlpTensors{weights, WeightMlp::kResidual, &PlaneRow::residual, weights.residual_order}}) {
      if (mlp.is_there()) add_mlp(mlp);
    }
    for (const LayerRow& row : kOfLayer) {
      add_own(row.id, {to_string(row.id), weights.*row.field}, row.rank);
    }
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

  // A matrix or a vector, one of each.
  void add_own(WeightId id, const Named& named, int rank) {
    if (named.tensor.empty()) return;
    check_tensor(named, rank);
    set_dense(id, stack_of(named, rank + 1, true));
  }

  void add_router_tensors(const ExpertWeights& weights) {
    routing::check_router_tensor_names(weights.router_tensors);
    for (const routing::RouterTensor* own : routing::all_router_tensors()) {
      const ConstTensorView view =
          routing::find_view(weights, weights.router_tensors, own->weights_field, own->name);
      add_own(*own->id, {std::string(own->name), view}, own->is_vector ? 1 : 2);
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

  // A part of a layer may lack either matrix.
  std::optional<Stack> matrix_of(const MlpTensors& mlp, const Named& named) const {
    if (given_ == GivenTensors::kPart && named.tensor.empty()) return std::nullopt;
    return stack_of(named, 3, mlp.may_be_one());
  }

  static void check_fit(const MlpTensors& mlp, const Stack& gate_up, const Stack& down) {
    const Named named_down = mlp.down(kMatrices);
    const int64_t halves = mlp.is_gated() ? 2 : 1;
    check_same(named_down.name, "gate_up and down hold different numbers of experts", gate_up.count,
               down.count);
    if (gate_up.rows != halves * down.cols || gate_up.cols != down.rows) {
      throw Error(ErrorCode::kShape,
                  {.what = "gate_up and down do not fit each other",
                   .tensor = named_down.name,
                   .expected = halves == 1 ? "gate_up [.., I, H] and down [.., H, I]"
                                           : "gate_up [.., 2*I, H] and down [.., H, I]",
                   .found = Shape{gate_up.rows, gate_up.cols}.to_string() + " and " +
                            Shape{down.rows, down.cols}.to_string()});
    }
    if (gate_up.dtype != down.dtype) {
      throw Error(ErrorCode::kDType, {.what = "gate_up and down differ in type",
                                      .tensor = named_down.name,
                                      .expected = std::string(to_string(gate_up.dtype)),
                                      .found = std::string(to_string(down.dtype))});
    }
  }

  void add_mlp(const MlpTensors& mlp) {
    const std::optional<Stack> gate_up = matrix_of(mlp, mlp.gate_up(kMatrices));
    const std::optional<Stack> down = matrix_of(mlp, mlp.down(kMatrices));
    if (gate_up && down) check_fit(mlp, *gate_up, *down);
    if (gate_up) set_halves(mlp, WeightPlane::kWeights, *gate_up, mlp.order);
    if (down) set_dense(mlp.down_of(WeightPlane::kWeights), *down);
    add_biases(mlp, gate_up, down);
    for (const PlaneRow& row : kPlanes) {
      if (quant::is_code_plane(row.plane)) add_plane(mlp, row);
    }
  }

  void add_plane(const MlpTensors& mlp, const PlaneRow& row) {
    const Named gate_up = mlp.gate_up(row);
    const Named down = mlp.down(row);
    if (!gate_up.tensor.empty()) add_gate_up_plane(mlp, row.plane, gate_up);
    if (down.tensor.empty()) return;
    set_dense(mlp.down_of(row.plane), plane_stack(down, row.plane, mlp.may_be_one()));
  }

  void add_biases(const MlpTensors& mlp, const std::optional<Stack>& gate_up,
                  const std::optional<Stack>& down) {
    const auto stack_like = [&](const Named& named, const std::optional<Stack>& of,
                                const Named& matrix, const char* size) {
      // A bias comes with its matrix: without it this throws.
      const Stack like = of ? *of : stack_of(matrix, 3, mlp.may_be_one());
      const Stack bias = stack_of(named, 2, mlp.may_be_one());
      check_same(named.name, "another number of experts", like.count, bias.count);
      check_same(named.name, size, like.rows, bias.cols);
      return bias;
    };
    const Named of_gate_up = mlp.gate_up(kBiases);
    const Named of_down = mlp.down(kBiases);
    if (!of_gate_up.tensor.empty()) {
      set_bias_halves(mlp, stack_like(of_gate_up, gate_up, mlp.gate_up(kMatrices),
                                      "another size than gate_up"));
    }
    if (of_down.tensor.empty()) return;
    set_dense(mlp.down_of(WeightPlane::kBias),
              stack_like(of_down, down, mlp.down(kMatrices), "another size than down"));
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
  GivenTensors given_;
  WeightTable<IdView> views_;
};

}  // namespace

std::unique_ptr<WeightSource> make_pointer_source(const ExpertWeights& weights,
                                                  GivenTensors given) {
  return std::make_unique<PointerSource>(weights, given);
}

std::unique_ptr<WeightSource> make_pointer_source(const ExpertWeights& weights) {
  return make_pointer_source(weights, GivenTensors::kWhole);
}

}  // namespace conclave::inline v0
