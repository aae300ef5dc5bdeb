// TokenRouter: any rule on its own equals the float64 oracle, and faults are named.
#include "conclave/token_router.h"

#include "routing/random_spec.h"
#include "routing/routing_problem.h"

#include "conclave/context.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::describe;
using testing::oracle;
using testing::random_topk_spec;
using testing::router_spec;
using testing::RoutingProblem;
using testing::RoutingResult;

const Context& context() {
  static const Context shared({.num_threads = 3});
  return shared;
}

std::vector<float> normal(size_t count, std::mt19937& generator) {
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(generator);
  return values;
}

template <class T>
ConstTensorView view(const std::vector<T>& values, const Shape& shape, DType dtype) {
  if (values.empty()) return {};
  return {.data = values.data(), .dtype = dtype, .shape = shape};
}

// The problem's arguments, with outputs of their own.
struct Call {
  RoutingResult result;
  RouteArgs args;

  explicit Call(const RoutingProblem& problem) {
    const MoeSpec& spec = problem.spec;
    const int64_t tokens = problem.num_tokens();
    const int64_t columns = spec.num_experts + spec.num_zero_experts;
    result.ids.assign(static_cast<size_t>(tokens * spec.top_k), -77);
    result.weights.assign(result.ids.size(), -77.0F);
    result.shared_weights.assign(static_cast<size_t>(tokens * testing::num_sinks(spec)), -77.0F);
    args = {.logits = view(problem.logits, {tokens, num_logits(spec)}, DType::kF32),
            .token_ids = view(problem.token_ids, {tokens}, DType::kI32),
            .selection_bias = view(problem.selection_bias, {columns}, DType::kF32),
            .expert_scale = view(problem.expert_scale, {spec.num_experts}, DType::kF32),
            .global_scale = view(problem.global_scale, {1}, DType::kF32),
            .topk_ids = {result.ids.data(), DType::kI32, {tokens, spec.top_k}},
            .topk_weights = {result.weights.data(), DType::kF32, {tokens, spec.top_k}}};
    for (const routing::SizedRouterTensor& own : routing::router_tensors_of(spec)) {
      if (!own.tensor->id) continue;
      const bool is_index = own.tensor->element == routing::RouterElement::kIndex;
      const Shape shape =
          own.tensor->is_vector ? Shape{own.size.cols} : Shape{own.size.rows, own.size.cols};
      args.tensors[std::string(own.tensor->name)] =
          view(problem.tensors.at(own.place.value()), shape, is_index ? DType::kI32 : DType::kF32);
    }
    if (testing::num_sinks(spec) > 0) {
      args.shared_weights = {
          result.shared_weights.data(), DType::kF32, {tokens, testing::num_sinks(spec)}};
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

void expect_near(const std::vector<float>& actual, const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    // The bar is two units in the last place, as docs/routing.md promises.
    EXPECT_NEAR(actual[i], expected[i], 2.4e-7 * std::abs(expected[i])) << "at " << i;
  }
}

void expect_oracle(const RoutingProblem& problem) {
  SCOPED_TRACE(describe(problem.spec));
  Call call(problem);
  TokenRouter(context(), problem.spec).route(call.args);
  const RoutingResult expected = oracle(problem);
  EXPECT_EQ(call.result.ids, expected.ids);
  expect_near(call.result.weights, expected.weights);
  expect_near(call.result.shared_weights, expected.shared_weights);
}

RoutingProblem random_problem(const MoeSpec& spec, int64_t tokens, std::mt19937& generator) {
  const auto columns = static_cast<size_t>(spec.num_experts + spec.num_zero_experts);
  RoutingProblem problem{
      .spec = spec, .logits = normal(static_cast<size_t>(tokens * num_logits(spec)), generator)};
  if (spec.router.has_selection_bias) problem.selection_bias = normal(columns, generator);
  if (spec.router.has_expert_scale) {
    problem.expert_scale = normal(static_cast<size_t>(spec.num_experts), generator);
  }
  if (spec.router.has_global_scale) problem.global_scale = normal(1, generator);
  return problem;
}

RoutingProblem hash_problem(std::mt19937& generator) {
  MoeSpec spec = router_spec(10, 3, Renormalize::kSum);
  spec.router.name = "hash";
  spec.router.vocab_size = 20;
  RoutingProblem problem = random_problem(spec, 9, generator);
  problem.tensors.resize(1);
  for (int32_t i = 0; i < 60; ++i) problem.tensors[0].push_back((7 * i) % 10);
  for (int32_t i = 0; i < 9; ++i) problem.token_ids.push_back((11 * i) % 20);
  return problem;
}

std::string refused(const RoutingProblem& problem, const RouteArgs& args) {
  try {
    TokenRouter(context(), problem.spec).route(args);
  } catch (const Error& error) {
    return std::string(to_string(error.code())) + " " + error.detail().tensor;
  }
  return "";
}

TEST(TokenRouter, RandomRules_EqualTheOracle) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 generator(seed);
    const MoeSpec spec = random_topk_spec(generator);
    expect_oracle(random_problem(spec, 1 + seed % 40, generator));
  }
}

TEST(TokenRouter, OtherRules_EqualTheOracle) {
  std::mt19937 generator(1);
  expect_oracle(hash_problem(generator));
  MoeSpec mixer = router_spec(16, 2, Renormalize::kNone);
  mixer.router = {.name = "sparse_mixer", .jitter_epsilon = 0.01};
  mixer.router.renormalize = Renormalize::kSum;
  expect_oracle(random_problem(mixer, 12, generator));
  MoeSpec sink = router_spec(12, 3, Renormalize::kSum);
  sink.router = {.name = "sink_softmax", .has_selection_bias = true};
  sink.shared = {.mode = SharedMode::kRouterWeight, .intermediate_size = 0, .count = 2};
  expect_oracle(random_problem(sink, 12, generator));
}

TEST(TokenRouter, SizesOfMatrices_NeedNotBeGiven) {
  MoeSpec spec = router_spec(8, 2, Renormalize::kSum);
  spec.hidden_size = 0;
  spec.intermediate_size = 0;
  std::mt19937 generator(2);
  expect_oracle(random_problem(spec, 5, generator));
}

TEST(TokenRouter, RowsApartAndNarrow_AreReadAsTheyAre) {
  std::mt19937 generator(3);
  const MoeSpec spec = router_spec(6, 2, Renormalize::kSum);
  RoutingProblem problem = random_problem(spec, 4, generator);
  // The logits are bf16 values in rows of 9, whose columns 6 to 8 are NaN.
  std::vector<uint16_t> wide(4 * 9, 0x7FC0);
  Tensor rounded(DType::kBF16, {4, 6});
  convert(view(problem.logits, {4, 6}, DType::kF32), rounded.view());
  for (size_t i = 0; i < 24; ++i) wide[i / 6 * 9 + i % 6] = rounded.as<uint16_t>()[i];
  convert(rounded.const_view(), {problem.logits.data(), DType::kF32, {4, 6}});
  Call call(problem);
  call.args.logits = {.data = wide.data(), .dtype = DType::kBF16, .shape = {4, 6}, .row_stride = 9};
  TokenRouter(context(), spec).route(call.args);
  EXPECT_EQ(call.result.ids, oracle(problem).ids);
  expect_near(call.result.weights, oracle(problem).weights);
}

TEST(TokenRouter, NoTokens_WriteNothing) {
  const RoutingProblem problem{.spec = router_spec(6, 2, Renormalize::kSum)};
  Call call(problem);
  call.args.logits = {.data = &problem, .dtype = DType::kF32, .shape = {0, 6}};
  EXPECT_EQ(refused(problem, call.args), "");
}

TEST(TokenRouter, WrongArguments_AreNamed) {
  std::mt19937 generator(4);
  MoeSpec spec = router_spec(6, 2, Renormalize::kSum);
  spec.router.has_selection_bias = true;
  RoutingProblem problem = random_problem(spec, 4, generator);
  Call call(problem);
  const auto with = [&](auto change) {
    RouteArgs args = call.args;
    change(args);
    return refused(problem, args);
  };
  EXPECT_EQ(with([](RouteArgs& a) { a.logits.shape = {4, 5}; }), "kShape logits");
  EXPECT_EQ(with([](RouteArgs& a) { a.logits.dtype = DType::kI32; }), "kDType logits");
  EXPECT_EQ(with([](RouteArgs& a) { a.logits.row_stride = 3; }), "kStride logits");
  EXPECT_EQ(with([](RouteArgs& a) { a.topk_ids.dtype = DType::kI64; }), "kDType topk_ids");
  EXPECT_EQ(with([](RouteArgs& a) { a.topk_ids.row_stride = 4; }), "kStride topk_ids");
  EXPECT_EQ(with([](RouteArgs& a) { a.topk_weights.shape = {3, 2}; }), "kShape topk_weights");
  EXPECT_EQ(with([](RouteArgs& a) { a.selection_bias = {}; }), "kInvalidArgument selection_bias");
  EXPECT_EQ(with([](RouteArgs& a) { a.selection_bias.shape = {5}; }), "kShape selection_bias");
  EXPECT_EQ(with([](RouteArgs& a) { a.expert_scale = a.selection_bias; }),
            "kInvalidArgument expert_scale");
  problem.selection_bias[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(refused(problem, Call(problem).args), "kInvalidArgument selection_bias");
}

TEST(TokenRouter, TableAndTokens_AreCheckedBeforeUse) {
  std::mt19937 generator(5);
  for (const int32_t wrong : {-1, 20, std::numeric_limits<int32_t>::max()}) {
    RoutingProblem problem = hash_problem(generator);
    problem.token_ids[4] = wrong;
    EXPECT_EQ(refused(problem, Call(problem).args), "kInvalidArgument token_ids");
  }
  RoutingProblem problem = hash_problem(generator);
  problem.tensors[0][static_cast<size_t>(problem.token_ids[2]) * 3 + 1] = 10;
  EXPECT_EQ(refused(problem, Call(problem).args), "kExpertId hash_table");
}

TEST(TokenRouter, OwnTensors_ComeInTheirFieldOrByName) {
  std::mt19937 generator(6);
  const RoutingProblem problem = hash_problem(generator);
  const std::vector<int32_t> expected = oracle(problem).ids;
  Call by_name(problem);
  TokenRouter(context(), problem.spec).route(by_name.args);
  EXPECT_EQ(by_name.result.ids, expected);
  Call by_field(problem);
  by_field.args.hash_table = by_field.args.tensors.at("hash_table");
  by_field.args.tensors.clear();
  TokenRouter(context(), problem.spec).route(by_field.args);
  EXPECT_EQ(by_field.result.ids, expected);
}

TEST(TokenRouter, OwnTensorsThatDoNotFit_AreNamed) {
  std::mt19937 generator(7);
  const RoutingProblem problem = hash_problem(generator);
  const auto with = [&](auto change) {
    Call call(problem);
    change(call.args);
    return refused(problem, call.args);
  };
  EXPECT_EQ(with([](RouteArgs& a) { a.tensors.clear(); }), "kInvalidArgument hash_table");
  EXPECT_EQ(with([](RouteArgs& a) {
              a.tensors["hash_table"].shape = {20, 2};
            }),
            "kShape hash_table");
  EXPECT_EQ(with([](RouteArgs& a) { a.tensors["hash_table"].dtype = DType::kF32; }),
            "kDType hash_table");
  EXPECT_EQ(with([](RouteArgs& a) { a.tensors["dice"] = a.logits; }), "kUnknownName dice");
  const RoutingProblem other = random_problem(router_spec(10, 3, Renormalize::kSum), 9, generator);
  Call call(other);
  call.args.hash_table = {
      .data = problem.tensors[0].data(), .dtype = DType::kI32, .shape = {20, 3}};
  EXPECT_EQ(refused(other, call.args), "kInvalidArgument hash_table");
  Call words(other);
  words.args.token_ids = {.data = problem.token_ids.data(), .dtype = DType::kI32, .shape = {9}};
  EXPECT_EQ(refused(other, words.args), "kInvalidArgument token_ids");
}

TEST(TokenRouter, RuleThatCannotBe_IsRefusedWhenMade) {
  const auto make = [](const MoeSpec& spec) { return TokenRouter(context(), spec); };
  EXPECT_THROW(make(router_spec(4, 5, Renormalize::kSum)), Error);
  MoeSpec unknown = router_spec(4, 2, Renormalize::kSum);
  unknown.router.name = "dice";
  EXPECT_THROW(make(unknown), Error);
}

TEST(TokenRouter, NanAnywhereInTheSelectionBias_IsRefusedNamingTheEntry) {
  MoeSpec spec = router_spec(10, 3, Renormalize::kSum);
  spec.router.has_selection_bias = true;
  spec.num_zero_experts = 3;
  std::mt19937 generator(8);
  const RoutingProblem problem = random_problem(spec, 4, generator);
  for (size_t at = 0; at < problem.selection_bias.size(); ++at) {
    RoutingProblem spoilt = problem;
    spoilt.selection_bias[at] = std::numeric_limits<float>::quiet_NaN();
    Call call(spoilt);
    try {
      TokenRouter(context(), spec).route(call.args);
      ADD_FAILURE() << "accepted at " << at;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(error.detail().tensor, "selection_bias");
      EXPECT_EQ(error.detail().what, "the selection bias is not a number at " + std::to_string(at));
    }
  }
  EXPECT_EQ(problem.selection_bias.size(), 13U);
}

}  // namespace
}  // namespace conclave
