// Tests the meaning of single parts of a layer that a formula of the whole would not reveal.

#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::LayerOutput;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

constexpr int64_t kHidden = 48;
constexpr int64_t kTokens = 10;

MoeSpec spec_of(int64_t top_k = 2) { return make_spec(6, top_k, kHidden, 40, DType::kF32); }

TEST(WeightOnInput, EqualsWeightedRowsWithWeightOne) {
  MoeSpec spec = spec_of(1);
  spec.weight_on = WeightOn::kInput;
  spec.has_bias = true;
  const OwnedLayer owned = make_layer(spec);
  Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  Tensor ids(DType::kI32, {kTokens, 1});
  Tensor weights(DType::kF32, {kTokens, 1});
  Tensor ones(DType::kF32, {kTokens, 1});
  for (int i = 0; i < kTokens; ++i) {
    ids.as<int32_t>()[i] = i % 7 - 1;
    weights.as<float>()[i] = 0.25F + static_cast<float>(i);
    ones.as<float>()[i] = 1.0F;
  }
  const auto weighted = run_layer(owned.layer, hidden.view(), DType::kF32,
                                  {.topk_ids = ids.view(), .topk_weights = weights.view()});
  for (int64_t i = 0; i < kTokens * kHidden; ++i) {
    hidden.as<float>()[i] *= weights.as<float>()[i / kHidden];
  }
  const auto expected = run_layer(owned.layer, hidden.view(), DType::kF32,
                                  {.topk_ids = ids.view(), .topk_weights = ones.view()});
  EXPECT_TRUE(same_bits(weighted.out, expected.out));
  EXPECT_FALSE(same_bits(weighted.weights, expected.weights)) << "captured as given";
}

// [T, k] ids, of which some are skipped and some occur twice in a token, and weights that differ.
struct GivenChoices {
  Tensor ids;
  Tensor weights;
};
GivenChoices choices_of(int64_t top_k) {
  GivenChoices given{.ids = Tensor(DType::kI32, {kTokens, top_k}),
                     .weights = Tensor(DType::kF32, {kTokens, top_k})};
  for (int64_t i = 0; i < kTokens * top_k; ++i) {
    given.ids.as<int32_t>()[i] = static_cast<int32_t>(i * i % 7 - 1);
    given.weights.as<float>()[i] = 0.125F + 0.3F * static_cast<float>(i % 11);
  }
  return given;
}

// Each choice reads its own w x, so the result is the sum of one-choice layers in slot order.
TEST(WeightOnInput, SeveralChoices_AreTheSumOfOneChoiceEach) {
  constexpr int64_t kChoices = 3;
  for (const std::string& isa : testing::usable_isas()) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
      if (dtype == DType::kF8E4M3 && isa == "avx512_bf16") continue;
      MoeSpec spec = make_spec(6, kChoices, kHidden, 40, dtype);
      spec.weight_on = WeightOn::kInput;
      spec.has_bias = true;
      if (dtype == DType::kF8E4M3) {
        spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
      }
      MoeSpec one = spec;
      one.top_k = 1;
      const ContextOptions machine{.isa = isa};
      const OwnedLayer all = make_layer(spec, {.max_tokens = 4, .arithmetic = "f32_fma"}, machine);
      const OwnedLayer single = make_layer(one, {.arithmetic = "f32_fma"}, machine);
      const Tensor hidden = random_tensor(DType::kBF16, kTokens, kHidden, 1);
      const GivenChoices given = choices_of(kChoices);
      const auto sum = run_layer(
          all.layer, hidden.view(), DType::kF32,
          {.topk_ids = given.ids.const_view(), .topk_weights = given.weights.const_view()});
      std::vector<float> expected(static_cast<size_t>(kTokens * kHidden));
      for (int64_t slot = 0; slot < kChoices; ++slot) {
        const auto column = [&](const Tensor& tensor) {
          return ConstTensorView{.data = tensor.as<int32_t>() + slot,
                                 .dtype = tensor.dtype(),
                                 .shape = {kTokens, 1},
                                 .row_stride = kChoices};
        };
        const auto part =
            run_layer(single.layer, hidden.view(), DType::kF32,
                      {.topk_ids = column(given.ids), .topk_weights = column(given.weights)});
        for (size_t i = 0; i < expected.size(); ++i) expected[i] += part.out.as<float>()[i];
      }
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(sum.out.as<float>()[i], expected[i])
            << isa << " " << to_string(dtype) << " element " << i;
      }
    }
  }
}

TEST(WeightOnInput, SeveralChoicesOfTheGate_AreWithinTheBar) {
  MoeSpec spec = spec_of(3);
  spec.weight_on = WeightOn::kInput;
  spec.has_bias = true;
  spec.latent = {.size = 20, .has_norm = true};
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 24};
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, 33, kHidden, 1);
  const LayerOutput output = run_layer(owned.layer, hidden.view(), DType::kF32);
  const StageCheck check =
      check_against_reference(*owned.context, spec, *owned.source, output.result(hidden.view()));
  EXPECT_LE(check.worst_token_error, accuracy_bar(DType::kF32, DType::kF32));
}

TEST(SkippedTokens, GetAllThatIsNotARoutedExpert) {
  MoeSpec spec = spec_of();
  spec.has_output_bias = true;
  spec.has_bias = true;
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 24};
  spec.residual = {.intermediate_size = 20};
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  Tensor ids(DType::kI32, {kTokens, 2});
  std::fill_n(ids.as<int32_t>(), 2 * kTokens, -1);
  const Tensor weights = random_tensor(DType::kF32, kTokens, 2, 2);
  const auto output = run_layer(owned.layer, hidden.view(), DType::kF32,
                                {.topk_ids = ids.view(), .topk_weights = weights.view()});
  const ReferenceResult reference = reference_forward(
      *owned.context, spec, *owned.source,
      {.hidden = hidden.view(), .topk_ids = ids.view(), .topk_weights = weights.view()});
  EXPECT_LE(worst(token_errors(output.out.view(), reference.output)),
            accuracy_bar(DType::kF32, DType::kF32));
  EXPECT_NE(output.out.as<float>()[0], 0.0F);
}

MoeSpec fused_spec() {
  MoeSpec spec = spec_of();
  spec.shared = {
      .mode = SharedMode::kFusedSlots, .intermediate_size = 24, .count = 2, .slot_weight = 0.5};
  return spec;
}

TEST(FusedSlots, CapturedSlotsGivenBack_GiveTheSameBits) {
  const OwnedLayer owned = make_layer(fused_spec(), {.max_tokens = 4});
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  const auto own = run_layer(owned.layer, hidden.view(), DType::kF32);
  for (int64_t token = 0; token < kTokens; ++token) {
    EXPECT_EQ(own.ids.as<int32_t>()[token * 4 + 2], 6);
    EXPECT_EQ(own.ids.as<int32_t>()[token * 4 + 3], 7);
    EXPECT_EQ(own.weights.as<float>()[token * 4 + 3], 0.5F);
  }
  const auto again = run_layer(owned.layer, hidden.view(), DType::kF32,
                               {.topk_ids = own.ids.view(), .topk_weights = own.weights.view()});
  EXPECT_TRUE(same_bits(again.out, own.out));
  EXPECT_TRUE(same_bits(again.ids, own.ids));
}

TEST(FusedSlots, GivenWeightsAndSkippedSlots_Count) {
  const MoeSpec spec = fused_spec();
  const OwnedLayer owned = make_layer(spec, {.max_tokens = 4});
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  auto given = run_layer(owned.layer, hidden.view(), DType::kF32);
  for (int64_t token = 0; token < kTokens; ++token) {
    given.weights.as<float>()[token * 4 + 2] = static_cast<float>(token) - 3.5F;
    if (token % 2 == 0) given.ids.as<int32_t>()[token * 4 + 3] = -1;
  }
  const ForwardArgs args{.topk_ids = given.ids.view(), .topk_weights = given.weights.view()};
  const auto output = run_layer(owned.layer, hidden.view(), DType::kF32, args);
  const ReferenceResult reference = reference_forward(*owned.context, spec, *owned.source,
                                                      {.hidden = hidden.view(),
                                                       .topk_ids = given.ids.view(),
                                                       .topk_weights = given.weights.view()});
  EXPECT_LE(worst(token_errors(output.out.view(), reference.output)),
            accuracy_bar(DType::kF32, DType::kF32));
}

// The router weighs ids without weights, and an empty slot stays empty.
TEST(FusedSlots, ReplayedIds_KeepEmptySlotsEmpty) {
  const MoeSpec spec = fused_spec();
  const OwnedLayer owned = make_layer(spec, {.max_tokens = 4});
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  auto given = run_layer(owned.layer, hidden.view(), DType::kF32);
  for (int64_t token = 0; token < kTokens; token += 2) {
    given.ids.as<int32_t>()[token * 4 + 2] = -1;
    given.weights.as<float>()[token * 4 + 2] = 0;
  }
  const auto expected =
      run_layer(owned.layer, hidden.view(), DType::kF32,
                {.topk_ids = given.ids.view(), .topk_weights = given.weights.view()});
  const auto replayed =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.topk_ids = given.ids.view()});
  EXPECT_TRUE(same_bits(replayed.out, expected.out));
  EXPECT_TRUE(same_bits(replayed.ids, given.ids));
  const ReferenceResult reference = reference_forward(
      *owned.context, spec, *owned.source, {.hidden = hidden.view(), .topk_ids = given.ids.view()});
  EXPECT_LE(worst(token_errors(replayed.out.view(), reference.output)),
            accuracy_bar(DType::kF32, DType::kF32));
}

// Without an epsilon, the norm of a row of zeros is 0 / 0.
TEST(LatentNorm, PaddingWithoutEpsilon_IsZero) {
  MoeSpec spec = spec_of();
  spec.latent = {.size = 20, .has_norm = true, .norm_epsilon = 0};
  const OwnedLayer owned = make_layer(spec, {.max_tokens = 4});
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  Tensor mask(DType::kBool, {kTokens});
  for (int64_t token = 0; token < kTokens; ++token) mask.as<uint8_t>()[token] = token % 3 != 1;
  const auto whole = run_layer(owned.layer, hidden.view(), DType::kF32);
  const auto masked =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.padding_mask = mask.const_view()});
  for (int64_t i = 0; i < kTokens * kHidden; ++i) {
    const bool padding = i / kHidden % 3 == 1;
    EXPECT_EQ(masked.out.as<float>()[i], padding ? 0.0F : whole.out.as<float>()[i]) << i;
  }
}

TEST(FusedSlots, AnotherIdInTheSlot_IsAnErrorOrSkipped) {
  const Tensor hidden = random_tensor(DType::kF32, 1, kHidden, 1);
  Tensor ids(DType::kI32, {1, 4});
  const Tensor weights = random_tensor(DType::kF32, 1, 4, 2);
  const int32_t wrong[] = {0, 1, 7, 7};
  std::copy_n(wrong, 4, ids.as<int32_t>());
  const ForwardArgs args{.topk_ids = ids.view(), .topk_weights = weights.view()};
  const OwnedLayer strict = make_layer(fused_spec());
  try {
    run_layer(strict.layer, hidden.view(), DType::kF32, args);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kExpertId);
    EXPECT_NE(std::string(error.what()).find("slot 2"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("-1 or 6"), std::string::npos) << error.what();
  }
  const OwnedLayer skipping = make_layer(fused_spec(), {.id_policy = IdPolicy::kSkip});
  const auto output = run_layer(skipping.layer, hidden.view(), DType::kF32, args);
  EXPECT_EQ(skipping.layer.status().skipped_ids, 1);
  EXPECT_EQ(output.ids.as<int32_t>()[2], -1);
}

// Nothing else reads the tokens then: experts have rows of their own.
TEST(ResidualMlp, BesideALatentAlone_ReadsTheTokens) {
  MoeSpec spec = spec_of();
  spec.latent = {.size = 24};
  spec.residual = {.intermediate_size = 20};
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  const auto output = run_layer(owned.layer, hidden.view(), DType::kF32);
  const StageCheck check =
      check_against_reference(*owned.context, spec, *owned.source, output.result(hidden.view()));
  EXPECT_LE(check.worst_token_error, accuracy_bar(DType::kF32, DType::kF32));
}

TEST(ResidualInput, WithoutAResidualMlp_IsRefused) {
  const OwnedLayer owned = make_layer(spec_of());
  const Tensor hidden = random_tensor(DType::kF32, 2, kHidden, 1);
  const ForwardArgs args{.residual_input = hidden.view()};
  EXPECT_EQ(code_of([&] { run_layer(owned.layer, hidden.view(), DType::kF32, args); }),
            ErrorCode::kInvalidArgument);
}

TEST(ResidualInput, OfAnotherShapeOrUnderTheOutput_IsRefused) {
  MoeSpec spec = spec_of();
  spec.residual = {.intermediate_size = 20};
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, 4, kHidden, 1);
  const Tensor few = random_tensor(DType::kF32, 3, kHidden, 1);
  EXPECT_EQ(code_of([&] {
              run_layer(owned.layer, hidden.view(), DType::kF32, {.residual_input = few.view()});
            }),
            ErrorCode::kShape);
  Tensor rows(DType::kF32, {5, kHidden});
  ConstTensorView first = rows.const_view();
  first.shape = {4, kHidden};
  TensorView shifted = rows.view();
  shifted.shape = {4, kHidden};
  shifted.data = rows.as<float>() + kHidden;
  EXPECT_EQ(
      code_of([&] {
        owned.layer.forward({.hidden = hidden.view(), .residual_input = first, .out = shifted});
      }),
      ErrorCode::kOverlap);
}

TEST(Explain, Bytes_AreInTheLargestWholeUnit) {
  Plan plan;
  plan.packed_bytes = 1023;
  plan.workspace_bytes = 1024;
  EXPECT_NE(explain(plan).find("1023 B"), std::string::npos) << explain(plan);
  EXPECT_NE(explain(plan).find("1.00 KiB"), std::string::npos) << explain(plan);
}

TEST(Explain, Stages_AreInTheOrderOfAForward) {
  MoeSpec spec = spec_of();
  spec.latent = {.size = 24, .has_norm = true};
  spec.has_output_bias = true;
  spec.shared = {.mode = SharedMode::kAverage, .intermediate_size = 24};
  const Context context({.num_threads = 1});
  const Plan plan = make_plan(context, spec);
  const std::vector<std::string> expected = {"route",
                                             "latent down 24",
                                             "dispatch",
                                             "experts silu",
                                             "1 shared of 24 silu, averaged",
                                             "combine",
                                             "rms norm",
                                             "latent up 48",
                                             "finish, output bias"};
  EXPECT_EQ(plan.stages, expected);
  EXPECT_NE(explain(plan).find("rms norm > latent up 48"), std::string::npos);
}

}  // namespace
}  // namespace conclave
