// Compares layers on a GPU, with every combination of parts drawn at random, with float64; routers
// that choose by rules of their own, with the host's; and tests replicas.

#include "device_layer.h"
#include "routing/random_spec.h"
#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::CudaLayerTest;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::LayerOutput;
using testing::make_spec;
using testing::random_tensor;

constexpr int64_t kTokens = 21;

class CudaRandomSpec : public CudaLayerTest, public ::testing::WithParamInterface<uint32_t> {
 protected:
  void SetUp() override {
    CudaLayerTest::SetUp();
    testing::SpecDraw draw(GetParam());
    spec_ = draw.draw();
    // Every second time, widths and formulas let them join the routed experts' launches.
    if (spec_.shared.mode != SharedMode::kNone && GetParam() % 2 == 0) {
      spec_.shared.intermediate_size = spec_.intermediate_size * draw.number(1, 2);
      spec_.shared.activation = {.name = ""};
      spec_.shared.has_bias = spec_.has_bias && draw.chance(2);
    }
    own_residual_ = spec_.residual.intermediate_size != 0 && draw.chance(2);
    hidden_ = random_tensor(spec_.weight_dtype, kTokens, spec_.hidden_size, GetParam());
    residual_ = random_tensor(DType::kF32, kTokens, spec_.hidden_size, GetParam() + 1000);
  }

  DeviceForward forward_of(DeviceLayer& owned, DType out_dtype) {
    DeviceForward forward(owned, hidden_.view(), out_dtype);
    forward.capture_routing();
    if (own_residual_) {
      device_residual_ = owned.queue.upload(residual_.view());
      forward.args.residual_input = device_residual_.const_view();
    }
    return forward;
  }
  LayerResult result_of(const LayerOutput& output) const {
    LayerResult result = output.result(hidden_.const_view());
    if (own_residual_) result.residual_input = residual_.const_view();
    return result;
  }

  MoeSpec spec_;
  bool own_residual_ = false;
  Tensor hidden_;
  Tensor residual_;
  DeviceTensor device_residual_;
};

TEST_P(CudaRandomSpec, Output_IsWithinTheBarOfFloat64) {
  SCOPED_TRACE(testing::parts_text(spec_));
  // The layer runs whole, and in chunks that the kernels for few tokens may serve.
  for (const int64_t max_tokens : {64, 5}) {
    DeviceLayer owned(spec_, {.max_tokens = max_tokens});
    DeviceForward forward = forward_of(owned, spec_.weight_dtype);
    forward.enqueue();
    const LayerOutput output = forward.output();
    const StageCheck check =
        check_against_reference(owned.host, spec_, *owned.source, result_of(output));
    EXPECT_EQ(check.routing_mismatches, 0);
    EXPECT_LE(check.worst_token_error, accuracy_bar(spec_.weight_dtype, spec_.weight_dtype))
        << max_tokens;
  }
}

TEST_P(CudaRandomSpec, PaddingAndSharedApart_TouchNoOtherToken) {
  SCOPED_TRACE(testing::parts_text(spec_));
  // All calls use one arithmetic: the single launch has its own, but does not serve all of them.
  DeviceLayer owned(spec_, {.max_tokens = 8, .determinism = Determinism::kBatchInvariant});
  const bool has_shared = spec_.shared.mode != SharedMode::kNone;
  Tensor mask(DType::kBool, {kTokens});
  for (int64_t i = 0; i < kTokens; ++i) mask.as<uint8_t>()[i] = i % 4 != 1;
  const DeviceTensor padding = owned.queue.upload(mask.const_view());
  DeviceTensor shared = owned.queue.allocate(DType::kF32, {kTokens, spec_.hidden_size});
  DeviceForward plain = forward_of(owned, DType::kF32);
  plain.enqueue();
  const LayerOutput whole = plain.output();
  DeviceForward forward = forward_of(owned, DType::kF32);
  forward.args.padding_mask = padding.const_view();
  if (has_shared) forward.args.shared_out = shared.view();
  forward.enqueue();
  const LayerOutput output = forward.output();
  Tensor apart(DType::kF32, {kTokens, spec_.hidden_size});
  if (has_shared) owned.queue.download(shared.const_view(), apart.view());
  for (int64_t token = 0; token < kTokens; ++token) {
    double error = 0;
    double norm = 0;
    for (int64_t col = 0; col < spec_.hidden_size; ++col) {
      const int64_t at = token * spec_.hidden_size + col;
      const double sum = double{output.out.as<float>()[at]} + double{apart.as<float>()[at]};
      const double expected = token % 4 == 1 ? 0.0 : double{whole.out.as<float>()[at]};
      error += (sum - expected) * (sum - expected);
      norm += expected * expected;
    }
    // The sums differ only in their order.
    EXPECT_LE(error, 1e-10 * norm) << token;
  }
}

INSTANTIATE_TEST_SUITE_P(Draws, CudaRandomSpec, ::testing::Range(500U, 560U));

class CudaRouters : public CudaLayerTest {
 protected:
  // Compares with the ids and weights of the same layer on the CPU, for the same logits.
  static void expect_host_routing(const MoeSpec& spec, const Tensor& token_ids = {}) {
    SCOPED_TRACE(spec.router.name);
    DeviceLayer owned(spec, {.max_tokens = 8});
    const MoeLayer host = MoeLayer::create(owned.host, spec, *owned.source, {.max_tokens = 8});
    const Tensor hidden = random_tensor(DType::kBF16, kTokens, spec.hidden_size, 3);
    const Tensor logits = random_tensor(DType::kF32, kTokens, num_logits(spec), 4);
    const bool reads_logits = spec.router.name != "simulated";
    ForwardArgs args;
    if (reads_logits) args.router_logits = logits.view();
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    forward.capture_routing();
    if (reads_logits) {
      forward.route_by_logits(logits);
    } else {
      forward.args.captured_logits = {};
    }
    DeviceTensor device_token_ids;
    if (token_ids.size_bytes() != 0) {
      args.token_ids = token_ids.const_view();
      device_token_ids = owned.queue.upload(token_ids.view());
      forward.args.token_ids = device_token_ids.const_view();
    }
    forward.enqueue();
    const LayerOutput actual = forward.output();
    LayerOutput expected{.out = Tensor(DType::kBF16, {kTokens, spec.hidden_size}),
                         .logits = {},
                         .ids = Tensor(DType::kI32, {kTokens, num_slots(spec)}),
                         .weights = Tensor(DType::kF32, {kTokens, num_slots(spec)})};
    args.hidden = hidden.view();
    args.out = expected.out.view();
    args.captured_ids = expected.ids.view();
    args.captured_weights = expected.weights.view();
    host.forward(args);
    EXPECT_TRUE(testing::same_bits(actual.ids, expected.ids));
    for (int64_t i = 0; i < kTokens * num_slots(spec); ++i) {
      EXPECT_NEAR(actual.weights.as<float>()[i], expected.weights.as<float>()[i],
                  2e-7 * std::abs(expected.weights.as<float>()[i]))
          << i;
    }
  }
};

TEST_F(CudaRouters, Simulated_DrawsWhatTheHostDraws) {
  MoeSpec spec = make_spec(12, 3, 64, 32, DType::kBF16);
  spec.router.name = "simulated";
  for (const auto distribution : {SimulatedDistribution::kUniform, SimulatedDistribution::kNormal,
                                  SimulatedDistribution::kZipf, SimulatedDistribution::kReplay}) {
    spec.router.simulated = {.distribution = distribution, .seed = 5};
    if (distribution == SimulatedDistribution::kReplay) {
      spec.router.simulated.replay_ids = {0, 1, 2, 11, -1, 5};
      spec.router.simulated.replay_weights = {0.5F, 0.25F, 0.25F, 1, 0, 2};
    }
    expect_host_routing(spec);
  }
}

// More choices than a warp has lanes, with slots in shared memory.
TEST_F(CudaRouters, ManyChoices_AreThoseOfTheHost) {
  for (const int64_t top_k : {31, 32, 33, 64}) {
    SCOPED_TRACE(top_k);
    MoeSpec spec = make_spec(64, top_k, 64, 32, DType::kBF16);
    expect_host_routing(spec);
    spec.router.score = RouterScore::kSigmoid;
    spec.router.renormalize = Renormalize::kNone;
    expect_host_routing(spec);
    for (const char* name : {"softmax_threshold", "top_any"}) {
      MoeSpec other = make_spec(64, top_k, 64, 32, DType::kBF16);
      other.router = testing::spec_of_row(name).router;
      expect_host_routing(other);
    }
  }
}

TEST_F(CudaRouters, SparseMixer_ChoosesAsTheHost) {
  MoeSpec spec = make_spec(40, 2, 64, 32, DType::kBF16);
  spec.router.name = "sparse_mixer";
  spec.router.jitter_epsilon = 0.1;
  expect_host_routing(spec);
}

TEST_F(CudaRouters, SinkSoftmax_ChoosesAndWeighsAsTheHost) {
  MoeSpec spec = make_spec(40, 4, 64, 32, DType::kBF16);
  spec.router.name = "sink_softmax";
  spec.router.score = RouterScore::kSigmoid;
  spec.router.has_selection_bias = true;
  spec.router.scale = 2.5;
  spec.shared = {.mode = SharedMode::kRouterWeight, .intermediate_size = 32, .count = 2};
  expect_host_routing(spec);
}

TEST_F(CudaRouters, Hash_LooksUpAsTheHost) {
  MoeSpec spec = make_spec(12, 3, 64, 32, DType::kBF16);
  spec.router.name = "hash";
  spec.router.vocab_size = 50;
  for (const DType dtype : {DType::kI32, DType::kI64}) {
    Tensor token_ids(dtype, {kTokens});
    for (int64_t i = 0; i < kTokens; ++i) {
      if (dtype == DType::kI32) {
        token_ids.as<int32_t>()[i] = static_cast<int32_t>(i * 7 % 50);
      } else {
        token_ids.as<int64_t>()[i] = i * 7 % 50;
      }
    }
    expect_host_routing(spec, token_ids);
  }
}

TEST_F(CudaRouters, TokenIdsOutOfTheTable_ChooseNothingAndCount) {
  MoeSpec spec = make_spec(12, 3, 64, 32, DType::kBF16);
  spec.router.name = "hash";
  spec.router.vocab_size = 50;
  DeviceLayer owned(spec, {.max_tokens = 8});
  const Tensor hidden = random_tensor(DType::kBF16, 3, 64, 3);
  Tensor token_ids(DType::kI64, {3});
  token_ids.as<int64_t>()[0] = 49;
  token_ids.as<int64_t>()[1] = 50;
  token_ids.as<int64_t>()[2] = int64_t{1} << 40;
  const DeviceTensor ids = owned.queue.upload(token_ids.view());
  DeviceForward forward(owned, hidden.view(), DType::kF32);
  forward.capture_routing();
  forward.args.token_ids = ids.const_view();
  forward.enqueue();
  const LayerOutput output = forward.output();
  EXPECT_GE(output.ids.as<int32_t>()[0], 0);
  for (int64_t i = 3; i < 9; ++i) EXPECT_EQ(output.ids.as<int32_t>()[i], -1);
  for (int64_t i = 64; i < 3 * 64; ++i) EXPECT_EQ(output.out.as<float>()[i], 0.0F);
  EXPECT_EQ(owned.layer.status().skipped_ids, 2);
}

TEST_F(CudaLayerTest, RedundantExperts_GiveTheSameSums) {
  MoeSpec spec = make_spec(6, 2, 64, 32, DType::kBF16);
  DeviceLayer plain(spec, {.max_tokens = 8});
  ParallelSpec parallel{.num_redundant_experts = 3, .reduce = Reduce::kPartial};
  DeviceLayer whole(spec, {.max_tokens = 8}, parallel);
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, 64, 3);
  Tensor zero_load(DType::kI64, {6});
  const auto run = [&](DeviceLayer& owned, Tensor& load) {
    DeviceTensor counters = owned.queue.upload(zero_load.const_view());
    DeviceForward forward(owned, hidden.view(), DType::kF32);
    forward.args.expert_load = {counters.as<int64_t>(), 6};
    forward.enqueue();
    Tensor out = forward.out();
    owned.queue.download(counters.const_view(), load.view());
    return out;
  };
  Tensor plain_load(DType::kI64, {6});
  Tensor load(DType::kI64, {6});
  const Tensor expected = run(plain, plain_load);
  EXPECT_TRUE(testing::same_bits(run(whole, load), expected));
  EXPECT_TRUE(testing::same_bits(load, plain_load));
  // On two ranks, each row is added by the rank that serves its replica.
  std::vector<double> sum(static_cast<size_t>(kTokens * 64), 0.0);
  for (int32_t rank = 0; rank < 2; ++rank) {
    parallel.ep_size = 2;
    parallel.ep_rank = rank;
    DeviceLayer part(spec, {.max_tokens = 8}, parallel);
    const Tensor out = run(part, load);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += double{out.as<float>()[i]};
  }
  EXPECT_LE(worst(token_errors(expected.view(), sum)), 1e-5);
}

TEST_F(CudaLayerTest, WeightsOnE4m3InputOfStaticScales_AreWithinTheBarTogether) {
  MoeSpec spec = make_spec(6, 1, 256, 128, DType::kF8E4M3);
  spec.weight_on = WeightOn::kInput;
  spec.router.renormalize = Renormalize::kNone;
  for (const auto& [is_static, top_k] :
       std::vector<std::pair<bool, int64_t>>{{true, 1}, {false, 1}, {true, 3}, {false, 3}}) {
    spec.top_k = top_k;
    spec.quant = {
        .weights = is_static ? WeightScale::kTensor : WeightScale::kBlock,
        .activations = is_static ? ActivationScale::kTensorStatic : ActivationScale::kGroup,
        .power_of_two_scales = !is_static};
    DeviceLayer owned(spec, {.max_tokens = 64});
    const Tensor hidden = random_tensor(DType::kBF16, 40, 256, 3);
    LayerOutput output = testing::run_device_layer(owned, hidden.view(), DType::kF32);
    LayerResult result = output.result(hidden.const_view());
    result.code_ambiguity = kTensorCoreCodeAmbiguity;
    const StageCheck check = check_against_reference(owned.host, spec, *owned.source, result);
    EXPECT_LE(check.worst_token_error, 6e-3) << is_static << ", k " << top_k;
  }
}

// Each kernel row and tile takes rows of slots as its own: some read them in token order, others
// sort them first.
TEST_F(CudaLayerTest, WeightsOnE4m3InputOfSeveralChoices_AreWithinTheBarOnEveryKernel) {
  MoeSpec spec = make_spec(6, 3, 256, 128, DType::kF8E4M3);
  spec.weight_on = WeightOn::kInput;
  spec.has_bias = true;
  spec.router.renormalize = Renormalize::kNone;
  spec.quant = {.weights = WeightScale::kBlock,
                .activations = ActivationScale::kGroup,
                .power_of_two_scales = true};
  int served = 0;
  for (const char* kernel : {"cuda.stream_fp8_sm90", "cuda.tile_fp8_sm90", "cuda.reference"}) {
    for (const Determinism determinism : {Determinism::kRepeatable, Determinism::kUnordered}) {
      DeviceLayer owned(spec, {.max_tokens = 200, .kernel = kernel, .determinism = determinism});
      for (const int64_t tokens : {1, 40, 200, 330}) {
        const Tensor hidden = random_tensor(DType::kBF16, tokens, 256, 3);
        LayerOutput output = testing::run_device_layer(owned, hidden.view(), DType::kF32);
        LayerResult result = output.result(hidden.const_view());
        result.code_ambiguity = kTensorCoreCodeAmbiguity;
        const StageCheck check = check_against_reference(owned.host, spec, *owned.source, result);
        EXPECT_LE(check.worst_token_error, 6e-3) << kernel << ", " << tokens << " tokens";
        ++served;
      }
    }
  }
  EXPECT_EQ(served, 24);
}

// Choices that name the same expert still read rows of their own.
TEST_F(CudaLayerTest, WeightOnInputOfGivenChoices_EachCountsForItself) {
  for (const testing::NumberForm& form : testing::number_forms()) {
    // Another test covers rows that are quantised.
    if (form.quant.activations != ActivationScale::kNone) continue;
    SCOPED_TRACE(form.name);
    MoeSpec spec = testing::with_form(make_spec(6, 3, 264, 136, form.dtype), form);
    spec.weight_on = WeightOn::kInput;
    const DType dtype = testing::row_dtype(form);
    DeviceLayer owned(spec, {.max_tokens = 64});
    for (const int64_t tokens : {1, 37, 150}) {
      Tensor ids(DType::kI32, {tokens, 3});
      Tensor weights(DType::kF32, {tokens, 3});
      for (int64_t i = 0; i < tokens * 3; ++i) {
        ids.as<int32_t>()[i] = static_cast<int32_t>(i / 3 % 2 == 0 ? 4 : i * i % 7 - 1);
        weights.as<float>()[i] = 0.125F + 0.3F * static_cast<float>(i % 11);
      }
      const Tensor hidden = random_tensor(dtype, tokens, 264, 1);
      testing::DeviceForward forward(owned, hidden.view(), dtype);
      forward.route_by(ids, weights);
      forward.enqueue();
      const Tensor out = forward.out();
      const StageCheck check =
          check_against_reference(owned.host, spec, *owned.source,
                                  {.hidden = hidden.view(),
                                   .topk_ids = ids.view(),
                                   .topk_weights = weights.view(),
                                   .output = out.view(),
                                   .code_ambiguity = testing::code_ambiguity(owned, tokens)});
      EXPECT_LE(check.worst_token_error, 6e-3) << tokens;
    }
  }
}

}  // namespace
}  // namespace conclave
