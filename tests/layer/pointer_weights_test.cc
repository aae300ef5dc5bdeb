// Compares layers of every kind on the caller's own memory, in each order of gate and up rows, with
// the same weights from another source.

#include "core/float_convert.h"
#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace conclave {
namespace {

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

class PointerWeights : public ::testing::TestWithParam<GateUpOrder> {};

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
