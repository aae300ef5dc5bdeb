// Compares layers on a GPU with float64: every part, every rung of the ladder, odd sizes.

#include "device_layer.h"
#include "support/layer_parts.h"

#include "conclave/format.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>

namespace conclave {
namespace {

using testing::CudaLayerTest;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::GivenRouting;
using testing::make_spec;
using testing::random_routing;
using testing::random_tensor;

// Uses the layer's own gate and compares each stage with float64.
void expect_accurate(DeviceLayer& owned, int64_t tokens, DType dtype) {
  SCOPED_TRACE(::testing::Message() << "T" << tokens);
  const MoeSpec& spec = owned.layer.spec();
  const Tensor hidden = random_tensor(dtype, tokens, spec.hidden_size, 3);
  const testing::LayerOutput output = testing::run_device_layer(owned, hidden.view(), dtype);
  LayerResult result = output.result(hidden.const_view());
  result.code_ambiguity = testing::code_ambiguity(owned, tokens);
  const StageCheck check = check_against_reference(owned.host, spec, *owned.source, result);
  EXPECT_LE(check.worst_logit_error, static_cast<double>(spec.hidden_size) * 0x1p-24);
  EXPECT_EQ(check.routing_mismatches, 0);
  EXPECT_LE(check.worst_weight_error, 4 * 0x1p-23);
  EXPECT_LE(check.worst_token_error, accuracy_bar(spec.weight_dtype, dtype));
  testing::note_error(spec, check.worst_token_error);
}

constexpr int64_t kTokenCounts[] = {0, 1, 2, 8, 9, 33, 257};

struct Case {
  int64_t experts, top_k, hidden, intermediate;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << "E" << c.experts << " k" << c.top_k << " H" << c.hidden << " I" << c.intermediate;
}

class CudaShapes : public ::testing::WithParamInterface<Case>, public CudaLayerTest {};

TEST_P(CudaShapes, EveryTokenCount_IsWithinTheBar) {
  const auto& [experts, top_k, hidden, intermediate] = GetParam();
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(std::string(to_string(dtype)));
    DeviceLayer owned(make_spec(experts, top_k, hidden, intermediate, dtype), {.max_tokens = 300});
    for (const int64_t tokens : kTokenCounts) expect_accurate(owned, tokens, dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(Odd, CudaShapes,
                         ::testing::Values(Case{8, 2, 256, 192}, Case{6, 3, 136, 72},
                                           Case{10, 5, 200, 100}, Case{60, 4, 88, 24},
                                           Case{1, 1, 65, 63}, Case{128, 8, 512, 96}));

class CudaForward : public CudaLayerTest {};

TEST_F(CudaForward, E4m3WeightsOfPlainRows_AreWithinTheBar) {
  for (const WeightScale scale :
       {WeightScale::kTensor, WeightScale::kChannel, WeightScale::kBlock}) {
    MoeSpec spec = make_spec(6, 2, 256, 128, DType::kF8E4M3);
    spec.quant = {.weights = scale};
    DeviceLayer owned(spec, {.max_tokens = 64});
    for (const int64_t tokens : {1, 40}) expect_accurate(owned, tokens, DType::kBF16);
  }
}

TEST_F(CudaForward, E4m3WeightsAndRows_AreWithinTheBar) {
  for (const testing::NumberForm& form : testing::number_forms()) {
    if (form.quant.activations == ActivationScale::kNone) continue;
    SCOPED_TRACE(form.name);
    for (const int64_t shared : {0, 128}) {
      MoeSpec spec = testing::with_form(make_spec(6, 2, 264, 136, DType::kF8E4M3), form);
      if (shared != 0) spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = shared};
      DeviceLayer owned(spec, {.max_tokens = 300});
      for (const int64_t tokens : {1, 8, 40, 257}) expect_accurate(owned, tokens, DType::kBF16);
    }
  }
}

// Every format of codes in every form that tools offer, a new one too; the plain kernel takes what
// no other does.
TEST_F(CudaForward, EveryFormOfCodes_IsWithinTheBar) {
  for (const WeightForm& form : weight_forms()) {
    if (form.quant.weights == WeightScale::kNone) continue;
    if (!gpu_rows_support(form.dtype, form.quant)) continue;
    SCOPED_TRACE(form.name);
    const auto with = [&](MoeSpec spec) {
      spec.weight_dtype = form.dtype;
      spec.quant = form.quant;
      return spec;
    };
    MoeSpec parts = with(make_spec(6, 2, 264, 136, form.dtype));
    parts.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 128};
    parts.has_bias = true;
    MoeSpec on_input = with(make_spec(6, 3, 136, 72, form.dtype));
    on_input.weight_on = WeightOn::kInput;
    for (const MoeSpec& spec : {with(make_spec(6, 2, 256, 128, form.dtype)),
                                with(make_spec(5, 2, 127, 65, form.dtype)), parts, on_input}) {
      DeviceLayer owned(spec, {.max_tokens = 64});
      for (const int64_t tokens : {0, 1, 8, 40}) expect_accurate(owned, tokens, DType::kBF16);
    }
  }
}

TEST_F(CudaForward, EveryActivationWithBiases_IsWithinTheBar) {
  for (const ActivationSpec& activation : testing::all_activations()) {
    SCOPED_TRACE(activation.name);
    MoeSpec spec = make_spec(8, 2, 128, 96, DType::kBF16);
    spec.activation = activation;
    spec.has_bias = true;
    DeviceLayer owned(spec, {.max_tokens = 64});
    for (const int64_t tokens : {1, 5, 40}) expect_accurate(owned, tokens, DType::kBF16);
  }
}

TEST_F(CudaForward, HiddenOfAnotherType_IsConverted) {
  DeviceLayer owned(make_spec(8, 2, 100, 64, DType::kBF16), {.max_tokens = 64});
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    for (const int64_t tokens : {3, 40}) expect_accurate(owned, tokens, dtype);
  }
}

TEST_F(CudaForward, SharedExperts_AreAdded) {
  for (const SharedMode mode : {SharedMode::kAdd, SharedMode::kSigmoidGate, SharedMode::kAverage}) {
    MoeSpec spec = make_spec(10, 3, 136, 72, DType::kBF16);
    spec.shared = {.mode = mode, .intermediate_size = 104};
    DeviceLayer owned(spec, {.max_tokens = 64});
    for (const int64_t tokens : {1, 8, 37}) expect_accurate(owned, tokens, DType::kBF16);
  }
}

TEST_F(CudaForward, ZeroExpertsBiasAndScale_AreInTheSum) {
  MoeSpec spec = make_spec(6, 3, 120, 64, DType::kBF16);
  spec.num_zero_experts = 3;
  spec.has_output_bias = true;
  spec.output_scale = 2.5;
  DeviceLayer owned(spec, {.max_tokens = 64});
  for (const int64_t tokens : {1, 37}) expect_accurate(owned, tokens, DType::kBF16);
}

TEST_F(CudaForward, WeightOnInput_ScalesTheRows) {
  for (const int64_t top_k : {1, 3}) {
    MoeSpec spec = make_spec(6, top_k, 128, 64, DType::kBF16);
    spec.weight_on = WeightOn::kInput;
    spec.has_bias = true;
    spec.router.renormalize = Renormalize::kNone;
    DeviceLayer owned(spec, {.max_tokens = 64});
    for (const int64_t tokens : {1, 37, 150}) expect_accurate(owned, tokens, DType::kBF16);
  }
}

TEST_F(CudaForward, GateWithNormBiasAndCap_IsWithinTheBar) {
  MoeSpec spec = make_spec(10, 3, 136, 64, DType::kBF16);
  spec.router.input_norm.enabled = true;
  spec.router.has_logit_bias = true;
  spec.router.soft_cap = 5;
  spec.router.has_expert_scale = true;
  DeviceLayer owned(spec, {.max_tokens = 16});
  for (const int64_t tokens : {1, 37}) expect_accurate(owned, tokens, DType::kBF16);
}

TEST_F(CudaForward, GroupsAndSelectionBias_ChooseAsFloat64) {
  MoeSpec spec = make_spec(16, 4, 136, 64, DType::kBF16);
  spec.router.score = RouterScore::kSigmoid;
  spec.router.has_selection_bias = true;
  spec.router.num_groups = 4;
  spec.router.topk_groups = 2;
  spec.router.scale = 2.5;
  DeviceLayer owned(spec, {.max_tokens = 64});
  for (const int64_t tokens : {1, 37}) expect_accurate(owned, tokens, DType::kBF16);
}

TEST_F(CudaForward, EveryKernelByName_IsWithinTheBar) {
  DeviceLayer any(make_spec(8, 2, 256, 128, DType::kBF16), {.max_tokens = 64});
  for (const PlanRow& row : any.layer.plan().rows) {
    if (row.table != "kernel" || row.name == "cuda.decode_sm90") continue;
    SCOPED_TRACE(row.name);
    try {
      DeviceLayer owned(make_spec(8, 2, 256, 128, DType::kBF16),
                        {.max_tokens = 64, .kernel = row.name});
      for (const int64_t tokens : {1, 37}) expect_accurate(owned, tokens, DType::kBF16);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    }
  }
}

TEST_F(CudaForward, MoreTokensThanPlanned_GoInChunks) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 16});
  for (const int64_t tokens : {17, 32, 100}) expect_accurate(owned, tokens, DType::kBF16);
}

TEST_F(CudaForward, GivenIdsOfBothTypes_AreUsed) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  for (const int64_t tokens : {1, 40}) {
    const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 5);
    const GivenRouting routing = random_routing(tokens, 8, 2, 9);
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    forward.route_by(routing.ids, routing.weights);
    forward.enqueue();
    EXPECT_LE(testing::worst_error(owned, hidden, routing, forward.out()), 6e-3);
    Tensor wide(DType::kI64, {tokens, 2});
    for (int64_t i = 0; i < tokens * 2; ++i) wide.as<int64_t>()[i] = routing.ids.as<int32_t>()[i];
    DeviceForward again(owned, hidden.view(), DType::kBF16);
    again.route_by(wide, routing.weights);
    again.enqueue();
    EXPECT_TRUE(testing::same_bits(forward.out(), again.out()));
  }
}

TEST_F(CudaForward, IdsOutOfRange_ContributeNothingAndAreCounted) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  for (const int64_t tokens : {4, 40}) {
    const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 5);
    GivenRouting routing = random_routing(tokens, 8, 2, 9);
    auto* const ids = routing.ids.as<int32_t>();
    ids[0] = -1;
    ids[3] = 8;
    ids[5] = std::numeric_limits<int32_t>::max();
    ids[6] = std::numeric_limits<int32_t>::min();
    const int64_t before = owned.layer.status().skipped_ids;
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    forward.route_by(routing.ids, routing.weights);
    forward.enqueue();
    EXPECT_LE(testing::worst_error(owned, hidden, routing, forward.out()), 6e-3);
    EXPECT_EQ(owned.layer.status().skipped_ids - before, 3);
  }
}

// 64-bit ids whose lower half names an expert do not name one themselves.
TEST_F(CudaForward, WideIdsBeyond32Bits_ContributeNothing) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  for (const int64_t tokens : {4, 40}) {
    const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 5);
    GivenRouting routing = random_routing(tokens, 8, 2, 9);
    Tensor wide(DType::kI64, {tokens, 2});
    for (int64_t i = 0; i < tokens * 2; ++i) wide.as<int64_t>()[i] = routing.ids.as<int32_t>()[i];
    constexpr int64_t kBeyond = int64_t{1} << 32;
    for (const auto& [slot, id] : {std::pair<int64_t, int64_t>{1, kBeyond + 3},
                                   {4, -kBeyond},
                                   {7, std::numeric_limits<int64_t>::min()}}) {
      wide.as<int64_t>()[slot] = id;
      routing.ids.as<int32_t>()[slot] = -1;
    }
    const int64_t before = owned.layer.status().skipped_ids;
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    forward.route_by(wide, routing.weights);
    forward.enqueue();
    EXPECT_LE(testing::worst_error(owned, hidden, routing, forward.out()), 6e-3);
    EXPECT_EQ(owned.layer.status().skipped_ids - before, 3);
  }
}

TEST_F(CudaForward, LiveTokensAndPadding_LeaveTheRestAlone) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 16});
  const int64_t tokens = 40;
  const int64_t live = 21;
  const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 5);
  DeviceForward whole(owned, hidden.view(), DType::kBF16);
  whole.enqueue();
  const Tensor expected = whole.out();

  Tensor count(DType::kI64, {1});
  count.as<int64_t>()[0] = live;
  const DeviceTensor live_tokens = owned.queue.upload(count.const_view());
  Tensor mask(DType::kBool, {tokens});
  for (int64_t token = 0; token < tokens; ++token) mask.as<uint8_t>()[token] = token != 3;
  const DeviceTensor padding = owned.queue.upload(mask.const_view());
  DeviceForward forward(owned, hidden.view(), DType::kBF16);
  forward.args.num_tokens = static_cast<const int64_t*>(live_tokens.const_view().data);
  forward.args.padding_mask = padding.const_view();
  forward.enqueue();
  const Tensor out = forward.out();
  const std::vector<std::byte> poison(256, std::byte{0xFF});
  const std::vector<std::byte> zeros(256, std::byte{0});
  for (int64_t token = 0; token < tokens; ++token) {
    const std::vector<std::byte> row = testing::row_bytes(out, token);
    if (token == 3) {
      EXPECT_EQ(row, zeros);
    } else if (token < live) {
      EXPECT_EQ(row, testing::row_bytes(expected, token)) << token;
    } else {
      EXPECT_EQ(row, poison) << token;
    }
  }
}

// The down product of e4m3 tiles writes the output itself for tokens with one choice; a padding
// mask sends the same rows through the sum over slots.
void check_one_choice_of_e4m3(const std::string& kernel) {
  SCOPED_TRACE(kernel);
  constexpr int64_t kTokens = 300;
  constexpr int64_t kLive = 283;
  MoeSpec spec = make_spec(5, 1, 264, 136, DType::kF8E4M3);
  spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  spec.output_scale = 1.7;
  DeviceLayer owned(spec, {.max_tokens = kTokens, .kernel = kernel});
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, 264, 5);
  GivenRouting routing = random_routing(kTokens, 5, 1, 9);
  for (int64_t token = 0; token < kTokens; ++token) {
    if (token % 11 == 4) routing.ids.as<int32_t>()[token] = -1;
    routing.weights.as<float>()[token] = 0.25F + static_cast<float>(token % 7) / 9.0F;
  }
  const auto run = [&](bool masked, bool all_live) {
    Tensor mask(DType::kBool, {kTokens});
    std::fill_n(mask.as<uint8_t>(), kTokens, uint8_t{1});
    const DeviceTensor padding = owned.queue.upload(mask.const_view());
    Tensor count(DType::kI64, {1});
    count.as<int64_t>()[0] = kLive;
    const DeviceTensor live = owned.queue.upload(count.const_view());
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    forward.route_by(routing.ids, routing.weights);
    if (masked) forward.args.padding_mask = padding.const_view();
    if (!all_live) forward.args.num_tokens = static_cast<const int64_t*>(live.const_view().data);
    forward.enqueue();
    return forward.out();
  };
  const Tensor whole = run(false, true);
  EXPECT_LE(testing::worst_error(owned, hidden, routing, whole), 6e-3);
  EXPECT_TRUE(testing::same_bits(whole, run(true, true)));
  const Tensor part = run(false, false);
  EXPECT_TRUE(testing::same_bits(part, run(true, false)));
  const std::vector<std::byte> poison(264 * 2, std::byte{0xFF});
  const std::vector<std::byte> zeros(264 * 2, std::byte{0});
  EXPECT_EQ(testing::row_bytes(whole, 4), zeros);
  EXPECT_EQ(testing::row_bytes(part, kLive), poison);
  EXPECT_EQ(testing::row_bytes(part, kLive - 1), testing::row_bytes(whole, kLive - 1));
}

TEST_F(CudaForward, OneChoiceOfE4m3_SameBitsWithAndWithoutTheSum) {
  for (const char* kernel : {"cuda.tile_fp8_sm90", "cuda.stream_fp8_sm90"}) {
    check_one_choice_of_e4m3(kernel);
  }
}

TEST_F(CudaForward, SharedOutAndLoad_AreWritten) {
  MoeSpec spec = make_spec(8, 2, 128, 64, DType::kBF16);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 96};
  DeviceLayer owned(spec, {.max_tokens = 64});
  const int64_t tokens = 40;
  const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 5);
  const GivenRouting routing = random_routing(tokens, 8, 2, 9);
  Tensor zero_load(DType::kI64, {8});
  DeviceTensor load = owned.queue.upload(zero_load.const_view());
  DeviceTensor shared = owned.queue.allocate(DType::kF32, {tokens, 128});
  DeviceForward forward(owned, hidden.view(), DType::kF32);
  forward.route_by(routing.ids, routing.weights);
  forward.args.shared_out = shared.view();
  forward.args.expert_load = {load.as<int64_t>(), 8};
  forward.enqueue();
  const Tensor out = forward.out();
  Tensor shared_out(DType::kF32, {tokens, 128});
  owned.queue.download(shared.const_view(), shared_out.view());
  Tensor counted(DType::kI64, {8});
  owned.queue.download(load.const_view(), counted.view());

  const ReferenceResult expected = reference_forward(owned.host, spec, *owned.source,
                                                     {.hidden = hidden.const_view(),
                                                      .topk_ids = routing.ids.view(),
                                                      .topk_weights = routing.weights.view()});
  EXPECT_LE(worst(token_errors(shared_out.view(), expected.shared)), 6e-3);
  EXPECT_LE(worst(token_errors(out.view(), expected.routed)), 6e-3);
  std::vector<int64_t> rows(8, 0);
  for (int64_t i = 0; i < tokens * 2; ++i)
    ++rows[static_cast<size_t>(routing.ids.as<int32_t>()[i])];
  for (size_t expert = 0; expert < 8; ++expert) {
    EXPECT_EQ(counted.as<int64_t>()[expert], rows[expert]) << expert;
  }
}

TEST_F(CudaForward, PartsOfRanks_AddUpToTheWhole) {
  const MoeSpec spec = make_spec(10, 3, 136, 64, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, 37, 136, 5);
  const GivenRouting routing = random_routing(37, 10, 3, 9);
  for (const bool tensor_parallel : {false, true}) {
    std::vector<float> sum(37 * 136, 0.0F);
    std::unique_ptr<DeviceLayer> last;
    for (int32_t rank = 0; rank < 3; ++rank) {
      ParallelSpec parallel{.reduce = Reduce::kPartial};
      (tensor_parallel ? parallel.tp_size : parallel.ep_size) = 3;
      (tensor_parallel ? parallel.tp_rank : parallel.ep_rank) = rank;
      last = std::make_unique<DeviceLayer>(spec, LayerOptions{.max_tokens = 64}, parallel);
      DeviceForward forward(*last, hidden.view(), DType::kF32);
      forward.route_by(routing.ids, routing.weights);
      forward.enqueue();
      const Tensor part = forward.out();
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part.as<float>()[i];
    }
    Tensor total(DType::kF32, {37, 136});
    std::copy(sum.begin(), sum.end(), total.as<float>());
    EXPECT_LE(testing::worst_error(*last, hidden, routing, total), 6e-3) << tensor_parallel;
  }
}

}  // namespace
}  // namespace conclave
