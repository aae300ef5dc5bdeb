// A forward asks the driver for nothing: whatever depends on the device or on a kernel is found
// when the layer is made. Calls of the runtime are counted from the first forward on.

#include "device_layer.h"
#include "layer/random_adapter.h"
#include "support/cuda/call_counter.h"
#include "support/cuda/cuda_problem.h"
#include "support/cuda/problem_layer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::CudaCallCounts;
using testing::CudaProblem;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::make_spec;
using testing::random_tensor;

// Arguments that may be tensors of the device: each is looked at once.
constexpr int64_t kMostArguments = 15;

void expect_pure(const CudaCallCounts& counts) {
  EXPECT_EQ(counts.planned, "");
  EXPECT_LE(counts.pointer_checks, kMostArguments);
  EXPECT_LE(counts.device_reads, 1);  // the caller's device, which is current again afterwards
}

CudaCallCounts counted(const std::function<void()>& forward) {
  testing::arm_cuda_call_counter();
  forward();
  return testing::disarm_cuda_call_counter();
}

// Flags of all tokens, in host memory.
std::vector<uint8_t> first_banned(const MoeSpec& spec) {
  std::vector<uint8_t> flags(static_cast<size_t>(spec.num_experts + spec.num_zero_experts));
  flags[0] = 1;
  return flags;
}

class CudaForwardCalls : public testing::CudaLayerTest {
 protected:
  static void expect_pure_forwards(DeviceLayer& owned, const std::vector<int64_t>& counts) {
    const MoeSpec& spec = owned.layer.spec();
    const DType dtype = spec.weight_dtype == DType::kF8E4M3 ? DType::kBF16 : spec.weight_dtype;
    for (const int64_t tokens : counts) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens");
      const Tensor hidden = random_tensor(dtype, tokens, spec.hidden_size, 5);
      DeviceForward routed(owned, hidden.view(), dtype);
      expect_pure(counted([&] { routed.enqueue(); }));
      DeviceForward captured(owned, hidden.view(), DType::kF32);
      captured.capture_routing();
      expect_pure(counted([&] { captured.enqueue(); }));
      DeviceForward limited(owned, hidden.view(), dtype);
      const std::vector<uint8_t> bans = first_banned(spec);
      limited.args.top_k = 1;
      limited.args.expert_budget = spec.num_experts / 2 + 1;
      limited.args.banned_experts = {
          .data = bans.data(), .dtype = DType::kBool, .shape = {std::ssize(bans)}};
      expect_pure(counted([&] { limited.enqueue(); }));
      static_cast<void>(limited.out());
      const auto given = testing::random_routing(tokens, spec.num_experts, spec.top_k, 3);
      static_cast<void>(routed.out());
      if (num_slots(spec) == spec.top_k && spec.shared.mode != SharedMode::kRouterWeight) {
        DeviceForward in_place(owned, hidden.view(), dtype);
        in_place.route_by(given.ids, given.weights);
        expect_pure(counted([&] { in_place.enqueue(); }));
        DeviceForward checked(owned, hidden.view(), dtype);
        checked.route_by(given.ids, given.weights);
        checked.capture_routing();
        expect_pure(counted([&] { checked.enqueue(); }));
        static_cast<void>(in_place.out());
        static_cast<void>(checked.out());
      }
      static_cast<void>(captured.out());
    }
  }
};

TEST_F(CudaForwardCalls, TheCounter_SeesWhatCreateAsks) {
  testing::arm_cuda_call_counter();
  DeviceLayer owned(make_spec(128, 4, 256, 128, DType::kBF16), {.max_tokens = 9000});
  const std::string planned = testing::disarm_cuda_call_counter().planned;
  for (const char* function : {"cudaFuncSetAttribute", "cudaGetDeviceProperties",
                               "cudaDeviceGetAttribute", "cudaOccupancyMaxActiveClusters"}) {
    EXPECT_NE(planned.find(function), std::string::npos) << function << " in " << planned;
  }
  testing::arm_cuda_call_counter();
  static_cast<void>(owned.layer.status());
  EXPECT_NE(testing::disarm_cuda_call_counter().planned, "");  // it waits
}

// Few tokens take the single launch; others every shape of routing, grouping and gate.
TEST_F(CudaForwardCalls, PlainLayer_AsksNothingForAnyNumberOfTokens) {
  for (const Determinism determinism :
       {Determinism::kRepeatable, Determinism::kBatchInvariant, Determinism::kUnordered}) {
    DeviceLayer owned(make_spec(128, 4, 256, 128, DType::kBF16),
                      {.max_tokens = 9000, .determinism = determinism});
    expect_pure_forwards(owned, {1, 8, 9, 64, 65, 256, 257, 700, 3000, 9000});
  }
}

TEST_F(CudaForwardCalls, EveryForm_AsksNothing) {
  for (const testing::NumberForm& form : testing::number_forms()) {
    SCOPED_TRACE(form.name);
    DeviceLayer owned(testing::with_form(make_spec(16, 2, 256, 256, form.dtype), form),
                      {.max_tokens = 3000});
    expect_pure_forwards(owned, {1, 2, 3, 64, 3000});
  }
}

// Tables of so many experts need more shared memory than a kernel has by itself. The second layer
// needs less, and must not take from the first what it has.
TEST_F(CudaForwardCalls, ManyExperts_KeepWhatTheyNeedBesideOtherLayers) {
  DeviceLayer many(make_spec(512, 8, 64, 32, DType::kBF16), {.max_tokens = 4096});
  DeviceLayer fewer(make_spec(384, 8, 64, 32, DType::kBF16), {.max_tokens = 4096});
  for (DeviceLayer* layer : {&many, &fewer, &many}) {
    expect_pure_forwards(*layer, {1, 100, 200, 700, 4096});
  }
}

TEST_F(CudaForwardCalls, EveryPart_AsksNothing) {
  std::vector<MoeSpec> specs;
  for (const SharedMode mode : {SharedMode::kAdd, SharedMode::kSigmoidGate, SharedMode::kSoftmaxMix,
                                SharedMode::kAverage}) {
    specs.push_back(make_spec(16, 3, 256, 128, DType::kBF16));
    specs.back().shared = {.mode = mode, .intermediate_size = 96};
  }
  specs.push_back(make_spec(16, 3, 256, 128, DType::kF16));
  specs.back().shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 128};
  specs.push_back(make_spec(16, 3, 256, 128, DType::kBF16));
  specs.back().latent = {.size = 64, .has_norm = true};
  specs.back().residual = {.intermediate_size = 64};
  specs.push_back(make_spec(16, 3, 256, 128, DType::kBF16));
  specs.back().router.input_norm.enabled = true;
  specs.back().num_zero_experts = 2;
  specs.push_back(make_spec(16, 3, 256, 128, DType::kF32));
  specs.push_back(make_spec(8, 2, 256, 128, DType::kBF16));
  specs.back().router.name = "sparse_mixer";
  specs.back().router.jitter_epsilon = 0.01;
  specs.push_back(make_spec(16, 3, 256, 128, DType::kBF16));
  specs.back().router.name = "simulated";
  for (size_t i = 0; i < specs.size(); ++i) {
    SCOPED_TRACE("spec " + std::to_string(i));
    DeviceLayer owned(specs[i], {.max_tokens = 2000});
    expect_pure_forwards(owned, {1, 70, 2000});
  }
}

TEST_F(CudaForwardCalls, ChunksAndGrownLayers_AskNothing) {
  DeviceLayer owned(make_spec(64, 4, 256, 128, DType::kBF16), {.max_tokens = 300});
  expect_pure_forwards(owned, {301, 1000});
  owned.layer = owned.layer.with_max_tokens(20000);
  owned.workspace = Workspace(owned.context, owned.layer.workspace_bytes());
  expect_pure_forwards(owned, {1, 20000});
}

TEST_F(CudaForwardCalls, Adapters_AskNothing) {
  const MoeSpec spec = make_spec(8, 2, 256, 128, DType::kBF16);
  DeviceLayer owned(spec, {.max_adapter_rank = 8});
  const int32_t id = owned.layer.add_adapter(testing::random_adapter(spec, {.rank = 8}));
  for (const int64_t tokens : {4, 40}) {
    const Tensor hidden = random_tensor(DType::kBF16, tokens, 256, 5);
    DeviceForward by_token(owned, hidden.view(), DType::kBF16);
    const DeviceTensor ids = owned.queue.upload(testing::id_tensor(tokens, {-1, id}).view());
    by_token.args.adapter_ids = ids.const_view();
    expect_pure(counted([&] { by_token.enqueue(); }));
    DeviceForward one(owned, hidden.view(), DType::kBF16);
    one.args.adapter = id;
    expect_pure(counted([&] { one.enqueue(); }));
    static_cast<void>(by_token.out());
    static_cast<void>(one.out());
  }
}

// A rung with a second kernel, beside which the first may have nothing to do.
TEST_F(CudaForwardCalls, SkewedChoices_AskNothing) {
  CudaProblem problem({.num_experts = 8,
                       .top_k = 2,
                       .hidden_size = 4096,
                       .intermediate_size = 14336,
                       .num_tokens = 256,
                       .routing = testing::RoutingKind::kZipf});
  const Context context({.device = "cuda:0", .num_threads = 1});
  const DeviceQueue queue(context);
  const MoeLayer layer = MoeLayer::create(context, testing::layer_spec(problem.options()),
                                          *testing::layer_source(problem), {.max_tokens = 1024});
  ASSERT_NE(explain(layer.plan()).find("skewed choices: cuda.tile_sm90"), std::string::npos);
  Workspace workspace(context, layer.workspace_bytes());
  DeviceTensor out = queue.allocate(DType::kBF16, {256, 4096});
  const DeviceRows hidden = problem.hidden();
  expect_pure(counted([&] {
    layer.forward({.hidden = {hidden.data, hidden.dtype, {256, 4096}},
                   .topk_ids = {problem.topk_ids(), DType::kI32, {256, 2}},
                   .topk_weights = {problem.topk_weights(), DType::kF32, {256, 2}},
                   .out = out.view(),
                   .workspace = &workspace,
                   .stream = queue.stream()});
  }));
  queue.synchronize();
}

}  // namespace
}  // namespace conclave
