// Routing on its own through the C interface.
#include "capi/layers.h"

#include "conclave/token_router.h"

#include <cstdint>
#include <vector>

namespace conclave {
namespace {

using testing::expect_error;
using testing::Layers;
using testing::make;
using testing::random_tensor;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;

TEST_F(Layers, Router_HasTheBitsOfCpp) {
  constexpr int64_t kTokens = 11;
  const Tensor logits = random_tensor(DType::kF32, kTokens, spec_.num_experts, 5);
  Tensor ids(DType::kI32, {kTokens, spec_.top_k});
  Tensor weights(DType::kF32, {kTokens, spec_.top_k});
  Tensor expected_ids(DType::kI32, {kTokens, spec_.top_k});
  Tensor expected_weights(DType::kF32, {kTokens, spec_.top_k});
  TokenRouter(cpp_context_, spec_)
      .route({.logits = logits.const_view(),
              .topk_ids = expected_ids.view(),
              .topk_weights = expected_weights.view()});
  const auto spec = make<conclave_spec>(&conclave_layer_spec, layer_.get());
  const auto router = make<conclave_router>(&conclave_router_create, context_.get(), spec.get());
  const conclave_tensor given = tensor_of(logits.const_view());
  const conclave_tensor id_view = tensor_of(ids.const_view());
  const conclave_tensor weight_view = tensor_of(weights.const_view());
  auto args = sized<conclave_route_args>();
  args.logits = &given;
  args.topk_ids = &id_view;
  args.topk_weights = &weight_view;
  ASSERT_EQ(conclave_router_route(router.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_TRUE(same_bits(ids, expected_ids));
  EXPECT_TRUE(same_bits(weights, expected_weights));
  args.topk_ids = &weight_view;
  expect_error(conclave_router_route(router.get(), &args), CONCLAVE_ERROR_DTYPE, "topk_ids");
  args.topk_ids = nullptr;
  expect_error(conclave_router_route(router.get(), &args), CONCLAVE_ERROR_NULL_POINTER, "topk_ids");
}

// Rows of one token are written while those of others are read.
TEST_F(Layers, RouterThatWouldWriteWhatItReads_IsRefused_AndWritesNothing) {
  const auto spec =
      make<conclave_spec>(&conclave_spec_from_json, R"({"num_experts": 8, "top_k": 2})");
  const auto router = make<conclave_router>(&conclave_router_create, context_.get(), spec.get());
  Tensor logits = random_tensor(DType::kF32, 3, 8, 5);
  const Tensor before = random_tensor(DType::kF32, 3, 8, 5);
  std::vector<int32_t> ids(6, 77);
  std::vector<float> weights(6);
  const conclave_tensor given = tensor_of(logits.const_view());
  const conclave_tensor id_view = tensor_of({ids.data(), DType::kI32, {3, 2}});
  const conclave_tensor weight_view = tensor_of({weights.data(), DType::kF32, {3, 2}});
  auto args = sized<conclave_route_args>();
  args.logits = &given;
  args.topk_ids = &id_view;
  args.topk_weights = &weight_view;
  ASSERT_EQ(conclave_router_route(router.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();

  ids.assign(6, 77);
  const conclave_tensor over_ids = tensor_of({ids.data() + 5, DType::kF32, {3, 2}});
  const conclave_tensor over_logits = tensor_of({logits.as<float>() + 23, DType::kF32, {3, 2}});
  const conclave_tensor behind = tensor_of({logits.as<float>() + 24, DType::kF32, {0, 2}});
  for (const conclave_tensor* const overlapping : {&over_ids, &over_logits}) {
    args.topk_weights = overlapping;
    expect_error(conclave_router_route(router.get(), &args), CONCLAVE_ERROR_OVERLAP, "overlaps");
  }
  args.topk_weights = &weight_view;
  const conclave_tensor ids_over_logits = tensor_of({logits.as<float>(), DType::kI32, {3, 2}});
  args.topk_ids = &ids_over_logits;
  expect_error(conclave_router_route(router.get(), &args), CONCLAVE_ERROR_OVERLAP, "topk_ids");
  EXPECT_EQ(ids, std::vector<int32_t>(6, 77));
  EXPECT_TRUE(same_bits(logits, before));
  // No rows share no bytes, wherever they lie.
  const conclave_tensor no_ids = tensor_of({ids.data(), DType::kI32, {0, 2}});
  const conclave_tensor no_logits = tensor_of({ids.data(), DType::kF32, {0, 8}});
  args.logits = &no_logits;
  args.topk_ids = &no_ids;
  args.topk_weights = &behind;
  EXPECT_EQ(conclave_router_route(router.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
}

// Routing needs no sizes of matrices, and its callers need the numbers of columns.
TEST(Specs, OfRoutingAlone_SayTheirColumns) {
  const auto spec = make<conclave_spec>(
      &conclave_spec_from_json,
      R"({"num_experts": 8, "top_k": 3, "num_zero_experts": 2, "router": {"name": "any"}})");
  auto info = sized<conclave_spec_info>();
  ASSERT_EQ(conclave_spec_get_info(spec.get(), &info), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_EQ(info.num_logits, 10);
  EXPECT_EQ(info.num_slots, 3);
  EXPECT_EQ(info.parameters, 0);
}

TEST_F(Layers, RouterWithATableOfItsOwn) {
  const auto spec = make<conclave_spec>(
      &conclave_spec_from_json,
      R"({"num_experts": 8, "top_k": 2, "router": {"name": "hash", "vocab_size": 3}})");
  const auto router = make<conclave_router>(&conclave_router_create, context_.get(), spec.get());
  const std::vector<int32_t> table = {0, 1, 2, 3, 7, 5};
  const std::vector<int64_t> tokens = {2, 0};
  const Tensor logits = random_tensor(DType::kF32, 2, 8, 5);
  Tensor ids(DType::kI32, {2, 2});
  Tensor weights(DType::kF32, {2, 2});
  const conclave_tensor logit_view = tensor_of(logits.const_view());
  const conclave_tensor table_view = tensor_of({table.data(), DType::kI32, {3, 2}});
  const conclave_tensor token_view = tensor_of({tokens.data(), DType::kI64, {2}});
  const conclave_tensor id_view = tensor_of(ids.const_view());
  const conclave_tensor weight_view = tensor_of(weights.const_view());
  const conclave_named_tensor own = {.name = "hash_table", .tensor = &table_view};
  auto args = sized<conclave_route_args>();
  args.logits = &logit_view;
  args.token_ids = &token_view;
  args.topk_ids = &id_view;
  args.topk_weights = &weight_view;
  args.tensors = &own;
  args.num_tensors = 1;
  ASSERT_EQ(conclave_router_route(router.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_EQ(ids.as<int32_t>()[0], 7);
  EXPECT_EQ(ids.as<int32_t>()[3], 1);
  args.num_tensors = 0;
  expect_error(conclave_router_route(router.get(), &args), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "hash_table");
}

}  // namespace
}  // namespace conclave
