// Layers on a GPU together with their source, and forwards from host tensors to host tensors.
#pragma once

#include "support/layer_fixture.h"

#include "conclave/device_queue.h"
#include "conclave/tuning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {

// Returns why this machine cannot run such tests; an empty text if it can.
inline std::string no_gpu_reason() {
  try {
    const Context context({.device = "cuda:0", .num_threads = 1});
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

// The types and scales in which a layer computes.
struct NumberForm {
  std::string name;
  DType dtype = DType::kBF16;
  QuantSpec quant = {};
};
inline std::vector<NumberForm> number_forms() {
  QuantSpec block{.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  QuantSpec power_of_two = block;
  power_of_two.power_of_two_scales = true;
  return {{"bf16", DType::kBF16},
          {"f16", DType::kF16},
          {"e4m3 block", DType::kF8E4M3, block},
          {"e4m3 block, powers of two", DType::kF8E4M3, power_of_two},
          {"e4m3 channel",
           DType::kF8E4M3,
           {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken}},
          {"e4m3 static",
           DType::kF8E4M3,
           {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic}},
          {"e4m3 weights only", DType::kF8E4M3, {.weights = WeightScale::kChannel}}};
}
inline MoeSpec with_form(MoeSpec spec, const NumberForm& form) {
  spec.weight_dtype = form.dtype;
  spec.quant = form.quant;
  return spec;
}
// The type of hidden rows and outputs, which is that of 16-bit weights.
inline DType row_dtype(const NumberForm& form) {
  return form.dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
}

class CudaLayerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = no_gpu_reason();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

// Counts the requests and passes them on.
class CountingAllocator final : public DeviceAllocator {
 public:
  explicit CountingAllocator(DeviceAllocator& inner) : inner_(inner) {}
  void* allocate(size_t bytes, size_t alignment, Stream stream) override {
    ++calls;
    all_bytes += static_cast<int64_t>(bytes);
    return inner_.allocate(bytes, alignment, stream);
  }
  void deallocate(void* data, size_t bytes, Stream stream) noexcept override {
    inner_.deallocate(data, bytes, stream);
  }
  int64_t calls = 0;
  int64_t all_bytes = 0;

 private:
  DeviceAllocator& inner_;
};

struct DeviceLayer {
  explicit DeviceLayer(const MoeSpec& spec, const LayerOptions& options = {},
                       const ParallelSpec& parallel = {}, uint64_t seed = 11)
      : DeviceLayer(spec, make_synthetic_source(spec, seed), options, parallel) {}
  DeviceLayer(const MoeSpec& spec, std::unique_ptr<WeightSource> weights,
              const LayerOptions& options = {}, const ParallelSpec& parallel = {})
      : DeviceLayer({.device = "cuda:0", .num_threads = 2}, spec, std::move(weights), options,
                    parallel) {}
  DeviceLayer(ContextOptions where, const MoeSpec& spec, std::unique_ptr<WeightSource> weights,
              const LayerOptions& options, const ParallelSpec& parallel)
      : context(std::move(where)),
        host({.device = "cpu", .num_threads = 8}),
        source(std::move(weights)),
        layer(MoeLayer::create(context, spec, *source, options, parallel)),
        queue(context),
        workspace(context, layer.workspace_bytes()) {}

  Context context;
  Context host;  // for references
  std::unique_ptr<WeightSource> source;
  MoeLayer layer;
  DeviceQueue queue;
  Workspace workspace;
};

// Device copies of a forward's host inputs, and its outputs.
class DeviceForward {
 public:
  DeviceForward(DeviceLayer& owned, const ConstTensorView& hidden, DType out_dtype)
      : owned_(owned), tokens_(hidden.shape[0]) {
    const MoeSpec& spec = owned.layer.spec();
    hidden_ = owned.queue.upload(hidden);
    out_ = owned.queue.allocate(out_dtype, {tokens_, spec.hidden_size});
    // Elements that are not written stay NaN in every type.
    owned.queue.fill(out_.view(), 0xFF);
    args.hidden = hidden_.view();
    args.out = out_.view();
    args.workspace = &owned.workspace;
    args.stream = owned.queue.stream();
  }

  // Routes by the given ids and weights, [T, k] each.
  void route_by(const Tensor& ids, const Tensor& weights) {
    ids_ = owned_.queue.upload(ids.view());
    weights_ = owned_.queue.upload(weights.view());
    args.topk_ids = ids_.const_view();
    args.topk_weights = weights_.const_view();
  }
  void route_by_logits(const Tensor& logits) {
    logits_ = owned_.queue.upload(logits.view());
    args.router_logits = logits_.const_view();
  }
  void capture_routing() {
    const MoeSpec& spec = owned_.layer.spec();
    captured_ids_ = owned_.queue.allocate(DType::kI32, {tokens_, num_slots(spec)});
    captured_weights_ = owned_.queue.allocate(DType::kF32, {tokens_, num_slots(spec)});
    owned_.queue.fill(captured_ids_.view(), 0xFF);
    owned_.queue.fill(captured_weights_.view(), 0xFF);
    args.captured_ids = captured_ids_.view();
    args.captured_weights = captured_weights_.view();
    if (!args.topk_ids.empty()) return;
    captured_logits_ = owned_.queue.allocate(DType::kF32, {tokens_, num_logits(spec)});
    owned_.queue.fill(captured_logits_.view(), 0xFF);
    args.captured_logits = captured_logits_.view();
  }

  void enqueue() { owned_.layer.forward(args); }

  // Returns everything as it is once the stream has passed.
  LayerOutput output() {
    return {.out = download(out_),
            .logits = download(captured_logits_),
            .ids = download(captured_ids_),
            .weights = download(captured_weights_)};
  }
  Tensor out() { return download(out_); }

  DeviceTensor& hidden() { return hidden_; }
  DeviceTensor& ids() { return ids_; }
  DeviceTensor& weights() { return weights_; }

  ForwardArgs args;

 private:
  Tensor download(const DeviceTensor& tensor) const {
    const ConstTensorView view = tensor.const_view();
    Tensor copy(view.dtype, view.shape);
    if (view.data != nullptr) owned_.queue.download(view, copy.view());
    return copy;
  }

  DeviceLayer& owned_;
  int64_t tokens_;
  DeviceTensor hidden_, out_, ids_, weights_, logits_;
  DeviceTensor captured_ids_, captured_weights_, captured_logits_;
};

inline LayerOutput run_device_layer(DeviceLayer& owned, const ConstTensorView& hidden,
                                    DType out_dtype) {
  DeviceForward forward(owned, hidden, out_dtype);
  forward.capture_routing();
  forward.enqueue();
  return forward.output();
}

// Random distinct experts with weights that add up to 1.
struct GivenRouting {
  Tensor ids;
  Tensor weights;
};
inline GivenRouting random_routing(int64_t tokens, int64_t experts, int64_t top_k, uint64_t seed) {
  GivenRouting routing{.ids = Tensor(DType::kI32, {tokens, top_k}),
                       .weights = Tensor(DType::kF32, {tokens, top_k})};
  uint64_t state = seed * 0x9E3779B97F4A7C15U + 1;
  for (int64_t token = 0; token < tokens; ++token) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto first = static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(experts));
    for (int64_t slot = 0; slot < top_k; ++slot) {
      routing.ids.as<int32_t>()[token * top_k + slot] =
          static_cast<int32_t>((first + slot * 7 % experts + slot) % experts);
      routing.weights.as<float>()[token * top_k + slot] = 1.0F / static_cast<float>(top_k);
    }
  }
  return routing;
}

// How close to a rounding boundary a code may lie and still differ on the rung that serves
// `tokens`: the single launch sums in float32, all others on tensor cores.
inline double code_ambiguity(const DeviceLayer& owned, int64_t tokens) {
  const std::vector<PlanRung>& ladder = owned.layer.plan().ladder;
  const auto rung = std::find_if(ladder.begin(), ladder.end(), [&](const PlanRung& candidate) {
    return tokens <= candidate.last_tokens;
  });
  const bool in_float32 = rung != ladder.end() &&
                          (rung->kernel == "cuda.decode_sm90" || rung->kernel == "cuda.reference");
  return in_float32 ? kFloat32CodeAmbiguity : kTensorCoreCodeAmbiguity;
}

// Keeps the worst error of each format for the report of the running test.
inline void note_error(const MoeSpec& spec, double error) {
  static std::string test;
  static std::map<std::string, double> worst;
  const ::testing::TestInfo* const info = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = info == nullptr ? "" : info->name();
  if (name != test) worst.clear();
  test = name;
  double& most = worst[tuning_format(spec.weight_dtype, spec.quant)];
  most = std::max(most, error);
  ::testing::Test::RecordProperty("worst " + tuning_format(spec.weight_dtype, spec.quant),
                                  std::to_string(most));
}

// The worst token against float64 on the same routing, minus what ambiguous codes explain.
inline double worst_error(DeviceLayer& owned, const Tensor& hidden, const GivenRouting& routing,
                          const Tensor& out) {
  const StageCheck check =
      check_against_reference(owned.host, owned.layer.spec(), *owned.source,
                              {.hidden = hidden.const_view(),
                               .topk_ids = routing.ids.view(),
                               .topk_weights = routing.weights.view(),
                               .output = out.view(),
                               .code_ambiguity = code_ambiguity(owned, hidden.shape()[0])});
  note_error(owned.layer.spec(), check.worst_token_error);
  return check.worst_token_error;
}

// Holds a call of `tokens` random rows to float64.
inline void expect_accurate(DeviceLayer& owned, int64_t tokens, double bar) {
  SCOPED_TRACE(::testing::Message() << "T" << tokens);
  const MoeSpec& spec = owned.layer.spec();
  const Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 3);
  const LayerOutput output = run_device_layer(owned, hidden.view(), DType::kBF16);
  LayerResult result = output.result(hidden.const_view());
  result.code_ambiguity = code_ambiguity(owned, tokens);
  const StageCheck check = check_against_reference(owned.host, spec, *owned.source, result);
  note_error(spec, check.worst_token_error);
  EXPECT_EQ(check.routing_mismatches, 0);
  EXPECT_LE(check.worst_token_error, bar);
}

// A row with a value that is not finite is NaN, and the others are as without it.
inline void expect_bad_rows_stay_apart(DeviceLayer& owned, int64_t tokens) {
  const MoeSpec& spec = owned.layer.spec();
  const int64_t infinite = 2;
  const int64_t nan = tokens * 2 / 3;
  Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 5);
  const GivenRouting routing = random_routing(tokens, spec.num_experts, spec.top_k, 3);
  const auto run = [&] {
    DeviceForward forward(owned, hidden.view(), DType::kF32);
    forward.route_by(routing.ids, routing.weights);
    forward.enqueue();
    return forward.out();
  };
  const Tensor before = run();
  constexpr uint16_t kInfinity = 0x7f80;
  constexpr uint16_t kNan = 0x7fc0;
  hidden.as<uint16_t>()[infinite * spec.hidden_size + 7] = kInfinity;
  hidden.as<uint16_t>()[nan * spec.hidden_size + 200] = kNan;
  const Tensor after = run();
  for (int64_t at = 0; at < tokens * spec.hidden_size; ++at) {
    const int64_t token = at / spec.hidden_size;
    if (token == infinite || token == nan) {
      ASSERT_TRUE(std::isnan(after.as<float>()[at])) << token;
    } else {
      ASSERT_EQ(after.as<float>()[at], before.as<float>()[at]) << token;
    }
  }
}

}  // namespace conclave::testing
