// Tests reload in both modes, and the state that a read failing midway leaves behind.

#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

using testing::code_of;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

// Covers every kind of weight except those of other shared modes.
MoeSpec spec_of() {
  MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  spec.shared = {.mode = SharedMode::kSoftmaxMix,
                 .intermediate_size = 16,
                 .activation = {.name = "gelu"},
                 .has_bias = true};
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.latent = {.size = 28, .has_norm = true};
  spec.residual = {.intermediate_size = 12};
  return spec;
}

// Fails on one matrix, by default that of a routed expert.
class FailingSource final : public WeightSource {
 public:
  FailingSource(const WeightSource& inner, int64_t expert, WeightId role = weights::kDown)
      : inner_(inner), expert_(expert), role_(role) {}
  WeightInfo describe(WeightId role) const override { return inner_.describe(role); }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (role == role_ && expert == expert_) {
      throw Error(ErrorCode::kFileRead, {.what = "disk gone", .tensor = locate(role, expert)});
    }
    inner_.read(role, expert, block, destination);
  }

 private:
  const WeightSource& inner_;
  int64_t expert_;
  WeightId role_;
};

class Reload : public ::testing::TestWithParam<ReloadMode> {
 protected:
  Reload()
      : owned_(make_layer(spec_of(), {}, {}, 1)),
        other_(make_synthetic_source(spec_of(), 2)),
        hidden_(random_tensor(DType::kBF16, 7, 40, 3)),
        before_(run_layer(owned_.layer, hidden_.view(), DType::kF32)),
        expected_(run_layer(make_layer(spec_of(), {}, {}, 2).layer, hidden_.view(), DType::kF32)) {}

  OwnedLayer owned_;
  std::unique_ptr<WeightSource> other_;
  Tensor hidden_;
  testing::LayerOutput before_;
  testing::LayerOutput expected_;
};

TEST_P(Reload, NewWeights_GiveTheResultOfAFreshLayer) {
  ASSERT_FALSE(same_bits(before_.out, expected_.out));
  owned_.layer.reload(*other_, GetParam());
  EXPECT_TRUE(same_bits(run_layer(owned_.layer, hidden_.view(), DType::kF32).out, expected_.out));
}

TEST_P(Reload, WrongShapes_LeaveTheOldWeights) {
  const auto wrong = make_synthetic_source(make_spec(6, 2, 40, 25, DType::kBF16), 2);
  EXPECT_EQ(code_of([&] { owned_.layer.reload(*wrong, GetParam()); }), ErrorCode::kTensorShape);
  EXPECT_TRUE(same_bits(run_layer(owned_.layer, hidden_.view(), DType::kF32).out, before_.out));
}

TEST_P(Reload, ReadFailsMidway_NeverGivesAMixture) {
  const FailingSource failing(*other_, 4);
  EXPECT_EQ(code_of([&] { owned_.layer.reload(failing, GetParam()); }), ErrorCode::kFileRead);
  if (GetParam() == ReloadMode::kStaged) {
    EXPECT_TRUE(same_bits(run_layer(owned_.layer, hidden_.view(), DType::kF32).out, before_.out));
  } else {
    EXPECT_EQ(code_of([&] { run_layer(owned_.layer, hidden_.view(), DType::kF32); }),
              ErrorCode::kState);
  }
  owned_.layer.reload(*other_, GetParam());
  EXPECT_TRUE(same_bits(run_layer(owned_.layer, hidden_.view(), DType::kF32).out, expected_.out));
}

TEST_P(Reload, AnySmallWeightFails_NeverGivesAMixture) {
  for (const WeightId role :
       {weights::kRouter, weights::kSharedUp, weights::kSharedDown.with(WeightPlane::kBias),
        weights::kMixGate, weights::kLatentUp, weights::kLatentNorm, weights::kOutputBias,
        weights::kResidualDown}) {
    SCOPED_TRACE(to_string(role));
    const FailingSource failing(*other_, 0, role);
    EXPECT_EQ(code_of([&] { owned_.layer.reload(failing, GetParam()); }), ErrorCode::kFileRead);
    if (GetParam() == ReloadMode::kStaged) {
      EXPECT_TRUE(same_bits(run_layer(owned_.layer, hidden_.view(), DType::kF32).out, before_.out));
    } else {
      EXPECT_EQ(code_of([&] { run_layer(owned_.layer, hidden_.view(), DType::kF32); }),
                ErrorCode::kState);
    }
  }
  owned_.layer.reload(*other_, GetParam());
  EXPECT_TRUE(same_bits(run_layer(owned_.layer, hidden_.view(), DType::kF32).out, expected_.out));
}

INSTANTIATE_TEST_SUITE_P(Modes, Reload,
                         ::testing::Values(ReloadMode::kStaged, ReloadMode::kInPlace),
                         [](const auto& row) {
                           return row.param == ReloadMode::kStaged ? "Staged" : "InPlace";
                         });

TEST(CreateFromFailingSource, ReadError_ReachesTheCaller) {
  const Context context({.num_threads = 4});
  const auto source = make_synthetic_source(spec_of(), 1);
  const FailingSource failing(*source, 2);
  EXPECT_EQ(code_of([&] { MoeLayer::create(context, spec_of(), failing); }), ErrorCode::kFileRead);
}

}  // namespace
}  // namespace conclave
