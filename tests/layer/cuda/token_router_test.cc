// TokenRouter on a GPU gives the host's ids and weights for the same logits, and names faults.
#include "conclave/token_router.h"

#include "device_layer.h"
#include "routing/random_spec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::router_spec;
using testing::RoutingProblem;
using testing::RoutingResult;

constexpr std::byte kPoison{0xFF};

template <class T>
std::vector<T> values_of(const Tensor& tensor, int64_t count) {
  const auto* const data = static_cast<const T*>(tensor.view().data);
  return {data, data + count};
}

// The problem's arguments in device memory, with outputs that nothing has written yet.
class DeviceCall {
 public:
  DeviceCall(const DeviceQueue& queue, RoutingProblem& problem, DType logits_dtype = DType::kF32,
             int64_t gap = 0)
      : queue_(queue), slots_(problem.num_tokens() * problem.spec.top_k) {
    const MoeSpec& spec = problem.spec;
    const int64_t tokens = problem.num_tokens();
    const int64_t columns = num_logits(spec);
    logits_ = upload_logits(problem, logits_dtype, gap);
    bias_ = upload(problem.selection_bias);
    expert_scale_ = upload(problem.expert_scale);
    global_scale_ = upload(problem.global_scale);
    token_ids_ = upload(problem.token_ids, DType::kI32, {tokens});
    if (testing::num_sinks(spec) > 0) {
      shared_weights_ = queue.allocate(DType::kF32, {tokens, testing::num_sinks(spec)});
    }
    ids_ = queue.allocate(DType::kI32, {tokens, spec.top_k});
    weights_ = queue.allocate(DType::kF32, {tokens, spec.top_k});
    queue.fill(ids_.view(), 0xFF);
    queue.fill(weights_.view(), 0xFF);
    args = {.logits = {.data = logits_.const_view().data,
                       .dtype = logits_dtype,
                       .shape = {tokens, columns},
                       .row_stride = columns + gap},
            .token_ids = token_ids_.const_view(),
            .selection_bias = bias_.const_view(),
            .expert_scale = expert_scale_.const_view(),
            .global_scale = global_scale_.const_view(),
            .topk_ids = ids_.view(),
            .topk_weights = weights_.view(),
            .shared_weights = shared_weights_.view(),
            .stream = queue.stream()};
    for (const routing::SizedRouterTensor& own : routing::router_tensors_of(spec)) {
      if (!own.tensor->id) continue;
      const bool is_index = own.tensor->element == routing::RouterElement::kIndex;
      const Shape shape =
          own.tensor->is_vector ? Shape{own.size.cols} : Shape{own.size.rows, own.size.cols};
      tensors_.push_back(upload(problem.tensors.at(own.place.value()),
                                is_index ? DType::kI32 : DType::kF32, shape));
      args.tensors[std::string(own.tensor->name)] = tensors_.back().const_view();
    }
  }

  RoutingResult result() const {
    Tensor ids(DType::kI32, ids_.view().shape);
    Tensor weights(DType::kF32, ids_.view().shape);
    queue_.download(ids_.view(), ids.view());
    queue_.download(weights_.view(), weights.view());
    RoutingResult found{.ids = values_of<int32_t>(ids, slots_),
                        .weights = values_of<float>(weights, slots_)};
    if (shared_weights_.view().data == nullptr) return found;
    Tensor shared(DType::kF32, shared_weights_.view().shape);
    queue_.download(shared_weights_.view(), shared.view());
    found.shared_weights = values_of<float>(shared, shared.view().shape.num_elements());
    return found;
  }

  RouteArgs args;

 private:
  template <class T>
  DeviceTensor upload(const std::vector<T>& values, DType dtype, const Shape& shape) const {
    if (values.empty()) return {};
    return queue_.upload(ConstTensorView{.data = values.data(), .dtype = dtype, .shape = shape});
  }
  DeviceTensor upload(const std::vector<float>& values) const {
    return upload(values, DType::kF32, {static_cast<int64_t>(values.size())});
  }

  // Rounds the problem's logits to the type, in place. The gaps between rows hold NaN.
  DeviceTensor upload_logits(RoutingProblem& problem, DType dtype, int64_t gap) const {
    const int64_t tokens = problem.num_tokens();
    const int64_t columns = num_logits(problem.spec);
    const TensorView exact{problem.logits.data(), DType::kF32, {tokens, columns}};
    Tensor wide(dtype, {tokens, columns + gap});
    std::fill_n(static_cast<std::byte*>(wide.view().data), wide.size_bytes(), kPoison);
    const TensorView rows{wide.view().data, dtype, {tokens, columns}, columns + gap};
    convert(exact, rows);
    convert(rows, exact);
    return queue_.upload(wide.view());
  }

  const DeviceQueue& queue_;
  int64_t slots_;
  DeviceTensor logits_, bias_, expert_scale_, global_scale_, token_ids_;
  std::vector<DeviceTensor> tensors_;
  DeviceTensor ids_, weights_, shared_weights_;
};

class CudaTokenRouter : public testing::CudaLayerTest {
 protected:
  void SetUp() override {
    testing::CudaLayerTest::SetUp();
    if (IsSkipped()) return;
    context_.emplace(ContextOptions{.device = "cuda:0", .num_threads = 1});
    queue_.emplace(*context_);
  }

  void expect_equals_host(RoutingProblem& problem, DType logits_dtype = DType::kF32,
                          int64_t gap = 0) {
    SCOPED_TRACE(testing::describe(problem.spec));
    const DeviceCall call(*queue_, problem, logits_dtype, gap);
    TokenRouter(*context_, problem.spec).route(call.args);
    const RoutingResult actual = call.result();
    const RoutingResult wanted = testing::route(problem);
    ASSERT_EQ(actual.ids, wanted.ids);
    testing::expect_weights(actual.weights, wanted.weights);
    testing::expect_weights(actual.shared_weights, wanted.shared_weights);
  }

  std::string refused(const MoeSpec& spec, const RouteArgs& args) const {
    try {
      TokenRouter(*context_, spec).route(args);
    } catch (const Error& error) {
      return std::string(to_string(error.code())) + " " + error.detail().tensor;
    }
    return "";
  }

  std::string refused_to_make(const MoeSpec& spec) const {
    try {
      const TokenRouter router(*context_, spec);
    } catch (const Error& error) {
      return std::string(to_string(error.code())) + " " + error.detail().found;
    }
    return "";
  }

  std::optional<Context> context_;
  std::optional<DeviceQueue> queue_;
};

TEST_F(CudaTokenRouter, RandomRules_EqualTheHost) {
  const std::vector<DType> types = {DType::kF32, DType::kBF16, DType::kF16};
  int tested = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 generator(seed);
    MoeSpec spec = testing::random_topk_spec(generator);
    if (spec.top_k > 32 || spec.num_zero_experts > 0) continue;
    spec.hidden_size = 0;  // sizes of matrices need not be given
    spec.intermediate_size = 0;
    RoutingProblem problem = testing::random_problem(spec, 1 + seed % 40, 1.0F, seed);
    const bool cancels =
        spec.router.renormalize == Renormalize::kSum && spec.router.score == RouterScore::kNone;
    if (cancels) {
      for (float& logit : problem.logits) logit = std::abs(logit) + 0.1F;
    }
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_equals_host(problem, types[seed % 3], seed % 2);
    if (HasFailure()) return;
    ++tested;
  }
  EXPECT_GT(tested, 80);
}

TEST_F(CudaTokenRouter, SizesOfModels_EqualTheHost) {
  for (const auto& [experts, top_k] : std::map<int64_t, int64_t>{
           {6, 2}, {8, 2}, {10, 1}, {60, 4}, {64, 8}, {128, 8}, {512, 10}, {1024, 32}}) {
    for (const int64_t tokens : {1, 17, 1000}) {
      const MoeSpec spec = router_spec(experts, top_k, Renormalize::kSum);
      RoutingProblem problem = testing::random_problem(spec, tokens, 1.0F, 3);
      expect_equals_host(problem, DType::kBF16, 3);
    }
  }
  MoeSpec grouped = router_spec(256, 8, Renormalize::kSum);
  grouped.router.score = RouterScore::kSigmoid;
  grouped.router.has_selection_bias = true;
  grouped.router.num_groups = 8;
  grouped.router.topk_groups = 4;
  grouped.router.group_score = GroupScore::kTop2Sum;
  RoutingProblem problem = testing::random_problem(grouped, 300, 1.0F, 4);
  expect_equals_host(problem);
}

TEST_F(CudaTokenRouter, RowsWithoutAFiniteLogit_ChooseTheFirstExperts) {
  const MoeSpec spec = router_spec(10, 3, Renormalize::kSum);
  RoutingProblem problem = testing::random_problem(spec, 5, 1.0F, 6);
  std::fill_n(problem.logits.begin() + 20, 10, std::numeric_limits<float>::quiet_NaN());
  std::fill_n(problem.logits.begin() + 40, 10, -std::numeric_limits<float>::infinity());
  expect_equals_host(problem);
}

TEST_F(CudaTokenRouter, BiasThatIsNoNumber_IsChosenLastAndStaysAnExpert) {
  MoeSpec spec = router_spec(6, 5, Renormalize::kSum);
  spec.router.score = RouterScore::kSigmoid;
  spec.router.has_selection_bias = true;
  RoutingProblem problem = testing::random_problem(spec, 40, 1.0F, 7);
  problem.selection_bias[2] = std::numeric_limits<float>::quiet_NaN();
  const DeviceCall call(*queue_, problem);
  TokenRouter(*context_, spec).route(call.args);
  for (const int32_t id : call.result().ids) {
    EXPECT_TRUE(id >= 0 && id < 6 && id != 2) << id;
  }
}

TEST_F(CudaTokenRouter, NoTokens_WriteNothing) {
  MoeSpec spec = router_spec(6, 2, Renormalize::kSum);
  RoutingProblem problem{.spec = spec};
  const DeviceCall call(*queue_, problem);
  EXPECT_EQ(refused(spec, call.args), "");
}

TEST_F(CudaTokenRouter, WrongArguments_AreNamedAndNothingIsWritten) {
  MoeSpec spec = router_spec(6, 2, Renormalize::kSum);
  spec.router.has_selection_bias = true;
  RoutingProblem problem = testing::random_problem(spec, 4, 1.0F, 8);
  const DeviceCall call(*queue_, problem);
  std::vector<float> host(24);
  const auto with = [&](auto change) {
    RouteArgs args = call.args;
    change(args);
    return refused(spec, args);
  };
  EXPECT_EQ(with([](RouteArgs& a) { a.stream = {}; }), "kNullPointer stream");
  EXPECT_EQ(with([](RouteArgs& a) { a.logits.shape = {4, 5}; }), "kShape logits");
  EXPECT_EQ(with([](RouteArgs& a) { a.logits.row_stride = 3; }), "kStride logits");
  EXPECT_EQ(with([](RouteArgs& a) { a.selection_bias.dtype = DType::kBF16; }),
            "kDType selection_bias");
  EXPECT_EQ(with([](RouteArgs& a) { a.topk_ids.dtype = DType::kI64; }), "kDType topk_ids");
  EXPECT_EQ(with([&](RouteArgs& a) { a.logits.data = host.data(); }), "kDevice logits");
  EXPECT_EQ(with([&](RouteArgs& a) { a.selection_bias.data = host.data(); }),
            "kDevice selection_bias");
  EXPECT_EQ(with([&](RouteArgs& a) { a.topk_ids.data = host.data(); }), "kDevice topk_ids");
  EXPECT_EQ(with([&](RouteArgs& a) { a.topk_weights.data = host.data(); }), "kDevice topk_weights");
  EXPECT_EQ(with([](RouteArgs& a) { a.top_k = 1; }), "kUnsupported top_k");
  EXPECT_EQ(with([](RouteArgs& a) { a.expert_budget = 3; }), "kUnsupported expert_budget");
  EXPECT_EQ(with([&](RouteArgs& a) {
              a.banned_experts = {.data = host.data(), .dtype = DType::kBool, .shape = {6}};
            }),
            "kUnsupported banned_experts");
  EXPECT_EQ(call.result().ids, std::vector<int32_t>(8, -1));
}

TEST_F(CudaTokenRouter, OtherRules_EqualTheHost) {
  for (const char* name : {"hash", "sparse_mixer", "sink_softmax", "simulated"}) {
    for (const int64_t tokens : {1, 300}) {
      RoutingProblem problem =
          testing::random_problem(testing::spec_of_row(name), tokens, 1.0F, 11);
      expect_equals_host(problem);
    }
  }
}

TEST_F(CudaTokenRouter, WhatTheDeviceLacks_IsRefusedWithAReason) {
  MoeSpec recorded = testing::spec_of_row("simulated");
  recorded.router.simulated.distribution = SimulatedDistribution::kReplay;
  recorded.router.simulated.replay_ids.assign(static_cast<size_t>(2 * recorded.top_k), 0);
  EXPECT_NE(refused_to_make(recorded).find("replay"), std::string::npos);
  MoeSpec zero_experts = router_spec(8, 2, Renormalize::kSum);
  zero_experts.num_zero_experts = 2;
  EXPECT_NE(refused_to_make(zero_experts), "");
  EXPECT_NE(refused_to_make(router_spec(1025, 2, Renormalize::kSum)), "");
  EXPECT_EQ(refused_to_make(router_spec(64, 33, Renormalize::kSum)), "");
}

}  // namespace
}  // namespace conclave
