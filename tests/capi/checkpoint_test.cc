// Models opened through the C interface: directories and GGUF files.
#include "conclave/checkpoint.h"

#include "capi/handles.h"
#include "capi/spec_json.h"
#include "support/layer_fixture.h"

namespace conclave {
namespace {

using testing::expect_error;
using testing::make;
using testing::make_context;
using testing::open_model;
using testing::sized;
using testing::tensor_of;

TEST(CheckpointC, Info_IsThatOfCpp) {
  const Checkpoint expected = Checkpoint::open(testing::kModel);
  const auto checkpoint = open_model();
  auto info = sized<conclave_checkpoint_info>();
  ASSERT_EQ(conclave_checkpoint_get_info(checkpoint.get(), &info), CONCLAVE_OK);
  EXPECT_EQ(info.num_layers, expected.layers().size());
  EXPECT_EQ(info.num_hidden_layers, expected.num_hidden_layers());
  EXPECT_EQ(info.bytes, expected.total_bytes());
  EXPECT_EQ(info.parameters, expected.total_parameters());
  EXPECT_STREQ(info.model_type, "qwen3_moe");
  EXPECT_STREQ(info.architecture, expected.architecture().c_str());
  for (size_t i = 0; i < info.num_layers; ++i) {
    auto layer = sized<conclave_layer_info>();
    ASSERT_EQ(conclave_checkpoint_get_layer(checkpoint.get(), i, &layer), CONCLAVE_OK);
    EXPECT_EQ(layer.index, expected.layers()[i].index);
    EXPECT_EQ(layer.bytes, expected.layers()[i].bytes);
    EXPECT_STREQ(layer.prefix, expected.layers()[i].prefix.c_str());
    EXPECT_STREQ(layer.layout, expected.layers()[i].layout.c_str());
    EXPECT_STREQ(layer.reason, "");
    const auto spec = make<conclave_spec>(&conclave_checkpoint_spec, checkpoint.get(), layer.index);
    EXPECT_EQ(testing::text_by(&conclave_spec_to_json, spec.get()),
              capi::json_of_spec(expected.layers()[i].spec).dump(2));
  }
  auto layer = sized<conclave_layer_info>();
  expect_error(conclave_checkpoint_get_layer(checkpoint.get(), info.num_layers, &layer),
               CONCLAVE_ERROR_LAYER_NOT_FOUND, "position");
  conclave_spec* spec = nullptr;
  expect_error(conclave_checkpoint_spec(checkpoint.get(), 99, &spec),
               CONCLAVE_ERROR_LAYER_NOT_FOUND, "99");
  conclave_source* source = nullptr;
  expect_error(conclave_checkpoint_source(checkpoint.get(), -1, &source),
               CONCLAVE_ERROR_LAYER_NOT_FOUND, "-1");
}

class Files : public ::testing::TestWithParam<const char*> {};

TEST_P(Files, ASourceOutlivesItsCheckpoint_AndHasTheBitsOfCpp) {
  const Checkpoint expected = Checkpoint::open(GetParam());
  const CheckpointLayer& info = expected.layers()[0];
  const Context context(ContextOptions{.num_threads = 2});
  const Tensor hidden = testing::random_tensor(DType::kBF16, 3, info.spec.hidden_size, 4);
  Tensor out(DType::kF32, {3, info.spec.hidden_size});
  MoeLayer::create(context, info.spec, *expected.layer_source(info.index), {.max_tokens = 8})
      .forward({.hidden = hidden.const_view(), .out = out.view()});

  auto options = sized<conclave_checkpoint_options>();
  options.access = CONCLAVE_FILE_ACCESS_MAP;
  auto checkpoint = make<conclave_checkpoint>(&conclave_checkpoint_open, GetParam(), &options);
  auto source = make<conclave_source>(&conclave_checkpoint_source, checkpoint.get(), info.index);
  const auto spec = make<conclave_spec>(&conclave_checkpoint_spec, checkpoint.get(), info.index);
  checkpoint.reset();
  const auto c_context = make_context();
  auto few = sized<conclave_layer_options>();
  few.max_tokens = 8;
  const auto layer = make<conclave_layer>(&conclave_layer_create, c_context.get(), spec.get(),
                                          source.get(), &few, nullptr);
  source.reset();
  Tensor found(DType::kF32, {3, info.spec.hidden_size});
  const conclave_tensor in = tensor_of(hidden.const_view());
  const conclave_tensor written = tensor_of(found.const_view());
  auto args = sized<conclave_forward_args>();
  args.hidden = &in;
  args.out = &written;
  ASSERT_EQ(conclave_layer_forward(layer.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_TRUE(testing::same_bits(found, out));
}

INSTANTIATE_TEST_SUITE_P(Models, Files,
                         ::testing::Values("testdata/mixtral-tiny",
                                           "testdata/quantised/mixtral-awq-group128",
                                           "testdata/gguf/glm4moe-q4_1/model.gguf",
                                           "testdata/gguf/gpt-oss-mxfp4/model.gguf"),
                         [](const auto& model) { return "_" + std::to_string(model.index); });

TEST(CheckpointC, BadOptions_NameTheField) {
  conclave_checkpoint* out = nullptr;
  const auto expect = [&](const conclave_checkpoint_options& options, const char* names) {
    expect_error(conclave_checkpoint_open(testing::kModel, &options, &out),
                 CONCLAVE_ERROR_INVALID_ARGUMENT, names);
    EXPECT_EQ(out, nullptr);
  };
  auto options = sized<conclave_checkpoint_options>();
  options.access = 3;
  expect(options, "access");
  options = sized<conclave_checkpoint_options>();
  options.experts = -1;
  expect(options, "experts");
  options = sized<conclave_checkpoint_options>();
  options.experts = CONCLAVE_EXPERT_SET_VISION;
  expect(options, "");
  options = sized<conclave_checkpoint_options>();
  options.flags = 4;
  expect(options, "flags");
  options = sized<conclave_checkpoint_options>();
  options.reserved = 1;
  expect(options, "reserved");
}

}  // namespace
}  // namespace conclave
