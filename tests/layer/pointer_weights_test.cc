// Compares layers of every kind on the caller's own memory, in each order of gate and up rows, with
// the same weights from another source.

#include "core/float_convert.h"
#include "quant/planes.h"
#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;
using testing::SpecDraw;

// Reads whole roles of a source into stacked tensors, which it keeps.
class StackedWeights {
 public:
  StackedWeights(const WeightSource& source, GateUpOrder order) : source_(source), order_(order) {}

  // Returns [count, rows, cols] of one role; an empty view if the source has none.
  ConstTensorView stack(WeightId role, int rank) {
    const WeightInfo info = source_.describe(role);
    if (info.count == 0) return {};
    tensors_.push_back(read_all(role));
    ConstTensorView view = tensors_.back().const_view();
    if (rank == 1) view.shape = {info.cols};
    if (rank == 2)
      view.shape = info.count == 1 && info.rows != 1 ? Shape{info.rows, info.cols}
                                                     : Shape{info.count * info.rows, info.cols};
    return view;
  }

  // A plane of numbers or of orders, without the axis of its one row where there is one: [E, 1, 1]
  // is [E], [E, 2, 1] is [E, 2], [E, 1, cols] is [E, cols].
  static ConstTensorView without_ones(ConstTensorView view, WeightPlane plane) {
    if (view.empty()) return view;
    const Shape& shape = view.shape;
    if (plane == WeightPlane::kGlobalScale || plane == WeightPlane::kInputScale) {
      view.shape = shape[1] == 1 ? Shape{shape[0]} : Shape{shape[0], shape[1]};
    } else if (quant::is_by_column(plane) && shape[1] == 1) {
      view.shape = {shape[0], shape[2]};
    }
    return view;
  }

  // The fused tensor of a gate and an up role, [count, 2 * rows, cols], or of up alone. For vectors
  // each entry counts as a row.
  ConstTensorView fuse(WeightId gate, WeightId up, bool vectors, GateUpOrder& order) {
    const WeightInfo info = source_.describe(up);
    if (info.count == 0) return {};
    const bool single = source_.describe(gate).count == 0;
    order = single ? GateUpOrder::kSingle : order_;
    if (single) return vectors ? stack(up, 2) : stack(up, 3);
    const int64_t rows = vectors ? info.cols : info.rows;
    const int64_t cols = vectors ? 1 : info.cols;
    const Tensor gates = read_all(gate);
    const Tensor ups = read_all(up);
    Tensor fused(info.dtype, {info.count, 2 * rows, cols});
    const auto bytes = static_cast<size_t>(cols * byte_size(info.dtype));
    for (int64_t expert = 0; expert < info.count; ++expert) {
      for (int64_t row = 0; row < rows; ++row) {
        const bool interleaved = order == GateUpOrder::kInterleaved;
        const int64_t base = expert * 2 * rows;
        const int64_t gate_row = base + (interleaved ? 2 * row : row);
        const int64_t up_row = base + (interleaved ? 2 * row + 1 : rows + row);
        const auto from = static_cast<size_t>(expert * rows + row) * bytes;
        std::memcpy(fused.as<std::byte>() + static_cast<size_t>(gate_row) * bytes,
                    gates.as<std::byte>() + from, bytes);
        std::memcpy(fused.as<std::byte>() + static_cast<size_t>(up_row) * bytes,
                    ups.as<std::byte>() + from, bytes);
      }
    }
    tensors_.push_back(std::move(fused));
    ConstTensorView view = tensors_.back().const_view();
    if (vectors) view.shape = {info.count, 2 * rows};
    return view;
  }

 private:
  Tensor read_all(WeightId role) const {
    const WeightInfo info = source_.describe(role);
    Tensor all(info.dtype, {info.count, info.rows, info.cols});
    const size_t bytes = all.size_bytes() / static_cast<size_t>(info.count);
    for (int64_t expert = 0; expert < info.count; ++expert) {
      source_.read(role, expert, {0, info.rows, 0, info.cols},
                   {all.as<std::byte>() + static_cast<size_t>(expert) * bytes, bytes});
    }
    return all;
  }

  const WeightSource& source_;
  GateUpOrder order_;
  std::vector<Tensor> tensors_;
};

ExpertWeights stacked(StackedWeights& from) {
  ExpertWeights weights{.gate_up = {}, .down = {}};
  using namespace weights;
  weights.gate_up = from.fuse(kGate, kUp, false, weights.order);
  weights.gate_up_bias =
      from.fuse(kGate.with(WeightPlane::kBias), kUp.with(WeightPlane::kBias), true, weights.order);
  weights.down = from.stack(kDown, 3);
  weights.down_bias = from.stack(kDown.with(WeightPlane::kBias), 2);
  weights.shared_gate_up = from.fuse(kSharedGate, kSharedUp, false, weights.shared_order);
  weights.shared_gate_up_bias =
      from.fuse(kSharedGate.with(WeightPlane::kBias), kSharedUp.with(WeightPlane::kBias), true,
                weights.shared_order);
  weights.shared_down = from.stack(kSharedDown, 3);
  weights.shared_down_bias = from.stack(kSharedDown.with(WeightPlane::kBias), 2);
  weights.residual_gate_up = from.fuse(kResidualGate, kResidualUp, false, weights.residual_order);
  weights.residual_down = from.stack(kResidualDown, 3);
  weights.router = from.stack(kRouter, 2);
  weights.shared_expert_gate = from.stack(kSharedExpertGate, 2);
  weights.mix_gate = from.stack(kMixGate, 2);
  weights.mix_gate_bias = from.stack(kMixGateBias, 1);
  weights.latent_down = from.stack(kLatentDown, 2);
  weights.latent_norm = from.stack(kLatentNorm, 1);
  weights.latent_up = from.stack(kLatentUp, 2);
  weights.output_bias = from.stack(kOutputBias, 1);
  weights.selection_bias = from.stack(kSelectionBias, 1);
  weights.router_bias = from.stack(kRouterBias, 1);
  weights.expert_scale = from.stack(kExpertScale, 1);
  weights.global_scale = from.stack(kGlobalScale, 1);
  return weights;
}

// The planes that give codes a meaning. One row is that of gate, then that of up, whatever the
// order of other rows; rows of scales and zeros have the order of the matrix.
void stack_planes(StackedWeights& concatenated, StackedWeights& ordered, ExpertWeights& weights) {
  struct Plane {
    WeightPlane plane;
    ConstTensorView ExpertWeights::*gate_up;
    ConstTensorView ExpertWeights::*down;
    ConstTensorView ExpertWeights::*shared_gate_up;
    ConstTensorView ExpertWeights::*shared_down;
  };
  using W = ExpertWeights;
  const Plane planes[] = {
      {WeightPlane::kScale, &W::gate_up_scale, &W::down_scale, &W::shared_gate_up_scale,
       &W::shared_down_scale},
      {WeightPlane::kZero, &W::gate_up_zero, &W::down_zero, &W::shared_gate_up_zero,
       &W::shared_down_zero},
      {WeightPlane::kGlobalScale, &W::gate_up_global_scale, &W::down_global_scale,
       &W::shared_gate_up_global_scale, &W::shared_down_global_scale},
      {WeightPlane::kColumnOrder, &W::gate_up_column_order, &W::down_column_order,
       &W::shared_gate_up_column_order, &W::shared_down_column_order},
      {WeightPlane::kColumnFactor, &W::gate_up_column_factor, &W::down_column_factor,
       &W::shared_gate_up_column_factor, &W::shared_down_column_factor}};
  for (const Plane& row : planes) {
    const bool by_row = row.plane == WeightPlane::kScale || row.plane == WeightPlane::kZero;
    StackedWeights& memory = by_row ? ordered : concatenated;
    const auto fused = [&](WeightId gate, WeightId up) {
      GateUpOrder ignored{};
      return StackedWeights::without_ones(
          memory.fuse(gate.with(row.plane), up.with(row.plane), false, ignored), row.plane);
    };
    const auto alone = [&](WeightId down) {
      return StackedWeights::without_ones(memory.stack(down.with(row.plane), 3), row.plane);
    };
    weights.*row.gate_up = fused(weights::kGate, weights::kUp);
    weights.*row.down = alone(weights::kDown);
    weights.*row.shared_gate_up = fused(weights::kSharedGate, weights::kSharedUp);
    weights.*row.shared_down = alone(weights::kSharedDown);
  }
}

class PointerWeights : public ::testing::TestWithParam<GateUpOrder> {
 protected:
  static MoeSpec coded_spec() {
    MoeSpec spec = make_spec(4, 2, 96, 48, DType::kI8);
    spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 40};
    spec.quant = {.weights = WeightScale::kBlock,
                  .block_rows = 1,
                  .block_cols = 32,
                  .zeros = WeightZero::kPoint,
                  .has_global_scale = true,
                  .has_column_order = true,
                  .has_column_factors = true};
    return spec;
  }
};

TEST_P(PointerWeights, WhatGivesCodesAMeaning_HasTheBitsOfItsSource) {
  const Context context({.num_threads = 2});
  const Tensor hidden = random_tensor(DType::kF32, 9, 96, 1);
  MoeSpec several = coded_spec();
  several.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 40, .count = 3};
  MoeSpec by_channel = coded_spec();
  by_channel.quant = {.weights = WeightScale::kChannel, .zeros = WeightZero::kOffset};
  MoeSpec single = coded_spec();
  single.activation.name = "relu2_no_mul";
  for (const MoeSpec& spec : {coded_spec(), several, by_channel, single}) {
    SCOPED_TRACE(testing::parts_text(spec));
    const auto source = make_synthetic_source(spec, 3);
    StackedWeights memory(*source, GetParam());
    StackedWeights concatenated(*source, GateUpOrder::kConcatenated);
    ExpertWeights weights = stacked(memory);
    stack_planes(concatenated, memory, weights);
    const auto pointers = make_pointer_source(weights);
    const MoeLayer expected = MoeLayer::create(context, spec, *source);
    const MoeLayer layer = MoeLayer::create(context, spec, *pointers);
    EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kF32).out,
                          run_layer(expected, hidden.view(), DType::kF32).out));
  }
}

// A number or an order may be one for gate and up.
TEST_P(PointerWeights, OneNumberForGateAndUp_IsThatOfEach) {
  const MoeSpec spec = coded_spec();
  const auto source = make_synthetic_source(spec, 3);
  StackedWeights memory(*source, GetParam());
  StackedWeights concatenated(*source, GateUpOrder::kConcatenated);
  ExpertWeights weights = stacked(memory);
  stack_planes(concatenated, memory, weights);
  const WeightId number = weights::kUp.with(WeightPlane::kGlobalScale);
  const WeightId order = weights::kUp.with(WeightPlane::kColumnOrder);
  weights.gate_up_global_scale =
      StackedWeights::without_ones(memory.stack(number, 3), WeightPlane::kGlobalScale);
  weights.gate_up_column_order =
      StackedWeights::without_ones(memory.stack(order, 3), WeightPlane::kColumnOrder);
  const WeightId factor = weights::kUp.with(WeightPlane::kColumnFactor);
  weights.gate_up_column_factor =
      StackedWeights::without_ones(memory.stack(factor, 3), WeightPlane::kColumnFactor);
  const auto pointers = make_pointer_source(weights);
  for (const WeightId id : {number, order, factor}) {
    const WeightInfo info = source->describe(id);
    const auto bytes = static_cast<size_t>(info.cols * byte_size(info.dtype));
    std::vector<std::byte> expected(bytes);
    source->read(id, 2, {0, 1, 0, info.cols}, expected);
    for (const WeightMatrix matrix : {WeightMatrix::kGate, WeightMatrix::kUp}) {
      const WeightId of{WeightMlp::kRouted, matrix, *id.plane()};
      EXPECT_EQ(pointers->describe(of).cols, info.cols);
      std::vector<std::byte> found(bytes);
      pointers->read(of, 2, {0, 1, 0, info.cols}, found);
      EXPECT_EQ(found, expected) << to_string(of);
    }
  }
}

TEST_P(PointerWeights, PlanesOfAnotherShape_AreRefusedByName) {
  const Context context({.num_threads = 1});
  const MoeSpec spec = coded_spec();
  const auto source = make_synthetic_source(spec, 3);
  StackedWeights memory(*source, GetParam());
  StackedWeights concatenated(*source, GateUpOrder::kConcatenated);
  ExpertWeights complete = stacked(memory);
  stack_planes(concatenated, memory, complete);
  const auto refused = [&](ConstTensorView ExpertWeights::*plane, const Shape& shape) {
    ExpertWeights weights = complete;
    (weights.*plane).shape = shape;
    return testing::code_of(
        [&] { MoeLayer::create(context, spec, *make_pointer_source(weights)); });
  };
  EXPECT_EQ(refused(&ExpertWeights::gate_up_global_scale, {2, 2, 2}), ErrorCode::kShape);
  EXPECT_EQ(refused(&ExpertWeights::gate_up_global_scale, {2, 3}), ErrorCode::kShape);
  EXPECT_EQ(refused(&ExpertWeights::down_global_scale, {2, 2}), ErrorCode::kTensorShape);
  EXPECT_EQ(refused(&ExpertWeights::down_column_order, {4, 47}), ErrorCode::kTensorShape);
  EXPECT_EQ(refused(&ExpertWeights::down_column_factor, {4, 47}), ErrorCode::kTensorShape);
  EXPECT_EQ(refused(&ExpertWeights::down_zero, {4, 95, 2}), ErrorCode::kTensorShape);
  ExpertWeights without = complete;
  without.gate_up_zero = {};
  EXPECT_EQ(
      testing::code_of([&] { MoeLayer::create(context, spec, *make_pointer_source(without)); }),
      ErrorCode::kTensorMissing);
}

TEST_P(PointerWeights, EveryKindOfLayer_HasTheBitsOfItsSource) {
  const Context context({.num_threads = 2});
  for (uint32_t seed = 100; seed < 130; ++seed) {
    const MoeSpec spec = SpecDraw(seed).draw();
    SCOPED_TRACE(testing::parts_text(spec));
    const auto source = make_synthetic_source(spec, seed);
    StackedWeights memory(*source, GetParam());
    const auto pointers = make_pointer_source(stacked(memory));
    const Tensor hidden = random_tensor(DType::kF32, 9, spec.hidden_size, seed);
    const MoeLayer expected = MoeLayer::create(context, spec, *source);
    const MoeLayer layer = MoeLayer::create(context, spec, *pointers);
    EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kF32).out,
                          run_layer(expected, hidden.view(), DType::kF32).out));
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, PointerWeights,
                         ::testing::Values(GateUpOrder::kConcatenated, GateUpOrder::kInterleaved),
                         [](const auto& row) {
                           return row.param == GateUpOrder::kInterleaved ? "Interleaved"
                                                                         : "Concatenated";
                         });

TEST(CheckSource, EveryRoleOfALayer_IsAskedForByName) {
  // A source that lacks one role.
  class Without final : public WeightSource {
   public:
    Without(const WeightSource& inner, WeightId missing) : inner_(inner), missing_(missing) {}
    WeightInfo describe(WeightId role) const override {
      return role == missing_ ? WeightInfo{} : inner_.describe(role);
    }
    void read(WeightId role, int64_t expert, const WeightBlock& block,
              std::span<std::byte> destination) const override {
      inner_.read(role, expert, block, destination);
    }

   private:
    const WeightSource& inner_;
    WeightId missing_;
  };
  const Context context({.num_threads = 1});
  for (uint32_t seed = 200; seed < 212; ++seed) {
    const MoeSpec spec = SpecDraw(seed).draw();
    SCOPED_TRACE(testing::parts_text(spec));
    const auto source = make_synthetic_source(spec, seed);
    for (const WeightId role : weights::kAll) {
      if (source->describe(role).count == 0 || role == weights::kMixGateBias) continue;
      try {
        MoeLayer::create(context, spec, Without(*source, role));
        ADD_FAILURE() << to_string(role) << " was not missed";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTensorMissing) << error.what();
        EXPECT_NE(std::string(error.what()).find(to_string(role)), std::string::npos);
      }
    }
  }
}

// Anything that a source holds beyond the layer's matrices is refused, not cut off.
TEST(CheckSource, EveryRoleLargerThanTheLayers_IsRefusedByName) {
  class Larger final : public WeightSource {
   public:
    Larger(const WeightSource& inner, WeightId role, int64_t WeightInfo::*size)
        : inner_(inner), role_(role), size_(size) {}
    WeightInfo describe(WeightId role) const override {
      WeightInfo info = inner_.describe(role);
      if (role == role_) ++(info.*size_);
      return info;
    }
    void read(WeightId, int64_t, const WeightBlock&, std::span<std::byte>) const override {
      ADD_FAILURE() << "read before it was refused";
    }

   private:
    const WeightSource& inner_;
    WeightId role_;
    int64_t WeightInfo::*size_;
  };
  const Context context({.num_threads = 1});
  for (uint32_t seed = 200; seed < 212; ++seed) {
    const MoeSpec spec = SpecDraw(seed).draw();
    SCOPED_TRACE(testing::parts_text(spec));
    const auto source = make_synthetic_source(spec, seed);
    for (const WeightId role : weights::kAll) {
      if (source->describe(role).count == 0) continue;
      for (const auto size : {&WeightInfo::count, &WeightInfo::rows, &WeightInfo::cols}) {
        const Larger larger(*source, role, size);
        EXPECT_EQ(testing::code_of([&] { MoeLayer::create(context, spec, larger); }),
                  ErrorCode::kTensorShape)
            << to_string(role);
      }
    }
  }
}

}  // namespace
}  // namespace conclave
