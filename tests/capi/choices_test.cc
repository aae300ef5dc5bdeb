// Limits of a call through the C interface: fewer experts, banned experts, a budget.
#include "capi/layers.h"

#include "conclave/token_router.h"

#include <cstring>
#include <limits>
#include <set>

namespace conclave {
namespace {

using testing::Call;
using testing::expect_error;
using testing::expect_same;
using testing::Layers;
using testing::make;
using testing::random_tensor;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;

constexpr int64_t kTokens = 7;

TEST_F(Layers, Limits_HaveTheBitsOfCpp) {
  Tensor banned(DType::kBool, {kTokens, spec_.num_experts});
  auto* const flags = static_cast<uint8_t*>(banned.view().data);
  for (int64_t i = 0; i < kTokens * spec_.num_experts; ++i) flags[i] = i % 3 == 0 ? 1 : 0;
  const conclave_tensor bans = tensor_of(banned.const_view());
  struct Case {
    int64_t top_k;
    bool bans;
    int64_t budget;
  };
  for (const Case& limits : {Case{2, false, 0}, Case{0, true, 0}, Case{0, false, 6},
                             Case{3, true, 5}, Case{spec_.top_k, false, spec_.num_experts}}) {
    Call call(spec_, kTokens);
    conclave_forward_args args = call.args();
    args.top_k = limits.top_k;
    args.banned_experts = limits.bans ? &bans : nullptr;
    args.expert_budget = limits.budget;
    ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK)
        << conclave_last_error_message();
    Call expected(spec_, kTokens);
    ForwardArgs cpp = expected.cpp_args();
    cpp.top_k = limits.top_k;
    if (limits.bans) cpp.banned_experts = banned.const_view();
    cpp.expert_budget = limits.budget;
    cpp_layer_.forward(cpp);
    expect_same(call, expected);
    std::set<int32_t> used;
    for (int64_t i = 0; i < kTokens * spec_.top_k; ++i) {
      const int32_t id = call.ids.as<int32_t>()[i];
      if (id < 0) continue;
      used.insert(id);
      if (limits.bans) {
        EXPECT_EQ(flags[i / spec_.top_k * spec_.num_experts + id], 0);
      }
      if (limits.top_k != 0) {
        EXPECT_LT(i % spec_.top_k, limits.top_k);
      }
    }
    if (limits.budget != 0) {
      EXPECT_LE(static_cast<int64_t>(used.size()), limits.budget);
    }
  }
}

TEST_F(Layers, BadLimits_NameTheArgument_AndNothingIsWritten) {
  Call call(spec_, kTokens);
  Tensor one(DType::kBool, {spec_.num_experts});
  Tensor all(DType::kBool, {spec_.num_experts});
  std::memset(all.view().data, 1, static_cast<size_t>(spec_.num_experts));
  conclave_tensor bans = tensor_of(one.const_view());
  const auto expect = [&](conclave_status status, const char* names, auto spoil) {
    SCOPED_TRACE(names);
    conclave_forward_args args = call.args();
    spoil(args);
    expect_error(conclave_layer_forward(layer_.get(), &args), status, names);
    for (int64_t i = 0; i < kTokens * spec_.hidden_size; ++i) {
      ASSERT_EQ(call.out.as<float>()[i], 0.0F);
    }
    for (const int64_t rows : call.load) EXPECT_EQ(rows, 0);
  };
  constexpr auto kBad = CONCLAVE_ERROR_INVALID_ARGUMENT;
  for (const int64_t number : {int64_t{-1}, spec_.top_k + 1, std::numeric_limits<int64_t>::max(),
                               std::numeric_limits<int64_t>::min()}) {
    expect(kBad, "top_k", [&](auto& args) { args.top_k = number; });
  }
  for (const int64_t number :
       {int64_t{-1}, int64_t{1}, spec_.num_experts + 1, std::numeric_limits<int64_t>::max()}) {
    expect(kBad, "expert_budget", [&](auto& args) { args.expert_budget = number; });
  }
  const conclave_tensor everything = tensor_of(all.const_view());
  expect(kBad, "banned_experts", [&](auto& args) { args.banned_experts = &everything; });
  bans.shape[0] -= 1;
  expect(CONCLAVE_ERROR_SHAPE, "banned_experts", [&](auto& args) { args.banned_experts = &bans; });
  bans.shape[0] += 1;
  bans.dtype = CONCLAVE_DTYPE_I8;
  expect(CONCLAVE_ERROR_DTYPE, "banned_experts", [&](auto& args) { args.banned_experts = &bans; });
  bans.dtype = CONCLAVE_DTYPE_BOOL;
  bans.data = nullptr;
  expect(CONCLAVE_ERROR_NULL_POINTER, "banned_experts",
         [&](auto& args) { args.banned_experts = &bans; });
  const auto* const crooked =
      reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(&bans) + 1);
  expect(CONCLAVE_ERROR_MISALIGNED, "adapter", [&](auto& args) { args.adapter = crooked; });
}

// A program that was built before there were limits has none, whatever lies behind its struct.
TEST_F(Layers, AnOlderProgram_HasNoLimits) {
  Call call(spec_, kTokens);
  conclave_forward_args args = call.args();
  args.struct_size = offsetof(conclave_forward_args, top_k);
  args.top_k = -5;
  args.expert_budget = -5;
  args.adapter = reinterpret_cast<const int32_t*>(uintptr_t{3});
  args.banned_experts = reinterpret_cast<const conclave_tensor*>(uintptr_t{8});
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  Call expected(spec_, kTokens);
  cpp_layer_.forward(expected.cpp_args());
  expect_same(call, expected);
}

TEST_F(Layers, LimitsOfARouter_HaveTheBitsOfCpp) {
  const Tensor logits = random_tensor(DType::kF32, kTokens, spec_.num_experts, 5);
  Tensor banned(DType::kBool, {spec_.num_experts});
  static_cast<uint8_t*>(banned.view().data)[3] = 1;
  Tensor ids(DType::kI32, {kTokens, spec_.top_k});
  Tensor weights(DType::kF32, {kTokens, spec_.top_k});
  Tensor expected_ids(DType::kI32, {kTokens, spec_.top_k});
  Tensor expected_weights(DType::kF32, {kTokens, spec_.top_k});
  TokenRouter(cpp_context_, spec_)
      .route({.logits = logits.const_view(),
              .top_k = 2,
              .banned_experts = banned.const_view(),
              .expert_budget = 9,
              .topk_ids = expected_ids.view(),
              .topk_weights = expected_weights.view()});
  const auto spec = make<conclave_spec>(&conclave_layer_spec, layer_.get());
  const auto router = make<conclave_router>(&conclave_router_create, context_.get(), spec.get());
  const conclave_tensor given = tensor_of(logits.const_view());
  const conclave_tensor id_view = tensor_of(ids.const_view());
  const conclave_tensor weight_view = tensor_of(weights.const_view());
  const conclave_tensor bans = tensor_of(banned.const_view());
  auto args = sized<conclave_route_args>();
  args.logits = &given;
  args.topk_ids = &id_view;
  args.topk_weights = &weight_view;
  args.top_k = 2;
  args.banned_experts = &bans;
  args.expert_budget = 9;
  ASSERT_EQ(conclave_router_route(router.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_TRUE(same_bits(ids, expected_ids));
  EXPECT_TRUE(same_bits(weights, expected_weights));
  args.top_k = spec_.top_k + 1;
  expect_error(conclave_router_route(router.get(), &args), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "top_k");
  args.top_k = 0;
  args.expert_budget = 1;
  expect_error(conclave_router_route(router.get(), &args), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "expert_budget");
}

}  // namespace
}  // namespace conclave
