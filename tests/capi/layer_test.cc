// Layers through the C interface have the bits of C++, and their errors.
#include "capi/handles.h"
#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/token_router.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstring>
#include <map>

namespace conclave {
namespace {

using testing::expect_error;
using testing::Handle;
using testing::kModel;
using testing::make;
using testing::make_context;
using testing::open_model;
using testing::random_tensor;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;
using testing::text_by;

// A layer of the bundled model in both interfaces.
class Layers : public ::testing::Test {
 protected:
  Layers()
      : cpp_checkpoint_(Checkpoint::open(kModel)),
        cpp_source_(cpp_checkpoint_.layer_source(0)),
        spec_(cpp_checkpoint_.layer(0).spec),
        cpp_layer_(MoeLayer::create(cpp_context_, spec_, *cpp_source_, {.max_tokens = 64})),
        context_(make_context()),
        checkpoint_(open_model()) {
    auto options = sized<conclave_layer_options>();
    options.max_tokens = 64;
    layer_ = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context_.get(),
                                  checkpoint_.get(), int64_t{0}, &options, nullptr);
  }

  Context cpp_context_{ContextOptions{.num_threads = 2}};
  Checkpoint cpp_checkpoint_;
  std::unique_ptr<WeightSource> cpp_source_;
  MoeSpec spec_;
  MoeLayer cpp_layer_;
  Handle<conclave_context> context_;
  Handle<conclave_checkpoint> checkpoint_;
  Handle<conclave_layer> layer_;
};

// One call with everything that it may return.
struct Call {
  Call(const MoeSpec& spec, int64_t tokens, DType rows = DType::kBF16)
      : hidden(random_tensor(rows, tokens, spec.hidden_size, 3)),
        out(DType::kF32, {tokens, spec.hidden_size}),
        logits(DType::kF32, {tokens, num_logits(spec)}),
        ids(DType::kI32, {tokens, num_slots(spec)}),
        weights(DType::kF32, {tokens, num_slots(spec)}),
        load(static_cast<size_t>(spec.num_experts)) {
    views = {tensor_of(hidden.const_view()), tensor_of(out.const_view()),
             tensor_of(logits.const_view()), tensor_of(ids.const_view()),
             tensor_of(weights.const_view())};
  }

  conclave_forward_args args() {
    auto args = sized<conclave_forward_args>();
    args.hidden = &views[0];
    args.out = &views[1];
    args.captured_logits = &views[2];
    args.captured_ids = &views[3];
    args.captured_weights = &views[4];
    args.expert_load = load.data();
    args.expert_load_count = load.size();
    return args;
  }
  ForwardArgs cpp_args() {
    return {.hidden = hidden.const_view(),
            .out = out.view(),
            .captured_logits = logits.view(),
            .captured_ids = ids.view(),
            .captured_weights = weights.view(),
            .expert_load = load};
  }

  Tensor hidden, out, logits, ids, weights;
  std::vector<int64_t> load;
  std::vector<conclave_tensor> views;
};

void expect_same(const Call& found, const Call& expected) {
  EXPECT_TRUE(same_bits(found.out, expected.out));
  EXPECT_TRUE(same_bits(found.logits, expected.logits));
  EXPECT_TRUE(same_bits(found.ids, expected.ids));
  EXPECT_TRUE(same_bits(found.weights, expected.weights));
  EXPECT_EQ(found.load, expected.load);
}

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

struct BadTensor {
  const char* name;
  conclave_status status;
  void (*spoil)(conclave_tensor& hidden);
};

TEST_F(Layers, BadTensors_AreNamed_AndNothingIsWritten) {
  const BadTensor cases[] = {
      {"size", CONCLAVE_ERROR_INVALID_ARGUMENT, [](conclave_tensor& t) { t.struct_size = 3; }},
      {"small", CONCLAVE_ERROR_INVALID_ARGUMENT, [](conclave_tensor& t) { t.struct_size = 80; }},
      {"large", CONCLAVE_ERROR_INVALID_ARGUMENT,
       [](conclave_tensor& t) { t.struct_size = size_t{1} << 40; }},
      {"null", CONCLAVE_ERROR_NULL_POINTER, [](conclave_tensor& t) { t.data = nullptr; }},
      {"no type", CONCLAVE_ERROR_DTYPE, [](conclave_tensor& t) { t.dtype = 0; }},
      {"beyond types", CONCLAVE_ERROR_DTYPE, [](conclave_tensor& t) { t.dtype = 1000; }},
      {"ids", CONCLAVE_ERROR_DTYPE, [](conclave_tensor& t) { t.dtype = CONCLAVE_DTYPE_I32; }},
      {"codes", CONCLAVE_ERROR_DTYPE, [](conclave_tensor& t) { t.dtype = CONCLAVE_DTYPE_I4; }},
      {"rank", CONCLAVE_ERROR_SHAPE, [](conclave_tensor& t) { t.rank = 9; }},
      {"negative rank", CONCLAVE_ERROR_SHAPE, [](conclave_tensor& t) { t.rank = -1; }},
      {"one axis", CONCLAVE_ERROR_SHAPE, [](conclave_tensor& t) { t.rank = 1; }},
      {"width", CONCLAVE_ERROR_SHAPE, [](conclave_tensor& t) { t.shape[1] -= 1; }},
      {"negative", CONCLAVE_ERROR_SHAPE, [](conclave_tensor& t) { t.shape[0] = -1; }},
      {"huge", CONCLAVE_ERROR_SIZE_OVERFLOW,
       [](conclave_tensor& t) { t.shape[0] = int64_t{1} << 62; }},
      {"overlapping rows", CONCLAVE_ERROR_STRIDE, [](conclave_tensor& t) { t.row_stride = 3; }},
      {"backwards", CONCLAVE_ERROR_STRIDE, [](conclave_tensor& t) { t.row_stride = -100; }},
      {"strided cube", CONCLAVE_ERROR_STRIDE,
       [](conclave_tensor& t) {
         t.rank = 3;
         t.shape[2] = 1;
         t.row_stride = 200;
       }},
      {"misaligned", CONCLAVE_ERROR_MISALIGNED,
       [](conclave_tensor& t) { t.data = static_cast<char*>(t.data) + 1; }},
  };
  for (const BadTensor& bad : cases) {
    SCOPED_TRACE(bad.name);
    Call call(spec_, 4);
    bad.spoil(call.views[0]);
    const conclave_forward_args args = call.args();
    expect_error(conclave_layer_forward(layer_.get(), &args), bad.status, "hidden");
    for (const int64_t rows : call.load) EXPECT_EQ(rows, 0);
    for (int64_t i = 0; i < 4 * spec_.hidden_size; ++i) ASSERT_EQ(call.out.as<float>()[i], 0.0F);
  }
}

TEST_F(Layers, BadCalls_AreTypedErrors) {
  Call call(spec_, 4);
  conclave_forward_args args = call.args();
  args.hidden = nullptr;
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_NULL_POINTER, "hidden");
  args = call.args();
  args.expert_load_count = 0;
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_SHAPE, "expert_load");
  args.expert_load = nullptr;
  args.expert_load_count = 60;
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_NULL_POINTER,
               "expert_load");
  args = call.args();
  args.num_tokens = reinterpret_cast<const int64_t*>(reinterpret_cast<const char*>(&args) + 1);
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_MISALIGNED,
               "num_tokens");
  const int64_t too_many = 5;
  args.num_tokens = &too_many;
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "num_tokens");
  args = call.args();
  args.captured_weights = &call.views[1];
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_SHAPE,
               "captured_weights");

  // Ids that are no experts, by both policies.
  Tensor ids(DType::kI64, {4, spec_.top_k});
  Tensor weights(DType::kF32, {4, spec_.top_k});
  ids.as<int64_t>()[5] = spec_.num_experts;
  const conclave_tensor id_view = tensor_of(ids.const_view());
  const conclave_tensor weight_view = tensor_of(weights.const_view());
  args = sized<conclave_forward_args>();
  args.hidden = &call.views[0];
  args.out = &call.views[1];
  args.topk_ids = &id_view;
  args.topk_weights = &weight_view;
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_EXPERT_ID, "60");
  auto options = sized<conclave_layer_options>();
  options.id_policy = CONCLAVE_ID_POLICY_SKIP;
  const auto skips = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context_.get(),
                                          checkpoint_.get(), int64_t{0}, &options, nullptr);
  EXPECT_EQ(conclave_layer_forward(skips.get(), &args), CONCLAVE_OK);
  auto stats = sized<conclave_layer_stats>();
  ASSERT_EQ(conclave_layer_get_stats(skips.get(), &stats), CONCLAVE_OK);
  EXPECT_EQ(stats.skipped_ids, 1);
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
}

TEST_F(Layers, BadOptions_NameTheField) {
  struct BadOption {
    const char* names;
    conclave_status status;
    void (*spoil)(conclave_layer_options& options);
  };
  const BadOption cases[] = {
      {"max_tokens", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.max_tokens = -1; }},
      {"id_policy", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.id_policy = 2; }},
      {"transport", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.transport = -1; }},
      {"ep_combine", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.ep_combine = 2; }},
      {"chunk_order", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.chunk_order = 7; }},
      {"determinism", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.determinism = 3; }},
      {"weights", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.weights = 2; }},
      {"reserved", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.reserved = 1; }},
      {"spare_experts", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.spare_experts = -1; }},
      {"cpu.none", CONCLAVE_ERROR_UNKNOWN_NAME, [](auto& o) { o.kernel = "cpu.none"; }},
      {"f33", CONCLAVE_ERROR_UNKNOWN_NAME, [](auto& o) { o.arithmetic = "f33"; }},
      {"no-such-table", CONCLAVE_ERROR_FILE_NOT_FOUND, [](auto& o) { o.tuning = "no-such-table"; }},
      {"struct_size", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.struct_size = 0; }},
  };
  for (const BadOption& bad : cases) {
    SCOPED_TRACE(bad.names);
    auto options = sized<conclave_layer_options>();
    bad.spoil(options);
    conclave_layer* out = nullptr;
    expect_error(conclave_layer_create_from_checkpoint(context_.get(), checkpoint_.get(), 0,
                                                       &options, nullptr, &out),
                 bad.status, bad.names);
    EXPECT_EQ(out, nullptr);
  }
}

TEST_F(Layers, BadSplits_NameTheField) {
  struct BadSplit {
    const char* names;
    void (*spoil)(conclave_parallel& parallel);
  };
  const BadSplit cases[] = {
      {"ep_size", [](auto& p) { p.ep_size = -2; }}, {"ep_rank", [](auto& p) { p.ep_rank = 1; }},
      {"tp_rank", [](auto& p) { p.tp_rank = -1; }}, {"placement", [](auto& p) { p.placement = 3; }},
      {"reduce", [](auto& p) { p.reduce = 9; }},    {"reserved", [](auto& p) { p.reserved = 1; }},
  };
  for (const BadSplit& bad : cases) {
    SCOPED_TRACE(bad.names);
    auto parallel = sized<conclave_parallel>();
    bad.spoil(parallel);
    conclave_layer* out = nullptr;
    expect_error(conclave_layer_create_from_checkpoint(context_.get(), checkpoint_.get(), 0,
                                                       nullptr, &parallel, &out),
                 CONCLAVE_ERROR_INVALID_ARGUMENT, bad.names);
  }
  auto parallel = sized<conclave_parallel>();
  parallel.rank_of_count = 60;
  conclave_layer* out = nullptr;
  expect_error(conclave_layer_create_from_checkpoint(context_.get(), checkpoint_.get(), 0, nullptr,
                                                     &parallel, &out),
               CONCLAVE_ERROR_NULL_POINTER, "rank_of");
  parallel = sized<conclave_parallel>();
  parallel.ep_size = 2;
  expect_error(conclave_layer_create_from_checkpoint(context_.get(), checkpoint_.get(), 0, nullptr,
                                                     &parallel, &out),
               CONCLAVE_ERROR_UNSUPPORTED, "communicator");
}

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
