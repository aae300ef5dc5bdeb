// Reloads layers of every form, staged and in place, with all weights and with one role at a time:
// afterwards the layer equals one made from the new weights, bit by bit.
#include "support/layer_parts.h"
#include "support/role_sources.h"

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::MixedSource;
using testing::run_layer;
using testing::same_bits;

constexpr int64_t kTokens = 5;
constexpr int64_t kHidden = 72;
constexpr int64_t kInner = 40;

struct Form {
  std::string name;
  MoeSpec spec;
};
void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

MoeSpec plain(DType dtype) { return testing::make_spec(4, 2, kHidden, kInner, dtype); }

MoeSpec e4m3(WeightScale weights, ActivationScale activations) {
  MoeSpec spec = plain(DType::kF8E4M3);
  spec.quant.weights = weights;
  spec.quant.activations = activations;
  if (weights == WeightScale::kBlock) {
    spec.quant.block_rows = 24;
    spec.quant.block_cols = 32;
  }
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = kInner};
  return spec;
}

// Every vector that a router can have, with zero experts beside it.
MoeSpec router_vectors() {
  MoeSpec spec = plain(DType::kF32);
  spec.num_zero_experts = 2;
  spec.router = {.score = RouterScore::kSigmoid,
                 .has_logit_bias = true,
                 .has_selection_bias = true,
                 .scale = 2.5,
                 .has_expert_scale = true,
                 .has_global_scale = true,
                 .input_norm = {.enabled = true}};
  return spec;
}

MoeSpec biases(DType dtype) {
  MoeSpec spec = plain(dtype);
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.activation = {.name = "swiglu_oai", .limit = 7, .alpha = 1.702, .beta = 1};
  spec.shared = {.mode = SharedMode::kSoftmaxMix, .intermediate_size = 24, .has_bias = true};
  return spec;
}

MoeSpec latent(DType dtype) {
  MoeSpec spec = plain(dtype);
  spec.latent = {.size = 48, .has_norm = true};
  spec.residual = {.intermediate_size = 20};
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 24};
  return spec;
}

MoeSpec weighed_shared() {
  MoeSpec spec = plain(DType::kBF16);
  spec.router = {.name = "sink_softmax",
                 .score = RouterScore::kSigmoid,
                 .has_selection_bias = true,
                 .has_global_scale = true};
  spec.shared = {.mode = SharedMode::kRouterWeight, .intermediate_size = 24, .count = 2};
  return spec;
}

std::vector<Form> all_forms() {
  std::vector<Form> forms = {{"router_vectors", router_vectors()},
                             {"weighed_shared", weighed_shared()}};
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const std::string type(to_string(dtype));
    forms.push_back({"biases_" + type, biases(dtype)});
    forms.push_back({"latent_" + type, latent(dtype)});
  }
  MoeSpec fused = plain(DType::kF16);
  fused.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 24, .count = 2};
  fused.activation.name = "relu2_no_mul";
  forms.push_back({"fused_slots_ungated", fused});
  MoeSpec on_input = plain(DType::kBF16);
  on_input.top_k = 1;
  on_input.weight_on = WeightOn::kInput;
  on_input.router.renormalize = Renormalize::kNone;
  forms.push_back({"weight_on_input", on_input});
  MoeSpec hash = plain(DType::kF32);
  hash.router = {.name = "hash", .score = RouterScore::kSqrtSoftplus, .vocab_size = 11};
  forms.push_back({"hash", hash});

  constexpr auto kTensor = WeightScale::kTensor;
  constexpr auto kChannel = WeightScale::kChannel;
  constexpr auto kBlock = WeightScale::kBlock;
  constexpr auto kPlain = ActivationScale::kNone;
  constexpr auto kTensorStatic = ActivationScale::kTensorStatic;
  constexpr auto kToken = ActivationScale::kToken;
  const struct {
    const char* name;
    WeightScale weights;
    ActivationScale activations;
  } quantised[] = {{"tensor", kTensor, kPlain},
                   {"tensor_static", kTensor, kTensorStatic},
                   {"tensor_token", kTensor, kToken},
                   {"channel", kChannel, kPlain},
                   {"channel_static", kChannel, kTensorStatic},
                   {"channel_token", kChannel, kToken},
                   {"block", kBlock, kPlain},
                   {"block_token", kBlock, kToken},
                   {"block_group", kBlock, ActivationScale::kGroup}};
  for (const auto& q : quantised) {
    forms.push_back({std::string("e4m3_") + q.name, e4m3(q.weights, q.activations)});
  }
  for (const DType dtype : {DType::kI8, DType::kI4, DType::kF4}) {
    MoeSpec whole = e4m3(kChannel, kPlain);
    whole.weight_dtype = dtype;
    forms.push_back({"int8_rows_" + std::string(to_string(dtype)), with_int8_rows(whole)});
  }
  MoeSpec biased = e4m3(kTensor, kTensorStatic);
  biased.has_bias = true;
  biased.shared.weight_dtype = DType::kBF16;
  forms.push_back({"e4m3_biased_beside_plain_shared", biased});
  return forms;
}

class ReloadForm : public ::testing::TestWithParam<Form> {
 protected:
  const MoeSpec& spec() const { return GetParam().spec; }

  ReloadForm() {
    for (int32_t t = 0; t < kTokens; ++t) token_ids_.as<int32_t>()[t] = (t * 7) % 11;
  }
  Tensor run(const MoeLayer& layer) const {
    ForwardArgs args;
    if (spec().router.name == "hash") args.token_ids = token_ids_.const_view();
    return run_layer(layer, hidden_.view(), DType::kF32, args).out;
  }
  Tensor fresh(const WeightSource& source) const {
    return run(MoeLayer::create(context_, spec(), source, {.max_tokens = 8}));
  }
  // Reloads the layer of `first` with `second`.
  void expect_reloads(const WeightSource& first, const WeightSource& second) const {
    const Tensor expected = fresh(second);
    for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
      SCOPED_TRACE(mode == ReloadMode::kStaged ? "staged" : "in place");
      MoeLayer layer = MoeLayer::create(context_, spec(), first, {.max_tokens = 8});
      layer.reload(second, mode);
      EXPECT_TRUE(same_bits(run(layer), expected));
    }
  }

  Context context_{{.num_threads = 1}};
  std::unique_ptr<WeightSource> first_ = make_synthetic_source(spec(), 3);
  std::unique_ptr<WeightSource> second_ = make_synthetic_source(spec(), 4);
  Tensor hidden_ = testing::random_tensor(DType::kF32, kTokens, kHidden, 5);
  Tensor token_ids_{DType::kI32, {kTokens}};
};

TEST_P(ReloadForm, AllWeights_GiveTheBitsOfAFreshLayer) {
  ASSERT_FALSE(same_bits(fresh(*first_), fresh(*second_)));
  expect_reloads(*first_, *second_);
}

// A role that keeps its old value would hide behind the others.
TEST_P(ReloadForm, OneRole_GivesTheBitsOfAFreshLayer) {
  for (const WeightId role : testing::roles_of(*first_)) {
    SCOPED_TRACE(to_string(role));
    expect_reloads(*first_, MixedSource(*first_, *second_, role));
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, ReloadForm, ::testing::ValuesIn(all_forms()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace conclave
