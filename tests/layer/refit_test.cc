// Refits of every kind of part, in every mode: before commit the old bits, after it those of a
// layer made from the merged weights.
#include "layer/moving_layers.h"
#include "layer/refit_sources.h"
#include "support/layer_parts.h"
#include "support/role_sources.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::FailsAtRead;
using testing::MergedSource;
using testing::NamedSource;
using testing::random_tensor;
using testing::same_bits;

constexpr std::array kModes = {RefitMode::kStaged, RefitMode::kStagedCopy, RefitMode::kInPlace};

MoeSpec spec_of_everything() {
  MoeSpec spec = testing::make_spec(6, 2, 40, 24, DType::kBF16);
  spec.shared = {.mode = SharedMode::kSoftmaxMix, .intermediate_size = 16, .has_bias = true};
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.router = {.has_logit_bias = true, .has_selection_bias = true, .has_expert_scale = true};
  spec.latent = {.size = 28, .has_norm = true};
  spec.residual = {.intermediate_size = 12};
  return spec;
}

// What a GGUF file of IQ4_NL becomes: codes with scales of f16.
MoeSpec spec_of_gguf() {
  return testing::coded_spec(DType::kIQ4, 6, 2, 96, 64,
                             {.weights = WeightScale::kBlock,
                              .block_rows = 1,
                              .block_cols = 32,
                              .scale_values = ScaleValues::kF16});
}

std::vector<testing::NamedSpec> families() {
  std::vector<testing::NamedSpec> all = testing::weight_families();
  all.emplace_back("Everything", spec_of_everything());
  all.emplace_back("Iq4", spec_of_gguf());
  MoeSpec steps = testing::e4m3_spec(
      6, 2, 96, 64,
      {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic});
  all.emplace_back("E4m3Steps", steps);
  steps.shared = {.mode = SharedMode::kAdd, .intermediate_size = 64};
  all.emplace_back("SharedE4m3Steps", steps);
  return all;
}

struct Layers {
  explicit Layers(const MoeSpec& of)
      : spec(of),
        first(make_synthetic_source(of, 3)),
        second(make_synthetic_source(of, 4)),
        hidden(random_tensor(DType::kF32, 7, of.hidden_size, 5)) {}
  MoeLayer make(const WeightSource& source, const LayerOptions& options = {}) const {
    return MoeLayer::create(context, spec, source, options);
  }
  Tensor run(const MoeLayer& layer) const {
    return testing::run_layer(layer, hidden.view(), DType::kF32).out;
  }

  MoeSpec spec;
  Context context{{.num_threads = 2}};
  std::unique_ptr<WeightSource> first;
  std::unique_ptr<WeightSource> second;
  Tensor hidden;
};

// One scope for each part that changes alone.
std::vector<RefitScope> scopes_of(const Layers& layers) {
  std::vector<RefitScope> scopes = {{},
                                    {.experts = {4}},
                                    {.experts = {0, 1, 3, 5}},
                                    {.tensors = {weights::kDown}},
                                    {.experts = {2, 5}, .tensors = {weights::kUp}}};
  for (const WeightId id : testing::roles_of(*layers.first)) {
    if (!id.mlp() || id.plane() == WeightPlane::kBias || id.mlp() == WeightMlp::kResidual) {
      scopes.push_back({.tensors = {id}});
    }
  }
  return scopes;
}

class RefitFamily : public ::testing::TestWithParam<testing::NamedSpec> {};

TEST_P(RefitFamily, EveryScopeAndMode_GivesTheMergedLayer) {
  const Layers layers(GetParam().second);
  const MoeLayer old_layer = layers.make(*layers.first);
  const Tensor before = layers.run(old_layer);
  const uint64_t old_hash = Refit::content_hash(old_layer);
  for (const RefitScope& scope : scopes_of(layers)) {
    const MergedSource merged(layers.spec, *layers.first, *layers.second, scope);
    const NamedSource named(layers.spec, merged, scope);
    const MoeLayer fresh = layers.make(merged);
    const Tensor expected = layers.run(fresh);
    for (const RefitMode mode : kModes) {
      SCOPED_TRACE(::testing::Message()
                   << "mode " << static_cast<int>(mode) << ", "
                   << (scope.tensors.empty() ? "all" : to_string(scope.tensors[0])) << " of "
                   << scope.experts.size() << " experts");
      MoeLayer layer = layers.make(*layers.first);
      Refit refit(layer, {.mode = mode, .scope = scope});
      refit.stage(named);
      if (mode != RefitMode::kInPlace) {
        EXPECT_TRUE(same_bits(layers.run(layer), before));
      }
      refit.commit();
      EXPECT_TRUE(same_bits(layers.run(layer), expected));
      EXPECT_EQ(Refit::content_hash(layer), Refit::content_hash(fresh));
      EXPECT_NE(Refit::content_hash(layer), old_hash);
      EXPECT_EQ(layer.status().refit_epoch, 1U);
    }
  }
}

TEST_P(RefitFamily, AnyReadFails_KeepsTheOldLayerOrNone) {
  const Layers layers(GetParam().second);
  MoeLayer layer = layers.make(*layers.first);
  const Tensor before = layers.run(layer);
  const uint64_t hash = Refit::content_hash(layer);
  for (const RefitMode mode : kModes) {
    SCOPED_TRACE(static_cast<int>(mode));
    bool has_failed = true;
    for (int64_t read = 0; has_failed; read += 7) {
      const FailsAtRead failing(*layers.first, read);
      Refit refit(layer, {.mode = mode});
      has_failed = code_of([&] { refit.stage(failing); }) == ErrorCode::kFileRead;
      EXPECT_EQ(has_failed, failing.has_failed());
      EXPECT_EQ(refit.is_staged(), !has_failed);
      if (!has_failed) break;
      EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kFileRead);
      refit.rollback();
      if (code_of([&] { layers.run(layer); }) == ErrorCode::kState) {
        EXPECT_EQ(mode, RefitMode::kInPlace);
        EXPECT_EQ(code_of([&] { Refit(layer, {.scope = {.experts = {1}}}); }), ErrorCode::kState);
        EXPECT_EQ(code_of([&] { Refit::content_hash(layer); }), ErrorCode::kState);
        Refit again(layer);
        again.stage(*layers.first);
        again.commit();
      }
      EXPECT_TRUE(same_bits(layers.run(layer), before));
      EXPECT_EQ(Refit::content_hash(layer), hash);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Weights, RefitFamily, ::testing::ValuesIn(families()),
                         [](const auto& test) { return test.param.first; });

TEST(Refit, PiecesOfSeveralSources_AreOneCommit) {
  const Layers layers(spec_of_everything());
  for (const RefitMode mode : kModes) {
    MoeLayer layer = layers.make(*layers.first);
    const MoeLayer larger = layer.with_max_tokens(8192);
    Refit refit(layer, {.mode = mode, .epoch = 41});
    EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kState);
    std::vector<RefitScope> pieces;
    for (int32_t expert = 0; expert < 6; ++expert) pieces.push_back({.experts = {expert}});
    RefitScope rest;
    for (const WeightId id : testing::roles_of(*layers.second)) {
      if (id.mlp() != WeightMlp::kRouted) rest.tensors.push_back(id);
    }
    pieces.push_back(rest);
    for (const RefitScope& piece : pieces) {
      EXPECT_FALSE(refit.is_staged());
      const NamedSource named(layers.spec, *layers.second, piece);
      refit.stage(named, piece);
    }
    EXPECT_TRUE(refit.is_staged());
    refit.commit();
    EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kState);
    const Tensor expected = layers.run(layers.make(*layers.second));
    EXPECT_TRUE(same_bits(layers.run(layer), expected));
    EXPECT_TRUE(same_bits(layers.run(larger), expected));
    EXPECT_EQ(larger.status().refit_epoch, 41U);
    EXPECT_EQ(code_of([&] { Refit(layer, {.epoch = 41}); }), ErrorCode::kInvalidArgument);
  }
}

TEST(Refit, WrongRequests_AreRefusedAndChangeNothing) {
  const Layers layers(testing::make_spec(6, 2, 40, 24, DType::kBF16));
  MoeLayer layer = layers.make(*layers.first);
  const Tensor before = layers.run(layer);
  const auto begin = [&](const RefitScope& scope) {
    return code_of([&] { Refit(layer, {.scope = scope}); });
  };
  EXPECT_EQ(begin({.experts = {6}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(begin({.experts = {-1}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(begin({.tensors = {weights::kSharedUp}}), ErrorCode::kInvalidArgument);
  Refit refit(layer, {.scope = {.experts = {1, 2}}});
  EXPECT_EQ(code_of([&] { Refit{layer}; }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { layer.reload(*layers.second, ReloadMode::kStaged); }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { layer.update_placement(layer.slots()); }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { layer.on_ranks(layers.context, {}); }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { refit.stage(*layers.second, {.experts = {3}}); }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { refit.stage(*layers.second, {.tensors = {weights::kRouter}}); }),
            ErrorCode::kInvalidArgument);
  const auto narrow = make_synthetic_source(testing::make_spec(6, 2, 40, 25, DType::kBF16), 2);
  EXPECT_EQ(code_of([&] { refit.stage(*narrow); }), ErrorCode::kTensorShape);
  const auto floats = make_synthetic_source(testing::make_spec(6, 2, 40, 24, DType::kF32), 2);
  EXPECT_EQ(code_of([&] { refit.stage(*floats); }), ErrorCode::kTensorDType);
  const NamedSource no_down(layers.spec, *layers.second, {.tensors = {weights::kUp}});
  EXPECT_EQ(code_of([&] { refit.stage(no_down); }), ErrorCode::kTensorMissing);
  refit.rollback();
  EXPECT_EQ(code_of([&] { refit.stage(*layers.second); }), ErrorCode::kState);
  EXPECT_TRUE(same_bits(layers.run(layer), before));
  EXPECT_EQ(layer.status().refit_epoch, 0U);
}

TEST(Refit, ValuesThatMeanNothing_AreRefusedInEveryModeBeforeAnyIsOverwritten) {
  MoeSpec spec = testing::make_spec(6, 2, 40, 24, DType::kF32);
  spec.router = {.has_selection_bias = true};
  const Layers layers(spec);
  MoeLayer layer = layers.make(*layers.first);
  const Tensor before = layers.run(layer);
  const testing::FilledSource filled(*layers.second, weights::kSelectionBias, 0,
                                     std::numeric_limits<float>::quiet_NaN());
  for (const RefitMode mode : kModes) {
    Refit refit(layer, {.mode = mode});
    EXPECT_EQ(code_of([&] { refit.stage(filled); }), ErrorCode::kInvalidArgument);
    refit.rollback();
    EXPECT_TRUE(same_bits(layers.run(layer), before));
  }
}

// A stage that fails takes back what it names, and one that succeeds what failed before it.
TEST(Refit, WhatIsStagedAgain_CountsAsItCameLast) {
  const Layers layers(testing::make_spec(6, 2, 40, 24, DType::kBF16));
  MoeLayer layer = layers.make(*layers.first);
  const Tensor before = layers.run(layer);
  const FailsAtRead broken(*layers.second, 0);
  Refit refit(layer);
  refit.stage(*layers.second);
  EXPECT_EQ(code_of([&] { refit.stage(broken, {.experts = {3}}); }), ErrorCode::kFileRead);
  EXPECT_FALSE(refit.is_staged());
  EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kFileRead);
  refit.stage(*layers.second, {.experts = {2}});
  EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kState);
  EXPECT_TRUE(same_bits(layers.run(layer), before));
  refit.stage(*layers.second, {.experts = {3}});
  refit.commit();
  EXPECT_TRUE(same_bits(layers.run(layer), layers.run(layers.make(*layers.second))));
}

// Its bytes changed while they were read.
class ChangedSource final : public WeightSource {
 public:
  explicit ChangedSource(const WeightSource& inner) : inner_(inner) {}
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner_.read(id, expert, block, destination);
  }
  void check_unchanged() const override {
    throw Error(ErrorCode::kFileChanged, {.what = "written meanwhile"});
  }

 private:
  const WeightSource& inner_;
};

TEST(Refit, SourceThatChangedMeanwhile_IsNotUsed) {
  const Layers layers(testing::make_spec(6, 2, 40, 24, DType::kBF16));
  MoeLayer layer = layers.make(*layers.first);
  const Tensor before = layers.run(layer);
  const ChangedSource changed(*layers.second);
  Refit refit(layer);
  EXPECT_EQ(code_of([&] { refit.stage(changed); }), ErrorCode::kFileChanged);
  EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kFileChanged);
  EXPECT_TRUE(same_bits(layers.run(layer), before));
}

TEST(Refit, ContentHash_HasEveryStepOfRows) {
  MoeSpec spec = testing::e4m3_spec(
      6, 2, 96, 64,
      {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic});
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 64};
  const Layers layers(spec);
  const uint64_t hash = Refit::content_hash(layers.make(*layers.first));
  for (const WeightId id :
       {weights::kUp, weights::kDown, weights::kSharedUp, weights::kSharedDown}) {
    const testing::FilledSource other(*layers.first, id.with(WeightPlane::kInputScale), 0, 9.0F);
    EXPECT_NE(Refit::content_hash(layers.make(other)), hash) << to_string(id);
  }
}

// The last expert that is packed has them, when others would have been overwritten.
TEST(Refit, ScalesThatMeanNothing_LeaveTheOldWeightsInPlaceToo) {
  MoeSpec spec = testing::e4m3_spec(6, 2, 96, 64, {.weights = WeightScale::kChannel});
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 64};
  const Layers layers(spec);
  MoeLayer layer = layers.make(*layers.first);
  const Tensor before = layers.run(layer);
  for (const WeightId id : {weights::kDown, weights::kSharedUp}) {
    const testing::FilledSource filled(*layers.second, id.with(WeightPlane::kScale),
                                       id.mlp() == WeightMlp::kRouted ? 5 : 0, -1.0F);
    for (const RefitMode mode : kModes) {
      Refit refit(layer, {.mode = mode});
      EXPECT_EQ(code_of([&] { refit.stage(filled); }), ErrorCode::kTensorValue);
      refit.rollback();
      EXPECT_TRUE(same_bits(layers.run(layer), before));
    }
  }
}

// Experts that are read in place change as a whole.
TEST(Refit, WeightsReadInPlace_AreRefittedTogether) {
  const Layers layers(testing::make_spec(6, 2, 40, 24, DType::kF32));
  const auto tensors = [&](uint64_t seed) {
    return std::pair(random_tensor(DType::kF32, 6 * 48, 40, seed),
                     random_tensor(DType::kF32, 6 * 40, 24, seed + 1));
  };
  const auto gate = random_tensor(DType::kF32, 6, 40, 9);
  const auto source = [&](const std::pair<Tensor, Tensor>& of) {
    ConstTensorView gate_up = of.first.view();
    gate_up.shape = {6, 48, 40};
    ConstTensorView down = of.second.view();
    down.shape = {6, 40, 24};
    return make_pointer_source({.gate_up = gate_up, .down = down, .router = gate.view()});
  };
  const auto old_tensors = tensors(1);
  const auto new_tensors = tensors(3);
  const auto old_source = source(old_tensors);
  const auto new_source = source(new_tensors);
  MoeLayer layer = layers.make(*old_source, {.weights = WeightUse::kInPlace});
  EXPECT_EQ(code_of([&] { Refit(layer, {.scope = {.experts = {1}}}); }), ErrorCode::kUnsupported);
  {
    Refit moved(layer, {.mode = RefitMode::kStagedCopy});
    EXPECT_EQ(code_of([&] { moved.stage(*new_source); }), ErrorCode::kState);
  }
  Refit refit(layer);
  refit.stage(*new_source);
  refit.commit();
  const MoeLayer fresh = layers.make(*new_source, {.weights = WeightUse::kInPlace});
  EXPECT_TRUE(same_bits(layers.run(layer), layers.run(fresh)));
  EXPECT_EQ(Refit::content_hash(layer), Refit::content_hash(fresh));
}

// Arrays of a part alone: two experts in their own order, and a router without any.
TEST(PartSource, HoldsNamedExpertsAlone) {
  const Layers layers(testing::make_spec(6, 2, 40, 24, DType::kBF16));
  const auto read = [&](WeightId id, int64_t expert, Tensor& to, int64_t first_row) {
    const WeightInfo info = layers.second->describe(id);
    std::byte* const at = to.as<std::byte>() + first_row * info.cols * 2;
    layers.second->read(id, expert, {0, info.rows, 0, info.cols},
                        {at, static_cast<size_t>(info.rows * info.cols * 2)});
  };
  Tensor gate_up(DType::kBF16, {2, 48, 40});
  Tensor down(DType::kBF16, {2, 40, 24});
  int64_t at = 0;
  for (const int64_t expert : {5, 2}) {
    read(weights::kGate, expert, gate_up, at * 48);
    read(weights::kUp, expert, gate_up, at * 48 + 24);
    read(weights::kDown, expert, down, at * 40);
    ++at;
  }
  Tensor router(layers.second->describe(weights::kRouter).dtype, {6, 40});
  layers.second->read(weights::kRouter, 0, {0, 6, 0, 40},
                      {router.as<std::byte>(), router.size_bytes()});

  const std::array<int32_t, 2> experts = {5, 2};
  const auto matrices =
      make_part_source({.gate_up = gate_up.view(), .down = down.view()}, 6, experts);
  const auto alone = make_part_source({.gate_up = {}, .down = {}, .router = router.view()}, 6);
  const RefitScope named{.experts = {2, 5}};
  const RefitScope of_layer{.tensors = {refit_tensor("router")}};
  MoeLayer layer = layers.make(*layers.first);
  for (const auto& [scope, source] :
       {std::pair(named, matrices.get()), std::pair(of_layer, alone.get())}) {
    Refit refit(layer, {.scope = scope});
    refit.stage(*source);
    refit.commit();
  }
  const MergedSource merged(layers.spec, *layers.first, *layers.second, named);
  const MergedSource expected(layers.spec, merged, *layers.second, of_layer);
  EXPECT_EQ(Refit::content_hash(layer), Refit::content_hash(layers.make(expected)));

  // What a scope names and the arrays lack is missing, whatever lacks it.
  Refit whole(layer);
  EXPECT_EQ(code_of([&] { whole.stage(*matrices); }), ErrorCode::kTensorMissing);
  EXPECT_EQ(code_of([&] { whole.stage(*matrices, {.experts = {1}}); }), ErrorCode::kTensorMissing);
  EXPECT_EQ(code_of([&] { whole.stage(*alone, named); }), ErrorCode::kTensorMissing);
  const auto made = [&](std::vector<int32_t> of, int64_t count) {
    return code_of(
        [&] { make_part_source({.gate_up = gate_up.view(), .down = down.view()}, count, of); });
  };
  EXPECT_EQ(made({5, 5}, 6), ErrorCode::kInvalidArgument);
  EXPECT_EQ(made({5, 6}, 6), ErrorCode::kInvalidArgument);
  EXPECT_EQ(made({5, -1}, 6), ErrorCode::kInvalidArgument);
  EXPECT_EQ(made({}, 0), ErrorCode::kInvalidArgument);
  EXPECT_EQ(made({}, 6), ErrorCode::kShape);
  EXPECT_EQ(made({1, 2, 3}, 6), ErrorCode::kShape);
  const Tensor bias = random_tensor(DType::kBF16, 2, 48, 1);
  EXPECT_EQ(code_of([&] {
              make_part_source({.gate_up = {}, .down = {}, .gate_up_bias = bias.view()}, 6,
                               experts);
            }),
            ErrorCode::kNullPointer);
}

// Steps of rows count over all experts, and may come of all beside weights of one.
TEST(PartSource, StepsOfAllExperts_StandBesideWeightsOfOne) {
  const Layers layers(testing::e4m3_spec(
      6, 2, 96, 64,
      {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic}));
  constexpr int32_t kExpert = 4;
  Tensor down(DType::kF8E4M3, {1, 96, 64});
  layers.second->read(weights::kDown, kExpert, {0, 96, 0, 64},
                      {down.as<std::byte>(), down.size_bytes()});
  Tensor scale(DType::kF32, {1, 1, 1});
  Tensor steps(DType::kF32, {6});
  const auto number = [&](WeightPlane plane, int64_t expert, float& to) {
    layers.second->read(weights::kDown.with(plane), expert, {0, 1, 0, 1},
                        std::as_writable_bytes(std::span(&to, 1)));
  };
  number(WeightPlane::kScale, kExpert, *scale.as<float>());
  for (int64_t expert = 0; expert < 6; ++expert) {
    number(WeightPlane::kInputScale, expert, steps.as<float>()[expert]);
  }
  const std::array<int32_t, 1> experts = {kExpert};
  const auto part = make_part_source({.gate_up = {},
                                      .down = down.view(),
                                      .down_scale = scale.view(),
                                      .down_input_scale = steps.view()},
                                     6, experts);
  const RefitScope scope{.experts = {kExpert}, .tensors = {weights::kDown}};
  MoeLayer layer = layers.make(*layers.first);
  MoeLayer expected = layers.make(*layers.first);
  for (const auto& [to, source] : {std::pair(&layer, part.get()), {&expected, &*layers.second}}) {
    Refit refit(*to, {.scope = scope});
    refit.stage(*source);
    refit.commit();
  }
  EXPECT_EQ(Refit::content_hash(layer), Refit::content_hash(expected));
}

TEST(PartSource, TensorsHaveTheNamesOfArrays) {
  for (const WeightId id : weights::kAll) EXPECT_EQ(refit_tensor(to_string(id)), id);
  EXPECT_EQ(refit_tensor("gate_up"), weights::kUp);
  EXPECT_EQ(refit_tensor("shared_gate_up_scale"), weights::kSharedUp.with(WeightPlane::kScale));
  EXPECT_EQ(code_of([&] { refit_tensor("gate_upper"); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { refit_tensor(""); }), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace conclave
