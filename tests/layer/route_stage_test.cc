// Tests what the route stage makes of a layer's router: gate, token ids, replay, chunks, loading.
#include "support/layer_fixture.h"

#include "conclave/routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
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

constexpr int64_t kTokens = 11;
constexpr int64_t kHidden = 48;
constexpr int64_t kVocab = 64;

MoeSpec small(DType dtype = DType::kF32) { return make_spec(10, 3, kHidden, 24, dtype); }

MoeSpec hash_spec() {
  MoeSpec spec = small();
  spec.router = {
      .name = "hash", .score = RouterScore::kSqrtSoftplus, .scale = 1.5, .vocab_size = kVocab};
  return spec;
}

MoeSpec sink_spec() {
  MoeSpec spec = small();
  spec.router = {
      .name = "sink_softmax", .has_selection_bias = true, .scale = 8, .has_global_scale = true};
  spec.shared = {.mode = SharedMode::kRouterWeight, .intermediate_size = 16, .count = 2};
  return spec;
}

Tensor token_ids_of(DType dtype, int64_t tokens = kTokens) {
  Tensor ids(dtype, {tokens});
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t id = token * 37 % kVocab;
    if (dtype == DType::kI64) ids.as<int64_t>()[token] = id;
    if (dtype == DType::kI32) ids.as<int32_t>()[token] = static_cast<int32_t>(id);
  }
  return ids;
}

// Compares one forward with float64: logits, ids, weights and output.
void expect_correct(const MoeSpec& spec, const LayerOptions& options = {}, ForwardArgs args = {}) {
  const OwnedLayer owned = make_layer(spec, options);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 5);
  const LayerOutput output = run_layer(owned.layer, hidden.view(), DType::kF32, args);
  LayerResult result = output.result(hidden.view());
  result.router_input = args.router_input;
  result.token_ids = args.token_ids;
  const StageCheck check = check_against_reference(*owned.context, spec, *owned.source, result);
  const bool rounds = spec.router.logits_dtype != DType::kF32;
  EXPECT_LE(check.worst_logit_error, rounds ? 0x1p-8 : 1e-6);
  EXPECT_EQ(check.routing_mismatches, 0);
  EXPECT_LE(check.worst_weight_error, 1e-6);
  EXPECT_LE(check.worst_token_error, accuracy_bar(spec.weight_dtype, DType::kF32));
}

TEST(RouteStage, GateWithBiasNormAndRounding_EqualsFloat64) {
  const Tensor other = random_tensor(DType::kBF16, kTokens, kHidden, 6);
  for (const bool bias : {false, true}) {
    for (const bool norm : {false, true}) {
      for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        for (const bool router_input : {false, true}) {
          MoeSpec spec = small();
          spec.router.has_logit_bias = bias;
          spec.router.input_norm = {.enabled = norm, .epsilon = 1e-5};
          spec.router.logits_dtype = dtype;
          ForwardArgs args;
          if (router_input) args.router_input = other.view();
          expect_correct(spec, {.max_tokens = 4}, args);
        }
      }
    }
  }
}

TEST(RouteStage, BiasIsAddedBeforeTheRounding) {
  MoeSpec spec = small();
  spec.router.has_logit_bias = true;
  spec.router.logits_dtype = DType::kBF16;
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 5);
  const LayerOutput output = run_layer(owned.layer, hidden.view(), DType::kF32);
  for (int64_t i = 0; i < kTokens * spec.num_experts; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, output.logits.as<float>() + i, sizeof(bits));
    EXPECT_EQ(bits & 0xffffU, 0U) << "logit " << i << " is no bf16 value";
  }
}

TEST(RouteStage, EveryVectorOfTheRouter_Applies) {
  MoeSpec spec = small();
  spec.num_zero_experts = 3;
  spec.router = {.score = RouterScore::kSigmoid,
                 .has_logit_bias = true,
                 .soft_cap = 3,
                 .has_selection_bias = true,
                 .epsilon = 1e-6,
                 .scale = 2.5,
                 .has_expert_scale = true,
                 .has_global_scale = true};
  expect_correct(spec, {.max_tokens = 4});
  expect_correct(sink_spec(), {.max_tokens = 4});
}

TEST(RouteStage, EveryRoutingMethod_RunsInALayer) {
  for (const char* name :
       {"Default", "Renormalize", "DeepSeekV3", "Llama4", "RenormalizeNaive", "TopK",
        "SigmoidRenorm", "MiniMax2", "Sigmoid", "DeepseekV4", "Simulated"}) {
    SCOPED_TRACE(name);
    MoeSpec spec = small();
    spec.router = routing_method(name);
    expect_correct(spec);
  }
}

TEST(RouteStage, TokenIds_OfBothTypesPickTheSameRows) {
  const Tensor narrow = token_ids_of(DType::kI32);
  const Tensor wide = token_ids_of(DType::kI64);
  expect_correct(hash_spec(), {.max_tokens = 4}, {.token_ids = wide.view()});
  const OwnedLayer owned = make_layer(hash_spec());
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 5);
  const LayerOutput a =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.token_ids = narrow.view()});
  const LayerOutput b =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.token_ids = wide.view()});
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.ids, b.ids));
}

TEST(RouteStage, TokenIdOutOfRange_IsNamedBeforeAnythingIsWritten) {
  const OwnedLayer owned = make_layer(hash_spec());
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 5);
  Tensor out(DType::kF32, {kTokens, kHidden});
  std::fill_n(out.as<float>(), kTokens * kHidden, -7.0F);
  for (const int64_t bad : {int64_t{-1}, kVocab, int64_t{1} << 32}) {
    Tensor ids = token_ids_of(DType::kI64);
    ids.as<int64_t>()[6] = bad;
    try {
      owned.layer.forward({.hidden = hidden.view(), .token_ids = ids.view(), .out = out.view()});
      ADD_FAILURE() << "accepted token id " << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(error.detail().tensor, "token_ids");
      EXPECT_EQ(error.detail().found, std::to_string(bad));
      EXPECT_NE(error.detail().what.find("token 6"), std::string::npos);
      EXPECT_EQ(error.detail().limit, "0 to 63");
    }
    EXPECT_EQ(out.as<float>()[0], -7.0F);
    // Rows that do not count may hold anything.
    const int64_t counted = 6;
    EXPECT_NO_THROW(owned.layer.forward({.hidden = hidden.view(),
                                         .token_ids = ids.view(),
                                         .num_tokens = &counted,
                                         .out = out.view()}));
    std::vector<uint8_t> mask(kTokens, 1);
    mask[6] = 0;
    EXPECT_NO_THROW(owned.layer.forward(
        {.hidden = hidden.view(),
         .token_ids = ids.view(),
         .padding_mask = {.data = mask.data(), .dtype = DType::kBool, .shape = {kTokens}},
         .out = out.view()}));
    std::fill_n(out.as<float>(), kTokens * kHidden, -7.0F);
  }
}

TEST(RouteStage, TokenIdsOfAnotherShapeOrType_AreRejected) {
  const OwnedLayer owned = make_layer(hash_spec());
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 5);
  Tensor out(DType::kF32, {kTokens, kHidden});
  const auto code = [&](const ConstTensorView& ids) {
    return code_of([&] {
      owned.layer.forward({.hidden = hidden.view(), .token_ids = ids, .out = out.view()});
    });
  };
  EXPECT_EQ(code({}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(token_ids_of(DType::kI32, kTokens + 1).view()), ErrorCode::kShape);
  EXPECT_EQ(code(random_tensor(DType::kF32, 1, kTokens, 1).view()), ErrorCode::kDType);
  const Tensor ids = token_ids_of(DType::kI32);
  const auto* shifted = ids.as<std::byte>() + 1;
  EXPECT_EQ(code({.data = shifted, .dtype = DType::kI32, .shape = {kTokens}}),
            ErrorCode::kMisaligned);
}

TEST(RouteStage, CapturedIds_ReplayToTheSameBits) {
  MoeSpec spec = small();
  spec.router.score = RouterScore::kSigmoid;
  spec.router.has_selection_bias = true;
  for (const MoeSpec& each : {spec, sink_spec(), small()}) {
    const OwnedLayer owned = make_layer(each, {.max_tokens = 4});
    const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 5);
    const LayerOutput first = run_layer(owned.layer, hidden.view(), DType::kF32);
    const LayerOutput by_gate =
        run_layer(owned.layer, hidden.view(), DType::kF32, {.topk_ids = first.ids.view()});
    EXPECT_TRUE(same_bits(by_gate.ids, first.ids));
    const StageCheck check =
        check_against_reference(*owned.context, each, *owned.source, first.result(hidden.view()));
    EXPECT_LE(check.worst_token_error, accuracy_bar(DType::kF32, DType::kF32));
    const LayerOutput by_logits =
        run_layer(owned.layer, hidden.view(), DType::kF32,
                  {.router_logits = first.logits.view(), .topk_ids = first.ids.view()});
    EXPECT_TRUE(same_bits(by_logits.out, by_gate.out));
    // The weights are the same up to the last place: the best is known to be among the chosen.
    EXPECT_LE(worst(token_errors(by_gate.out.view(),
                                 [&] {
                                   const float* row = first.out.as<float>();
                                   return std::vector<double>(row, row + kTokens * kHidden);
                                 }())),
              1e-6);
  }
}

TEST(RouteStage, GivenLogits_OfAnyTypeAndStrideRouteAlike) {
  MoeSpec spec = small();
  spec.router.score = RouterScore::kSigmoid;
  const OwnedLayer owned = make_layer(spec, {.max_tokens = 4});
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 5);
  Tensor logits = random_tensor(DType::kBF16, kTokens, 10, 8);
  Tensor wide(DType::kF32, {kTokens, 10});
  convert(logits.view(), wide.view());
  Tensor apart(DType::kF32, {kTokens, 13});
  const ConstTensorView strided{
      .data = apart.as<float>(), .dtype = DType::kF32, .shape = {kTokens, 10}, .row_stride = 13};
  convert(
      wide.view(),
      {.data = apart.as<float>(), .dtype = DType::kF32, .shape = {kTokens, 10}, .row_stride = 13});
  const auto forward = [&](const ConstTensorView& given) {
    return run_layer(owned.layer, hidden.view(), DType::kF32, {.router_logits = given});
  };
  const LayerOutput dense = forward(wide.view());
  EXPECT_TRUE(same_bits(dense.logits, wide));
  for (const ConstTensorView& given : {ConstTensorView(logits.view()), strided}) {
    const LayerOutput other = forward(given);
    EXPECT_TRUE(same_bits(other.logits, dense.logits));
    EXPECT_TRUE(same_bits(other.out, dense.out));
  }
}

TEST(RouteStage, ReplayedIds_FollowTheIdPolicy) {
  const Tensor hidden = random_tensor(DType::kF32, 1, kHidden, 5);
  Tensor ids(DType::kI32, {1, 3});
  const auto forward = [&](const OwnedLayer& owned) {
    return run_layer(owned.layer, hidden.view(), DType::kF32, {.topk_ids = ids.view()});
  };
  std::copy_n(std::vector<int32_t>{4, 10, 2}.data(), 3, ids.as<int32_t>());
  EXPECT_EQ(code_of([&] { forward(make_layer(small())); }), ErrorCode::kExpertId);
  const OwnedLayer lenient = make_layer(small(), {.id_policy = IdPolicy::kSkip});
  const LayerOutput skipped = forward(lenient);
  EXPECT_EQ(skipped.ids.as<int32_t>()[1], -1);
  EXPECT_EQ(skipped.weights.as<float>()[1], 0.0F);
  EXPECT_EQ(lenient.layer.status().skipped_ids, 1);
  ids.as<int32_t>()[1] = -1;
  EXPECT_TRUE(same_bits(forward(make_layer(small())).out, skipped.out));
}

TEST(RouteStage, WeightsForARouterThatWeighsSharedExperts_AreRefused) {
  const OwnedLayer owned = make_layer(sink_spec());
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 5);
  const LayerOutput first = run_layer(owned.layer, hidden.view(), DType::kF32);
  EXPECT_EQ(code_of([&] {
              run_layer(owned.layer, hidden.view(), DType::kF32,
                        {.topk_ids = first.ids.view(), .topk_weights = first.weights.view()});
            }),
            ErrorCode::kInvalidArgument);
}

TEST(RouteStage, SimulatedWithoutGate_NeedsNoLogitsAndNoChunkSize) {
  MoeSpec spec = small();
  spec.has_gate = false;
  spec.router = {.name = "simulated",
                 .simulated = {.distribution = SimulatedDistribution::kZipf, .seed = 3}};
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 5);
  const auto ids_of = [&](int64_t max_tokens) {
    const OwnedLayer owned = make_layer(spec, {.max_tokens = max_tokens});
    Tensor out(DType::kF32, {kTokens, kHidden});
    Tensor ids(DType::kI32, {kTokens, 3});
    owned.layer.forward({.hidden = hidden.view(), .out = out.view(), .captured_ids = ids.view()});
    EXPECT_EQ(code_of([&] {
                Tensor logits(DType::kF32, {kTokens, 10});
                owned.layer.forward(
                    {.hidden = hidden.view(), .out = out.view(), .captured_logits = logits.view()});
              }),
              ErrorCode::kInvalidArgument);
    return ids;
  };
  EXPECT_TRUE(same_bits(ids_of(64), ids_of(3)));
}

// A source with one role replaced.
class ReplacedSource final : public WeightSource {
 public:
  ReplacedSource(const WeightSource& base, WeightId role, const Tensor& matrix)
      : base_(base), role_(role), matrix_(matrix) {}
  WeightInfo describe(WeightId role) const override {
    if (role != role_) return base_.describe(role);
    return {1, matrix_.shape()[0], matrix_.shape()[1], matrix_.dtype()};
  }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (role != role_) return base_.read(role, expert, block, destination);
    const auto row = static_cast<size_t>(block.row_begin * matrix_.shape()[1] + block.col_begin);
    std::memcpy(destination.data(),
                matrix_.as<std::byte>() + row * static_cast<size_t>(byte_size(matrix_.dtype())),
                destination.size());
  }

 private:
  const WeightSource& base_;
  WeightId role_;
  const Tensor& matrix_;
};

TEST(RouterLoading, TableEntryOutsideTheExperts_IsNamedWithItsRow) {
  const MoeSpec spec = hash_spec();
  const Context context({.num_threads = 1});
  const auto base = make_synthetic_source(spec, 1);
  for (const DType dtype : {DType::kI32, DType::kI64}) {
    for (const int64_t bad : {int64_t{-1}, int64_t{10}, int64_t{4294967297}}) {
      if (dtype == DType::kI32 && bad > 10) continue;
      Tensor table(dtype, {kVocab, 3});
      for (int64_t i = 0; i < kVocab * 3; ++i) {
        const int64_t id = i == 7 * 3 + 2 ? bad : i % 10;
        if (dtype == DType::kI64) table.as<int64_t>()[i] = id;
        if (dtype == DType::kI32) table.as<int32_t>()[i] = static_cast<int32_t>(id);
      }
      try {
        MoeLayer::create(context, spec, ReplacedSource(*base, weights::kHashTable, table));
        ADD_FAILURE() << "accepted " << bad;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kExpertId);
        EXPECT_EQ(error.detail().found, std::to_string(bad));
        EXPECT_NE(error.detail().what.find("row 7, slot 2"), std::string::npos);
      }
    }
  }
}

TEST(RouterLoading, NanInTheSelectionBias_IsRefused) {
  MoeSpec spec = small();
  spec.router.has_selection_bias = true;
  const Context context({.num_threads = 1});
  const auto base = make_synthetic_source(spec, 1);
  Tensor bias(DType::kF32, {1, 10});
  bias.as<float>()[4] = std::numeric_limits<float>::quiet_NaN();
  try {
    MoeLayer::create(context, spec, ReplacedSource(*base, weights::kSelectionBias, bias));
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(error.detail().what.find("expert 4"), std::string::npos);
  }
}

TEST(RouterLoading, Reload_TakesTheNewVectors) {
  MoeSpec spec = small();
  spec.router.score = RouterScore::kSigmoid;
  spec.router.has_selection_bias = true;
  OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 5);
  Tensor bias(DType::kF32, {1, 10});
  std::fill_n(bias.as<float>(), 10, 0.0F);
  for (const int64_t e : {1, 5, 9}) bias.as<float>()[e] = 50.0F;
  for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
    owned.layer.reload(ReplacedSource(*owned.source, weights::kSelectionBias, bias), mode);
    const LayerOutput output = run_layer(owned.layer, hidden.view(), DType::kF32);
    for (int64_t i = 0; i < kTokens * 3; ++i) {
      EXPECT_EQ(bias.as<float>()[output.ids.as<int32_t>()[i]], 50.0F);
    }
    owned.layer.reload(*owned.source, mode);
  }
}

}  // namespace
}  // namespace conclave
