// Calls and options of layers that are wrong: each is a typed error that names what.
#include "capi/layers.h"

namespace conclave {
namespace {

using testing::Call;
using testing::expect_error;
using testing::Layers;
using testing::make;
using testing::sized;
using testing::tensor_of;

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
      {"ep_combine", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& o) { o.ep_combine = 3; }},
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

}  // namespace
}  // namespace conclave
