// Layers through the C interface have the bits of C++.
#include "capi/layers.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstring>
#include <limits>

namespace conclave {
namespace {

using testing::Call;
using testing::expect_error;
using testing::expect_same;
using testing::Layers;
using testing::make;
using testing::open_model;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;
using testing::text_by;

TEST_F(Layers, Forward_HasTheBitsOfCpp) {
  for (const int64_t tokens : {0, 1, 7, 64, 130}) {
    SCOPED_TRACE(tokens);
    Call expected(spec_, tokens);
    Call found(spec_, tokens);
    cpp_layer_.forward(expected.cpp_args());
    const conclave_forward_args args = found.args();
    ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK)
        << conclave_last_error_message();
    expect_same(found, expected);
  }
}

TEST_F(Layers, Forward_OfAnOlderProgram_Runs) {
  Call found(spec_, 5);
  Call expected(spec_, 5);
  conclave_forward_args args = found.args();
  args.struct_size = offsetof(conclave_forward_args, router_logits);
  args.captured_ids = reinterpret_cast<const conclave_tensor*>(uintptr_t{16});  // not there yet
  conclave_tensor hidden = found.views[0];
  hidden.struct_size = offsetof(conclave_tensor, row_stride);
  hidden.row_stride = -5;
  args.hidden = &hidden;
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  cpp_layer_.forward({.hidden = expected.hidden.const_view(), .out = expected.out.view()});
  EXPECT_TRUE(same_bits(found.out, expected.out));
}

TEST_F(Layers, GivenRouting_AndRowsThatAreApart) {
  constexpr int64_t kTokens = 6;
  Call by_gate(spec_, kTokens);
  cpp_layer_.forward(by_gate.cpp_args());

  // Rows of hidden with seven elements between them, and ids and weights as chosen before.
  const int64_t stride = spec_.hidden_size + 7;
  Tensor wide(DType::kBF16, {kTokens, stride});
  for (int64_t row = 0; row < kTokens; ++row) {
    std::memcpy(wide.as<uint16_t>() + row * stride,
                by_gate.hidden.as<uint16_t>() + row * spec_.hidden_size,
                static_cast<size_t>(spec_.hidden_size) * 2);
  }
  Tensor out(DType::kF32, {kTokens, spec_.hidden_size});
  conclave_tensor hidden = tensor_of(wide.const_view());
  hidden.shape[1] = spec_.hidden_size;
  hidden.row_stride = stride;
  const conclave_tensor written = tensor_of(out.const_view());
  const conclave_tensor ids = tensor_of(by_gate.ids.const_view());
  const conclave_tensor weights = tensor_of(by_gate.weights.const_view());
  auto args = sized<conclave_forward_args>();
  args.hidden = &hidden;
  args.out = &written;
  args.topk_ids = &ids;
  args.topk_weights = &weights;
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_TRUE(same_bits(out, by_gate.out));

  // A layer that is given logits chooses the same.
  const conclave_tensor logits = tensor_of(by_gate.logits.const_view());
  args.topk_ids = nullptr;
  args.topk_weights = nullptr;
  args.router_logits = &logits;
  std::memset(out.as<std::byte>(), 0, out.size_bytes());
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
  EXPECT_TRUE(same_bits(out, by_gate.out));
}

TEST_F(Layers, CountersTimingsAndWorkspace) {
  size_t bytes = 0;
  size_t few = 0;
  ASSERT_EQ(conclave_layer_workspace_bytes(layer_.get(), -1, &bytes), CONCLAVE_OK);
  ASSERT_EQ(conclave_layer_workspace_bytes(layer_.get(), 1, &few), CONCLAVE_OK);
  EXPECT_EQ(bytes, cpp_layer_.workspace_bytes());
  EXPECT_EQ(few, cpp_layer_.workspace_bytes(1));
  expect_error(conclave_layer_workspace_bytes(layer_.get(), -2, &few),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "tokens");
  const auto workspace = make<conclave_workspace>(&conclave_workspace_create, context_.get(), bytes,
                                                  static_cast<void*>(nullptr));
  Call call(spec_, 9);
  conclave_forward_args args = call.args();
  args.workspace = workspace.get();
  auto timings = sized<conclave_timings>();
  timings.total_ns = 5;
  args.timings = &timings;
  const int64_t counted = 4;
  args.num_tokens = &counted;
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_GT(timings.total_ns, 5);
  int64_t load = 0;
  for (const int64_t rows : call.load) load += rows;
  EXPECT_EQ(load, counted * spec_.top_k);

  auto stats = sized<conclave_layer_stats>();
  ASSERT_EQ(conclave_layer_get_stats(layer_.get(), &stats), CONCLAVE_OK);
  EXPECT_EQ(stats.forwards, 1);
  EXPECT_EQ(stats.max_tokens, 64);
  EXPECT_EQ(stats.num_local_experts, spec_.num_experts);
  EXPECT_EQ(stats.packed_bytes, cpp_layer_.plan().packed_bytes);
  EXPECT_EQ(stats.workspace_bytes, bytes);

  // Memory of the caller, too small and then large enough.
  Tensor memory(DType::kU8, {static_cast<int64_t>(bytes)});
  const auto small =
      make<conclave_workspace>(&conclave_workspace_borrow, context_.get(), memory.as<void>(),
                               size_t{64}, static_cast<void*>(nullptr));
  args.workspace = small.get();
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_WORKSPACE_TOO_SMALL, "");
  const auto borrowed =
      make<conclave_workspace>(&conclave_workspace_borrow, context_.get(), memory.as<void>(), bytes,
                               static_cast<void*>(nullptr));
  args.workspace = borrowed.get();
  EXPECT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
}

// Every stage takes time, that of shared experts too; it is added to what was there.
TEST_F(Layers, TimesOfEveryStage_AreAdded) {
  const auto checkpoint = testing::open_model("testdata/qwen2-moe-tiny");
  const auto with_shared =
      make<conclave_layer>(&conclave_layer_create_from_checkpoint, context_.get(), checkpoint.get(),
                           int64_t{0}, nullptr, nullptr);
  const auto spec = make<conclave_spec>(&conclave_layer_spec, with_shared.get());
  auto info = sized<conclave_spec_info>();
  ASSERT_EQ(conclave_spec_get_info(spec.get(), &info), CONCLAVE_OK);
  const Tensor hidden = testing::random_tensor(DType::kBF16, 9, info.hidden_size, 3);
  Tensor out(DType::kF32, hidden.shape());
  const conclave_tensor in = testing::tensor_of(hidden.const_view());
  const conclave_tensor written = testing::tensor_of(out.const_view());
  constexpr int64_t kBefore = int64_t{1} << 50;
  auto timings = sized<conclave_timings>();
  int64_t conclave_timings::*const stages[] = {
      &conclave_timings::route_ns,  &conclave_timings::dispatch_ns, &conclave_timings::experts_ns,
      &conclave_timings::shared_ns, &conclave_timings::combine_ns,  &conclave_timings::total_ns};
  for (int64_t conclave_timings::*const stage : stages) timings.*stage = kBefore;
  auto args = sized<conclave_forward_args>();
  args.hidden = &in;
  args.out = &written;
  args.timings = &timings;
  ASSERT_EQ(conclave_layer_forward(with_shared.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  for (size_t i = 0; i < std::size(stages); ++i) EXPECT_GT(timings.*stages[i], kBefore) << i;
}

TEST_F(Layers, PlansOfLayersAndOfSpecs) {
  EXPECT_EQ(text_by(&conclave_layer_explain, layer_.get()), explain(cpp_layer_.plan()));
  const auto json = nlohmann::json::parse(text_by(&conclave_layer_plan_json, layer_.get()));
  EXPECT_EQ(json["packed_bytes"], cpp_layer_.plan().packed_bytes);
  EXPECT_EQ(json["rows"].size(), cpp_layer_.plan().rows.size());
  EXPECT_EQ(json["stages"].size(), cpp_layer_.plan().stages.size());

  const auto spec = make<conclave_spec>(&conclave_layer_spec, layer_.get());
  auto options = sized<conclave_layer_options>();
  options.kernel = "cpu.reference";
  const std::string text =
      text_by(&conclave_plan_explain, context_.get(), spec.get(), &options, nullptr, nullptr);
  EXPECT_EQ(text, explain(make_plan(cpp_context_, spec_, {.kernel = "cpu.reference"})));
  const auto plan = nlohmann::json::parse(
      text_by(&conclave_plan_json, context_.get(), spec.get(), &options, nullptr, nullptr));
  EXPECT_EQ(plan["device"], "cpu");
}

TEST_F(Layers, WithMaxTokens_SharesWeightsAndCounters) {
  const auto larger =
      make<conclave_layer>(&conclave_layer_with_max_tokens, layer_.get(), int64_t{512});
  layer_.reset();  // the weights live as long as the last layer
  Call expected(spec_, 130);
  Call found(spec_, 130);
  cpp_layer_.forward(expected.cpp_args());
  const conclave_forward_args args = found.args();
  ASSERT_EQ(conclave_layer_forward(larger.get(), &args), CONCLAVE_OK);
  expect_same(found, expected);
}

TEST_F(Layers, HandlesMayBeEndedInAnyOrder) {
  checkpoint_.reset();
  context_.reset();
  Call call(spec_, 3);
  const conclave_forward_args args = call.args();
  EXPECT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
}

TEST_F(Layers, Reload_FromAnotherLayer_AndBack) {
  Call expected(spec_, 8);
  const auto other = cpp_checkpoint_.layer_source(1);
  cpp_layer_.reload(*other, ReloadMode::kStaged);
  cpp_layer_.forward(expected.cpp_args());
  for (const conclave_reload_mode mode :
       {CONCLAVE_RELOAD_MODE_STAGED, CONCLAVE_RELOAD_MODE_IN_PLACE}) {
    Call found(spec_, 8);
    const conclave_forward_args args = found.args();
    ASSERT_EQ(conclave_layer_reload_from_checkpoint(layer_.get(), checkpoint_.get(), 0, mode),
              CONCLAVE_OK);
    ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
    EXPECT_FALSE(same_bits(found.out, expected.out));
    const auto source =
        make<conclave_source>(&conclave_checkpoint_source, checkpoint_.get(), int64_t{1});
    ASSERT_EQ(conclave_layer_reload(layer_.get(), source.get(), mode), CONCLAVE_OK);
    ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
    EXPECT_TRUE(same_bits(found.out, expected.out));
  }
}

TEST_F(Layers, Reload_OfAnotherShape_KeepsTheWeights) {
  const auto other = open_model("testdata/mixtral-tiny");
  expect_error(conclave_layer_reload_from_checkpoint(layer_.get(), other.get(), 0,
                                                     CONCLAVE_RELOAD_MODE_STAGED),
               CONCLAVE_ERROR_TENSOR_SHAPE, "");
  Call expected(spec_, 8);
  Call found(spec_, 8);
  cpp_layer_.forward(expected.cpp_args());
  const conclave_forward_args args = found.args();
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
  expect_same(found, expected);
}

TEST_F(Layers, ATokenWithNan_IsTheOnlyOneWithoutNumbers) {
  Call call(spec_, 3, DType::kF32);
  call.hidden.as<float>()[spec_.hidden_size + 2] = std::numeric_limits<float>::quiet_NaN();
  const conclave_forward_args args = call.args();
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
  for (int64_t token = 0; token < 3; ++token) {
    EXPECT_EQ(std::isfinite(call.out.as<float>()[token * spec_.hidden_size]), token != 1);
  }
  auto stats = sized<conclave_layer_stats>();
  ASSERT_EQ(conclave_layer_get_stats(layer_.get(), &stats), CONCLAVE_OK);
  EXPECT_EQ(stats.tokens_without_finite_logit, 1);
  EXPECT_EQ(stats.gate_rows_with_nan, 0);
}

}  // namespace
}  // namespace conclave
