// Headers and tensors of GGUF models that a feed refuses, by name and without keeping them.
#include "checkpoint/gguf_pushed.h"

#include "conclave/checkpoint.h"
#include "conclave/gguf.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::testing {
namespace {

class GgufFeedRefusal : public ::testing::Test {
 protected:
  // The code, and that the error names the tensor.
  ErrorCode refusal(CheckpointFeed& feed, const std::string& name, const GgufTensorView& tensor) {
    const auto error = error_of([&] { feed.put(name, tensor); });
    EXPECT_TRUE(error) << name << " was taken";
    if (!error) return ErrorCode::kInternal;
    EXPECT_EQ(error->detail().tensor, name) << error->what();
    text_ = error->what();
    return error->code();
  }

  PushedModel model_{"qwen3moe-q4_k_m"};
  const std::string up_ = "blk.0.ffn_up_exps.weight";
  std::string text_;
};

TEST_F(GgufFeedRefusal, TensorsThatNoFileMayHave_AreNamedWithValueAndLimit) {
  for (const bool is_listed : {true, false}) {
    CheckpointFeed feed = is_listed ? model_.feed_with_list() : model_.feed_without_list();
    const GgufTensorView up = model_.tensor(up_).view();
    const auto with = [&](auto member, auto value) {
      GgufTensorView changed = up;
      changed.*member = value;
      return changed;
    };
    const Bytes more(up.bytes.size() + 1);
    EXPECT_EQ(refusal(feed, up_, with(&GgufTensorView::bytes, std::span<const std::byte>(more))),
              ErrorCode::kShape);
    EXPECT_NE(text_.find(std::to_string(more.size())), std::string::npos) << text_;
    EXPECT_NE(text_.find(std::to_string(up.bytes.size())), std::string::npos) << text_;
    EXPECT_EQ(refusal(feed, up_, with(&GgufTensorView::bytes, up.bytes.first(up.bytes.size() - 1))),
              ErrorCode::kShape);
    EXPECT_EQ(refusal(feed, up_, with(&GgufTensorView::bytes, std::span<const std::byte>())),
              ErrorCode::kNullPointer);
    EXPECT_EQ(refusal(feed, up_, with(&GgufTensorView::type, 77U)), ErrorCode::kGgufTensorType);
    EXPECT_NE(text_.find("77"), std::string::npos) << text_;
    EXPECT_EQ(refusal(feed, up_, with(&GgufTensorView::type, 31U)), ErrorCode::kGgufTensorType);
    EXPECT_NE(text_.find("Q4_0_4_4"), std::string::npos) << text_;
    EXPECT_EQ(refusal(feed, up_, with(&GgufTensorView::shape, Shape{4, 128, 255})),
              ErrorCode::kGgufShape);
    EXPECT_NE(text_.find("multiple of 256"), std::string::npos) << text_;
    EXPECT_EQ(refusal(feed, up_, with(&GgufTensorView::shape, Shape{4, 0, 256})),
              ErrorCode::kGgufShape);
    EXPECT_EQ(refusal(feed, up_, with(&GgufTensorView::shape, Shape{1, 1, 4, 128, 256})),
              ErrorCode::kGgufShape);
    EXPECT_EQ(refusal(feed, up_, with(&GgufTensorView::shape, Shape{INT64_MAX / 256, 256, 256})),
              ErrorCode::kGgufSizeOverflow);
    for (const std::string& name : {std::string(), std::string(65, 'n'), std::string("blk.\n")}) {
      const auto error = error_of([&] { feed.put(name, up); });
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kGgufName);
    }
    put_all(feed, model_.tensors);
    expect_layers_of(feed, model_.checkpoint);
  }
}

TEST_F(GgufFeedRefusal, WrongTensorsOfALayer_AreNotKept) {
  const GgufTensorView up = model_.tensor(up_).view();
  const auto whole = up.shape.dims();
  const int64_t experts = whole[0];
  const int64_t inner = whole[1];
  const int64_t hidden = whole[2];
  CheckpointFeed feed = model_.feed_without_list();
  const Bytes zeros(static_cast<size_t>(8 * experts * inner * hidden));
  const auto view = [&](uint32_t type, const Shape& shape) {
    const auto elements = static_cast<uint64_t>(shape.num_elements());
    const auto row = static_cast<uint64_t>(shape[shape.rank() - 1]);
    const uint64_t bytes =
        elements / row * gguf_row_bytes(gguf_type_name(type), static_cast<int64_t>(row));
    return GgufTensorView{.type = type, .shape = shape, .bytes = std::span(zeros).first(bytes)};
  };
  constexpr uint32_t kF32 = 0;
  constexpr uint32_t kI8 = 24;
  constexpr uint32_t kQ8K = 15;
  EXPECT_EQ(refusal(feed, up_, view(kF32, {hidden, inner, experts})), ErrorCode::kTensorShape)
      << "ggml's order";
  EXPECT_EQ(refusal(feed, up_, view(kF32, {experts, inner, 2 * hidden})), ErrorCode::kTensorShape);
  EXPECT_EQ(refusal(feed, up_, view(kF32, {experts - 1, inner, hidden})), ErrorCode::kTensorShape);
  ASSERT_EQ(experts % 2, 0);
  EXPECT_EQ(refusal(feed, up_, view(kF32, {experts / 2, 2 * inner, hidden})),
            ErrorCode::kTensorShape);
  EXPECT_EQ(refusal(feed, up_, view(kI8, {experts, inner, hidden})), ErrorCode::kTensorDType);
  EXPECT_NE(text_.find("I8"), std::string::npos) << text_;
  EXPECT_EQ(refusal(feed, up_, view(kQ8K, {experts, inner, hidden})), ErrorCode::kTensorDType);
  EXPECT_EQ(refusal(feed, "blk.0.ffn_gate_inp.weight", view(kF32, {experts, 2 * hidden})),
            ErrorCode::kTensorShape);
  EXPECT_EQ(refusal(feed, "blk.0.ffn_porj_exps.weight", view(kF32, {experts, inner, hidden})),
            ErrorCode::kTensorUnexpected);

  // A second layout, and a stack that is twice as wide as the one before.
  ASSERT_TRUE(feed.put(up_, up));
  EXPECT_EQ(refusal(feed, up_, up), ErrorCode::kTensorDuplicate);
  EXPECT_EQ(refusal(feed, "blk.0.ffn_down_exps.weight", view(kF32, {experts, hidden, 2 * inner})),
            ErrorCode::kTensorShape);
  EXPECT_EQ(refusal(feed, "blk.0.ffn_gate_exps.weight", view(kF32, {experts, 2 * inner, hidden})),
            ErrorCode::kTensorShape);
  EXPECT_EQ(
      refusal(feed, "blk.0.ffn_gate_up_exps.weight", view(kF32, {experts, 2 * inner, hidden})),
      ErrorCode::kTensorUnexpected);
  EXPECT_NE(text_.find(up_), std::string::npos) << text_;
  EXPECT_EQ(refusal(feed, "blk.0.ffn_up.0.weight", view(kF32, {inner, hidden})),
            ErrorCode::kTensorUnexpected);
  EXPECT_EQ(refusal(feed, "blk.0.ffn_up_exps.bias", view(kF32, {experts, inner + 32})),
            ErrorCode::kTensorShape);
  for (const PushedTensor& tensor : model_.tensors) {
    if (tensor.name != up_) feed.put(tensor.name, tensor.view());
  }
  expect_layers_of(feed, model_.checkpoint);
}

TEST_F(GgufFeedRefusal, TensorsOtherThanTheList_AreNamedWithWhatItSays) {
  CheckpointFeed feed = model_.feed_with_list();
  const GgufTensorView up = model_.tensor(up_).view();
  const Bytes zeros(static_cast<size_t>(up.shape.num_elements()) * 4);
  EXPECT_EQ(refusal(feed, up_, {.type = 0, .shape = up.shape, .bytes = zeros}),
            ErrorCode::kTensorDType);
  EXPECT_NE(text_.find("Q4_K"), std::string::npos) << text_;
  const auto dims = up.shape.dims();
  EXPECT_EQ(refusal(feed, up_,
                    {.type = up.type, .shape = {dims[0] * dims[1], dims[2]}, .bytes = up.bytes}),
            ErrorCode::kTensorShape);
  EXPECT_EQ(refusal(feed, "blk.0.ffn_up_exps.bias",
                    {.type = 0,
                     .shape = {dims[0], dims[1]},
                     .bytes = std::span(zeros).first(static_cast<size_t>(4 * dims[0] * dims[1]))}),
            ErrorCode::kTensorUnexpected);
  EXPECT_FALSE(feed.put("blk.0.attn_q.bias", up)) << "no layer has a use for it";
  EXPECT_FALSE(feed.put("output.weight", up));
}

TEST(GgufFeed, NamesWithoutMeaning_AreNotUsed) {
  const PushedModel model("deepseek2-q5_0");
  for (const bool is_listed : {true, false}) {
    CheckpointFeed feed = is_listed ? model.feed_with_list() : model.feed_without_list();
    const PushedTensor& any = model.tensor("blk.1.ffn_down_exps.weight");
    for (const char* name :
         {"token_embd.weight", "blk.1.attn_q.weight", "blk.01.ffn_up_exps.weight", "blk.",
          "blk.x.ffn_up_exps.weight", "blk.-1.ffn_up_exps.weight", "blk.999.ffn_up_exps.weight",
          "blk.99999999999999999999.ffn_up_exps.weight", "blk.0.ffn_up.weight",
          "model.layers.1.mlp.experts.0.up_proj.weight", "blk.1.ffn_up_exps.input_scale"}) {
      EXPECT_FALSE(feed.put(name, any.view())) << name;
      EXPECT_FALSE(feed.put(name, any.view())) << name << " again";
    }
    EXPECT_TRUE(feed.put(any.name, any.view()));
  }
}

TEST(GgufFeed, ExpertsOfALayerThatAKeyCallsDense_NameTheKey) {
  const PushedModel model("deepseek2-q5_0");
  CheckpointFeed feed = model.feed_without_list();
  const auto error = error_of([&] {
    feed.put("blk.0.ffn_down_exps.weight", model.tensor("blk.1.ffn_down_exps.weight").view());
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kConfigValue) << error->what();
  EXPECT_EQ(error->detail().tensor, "deepseek2.leading_dense_block_count");
  put_all(feed, model.tensors);
  expect_layers_of(feed, model.checkpoint);
}

TEST(GgufFeed, PartOfTheList_IsCheckedAndTheRestComes) {
  const PushedModel model("llama-split");
  ASSERT_EQ(model.files.size(), 3U);
  CheckpointFeed feed = CheckpointFeed::from_gguf(bytes_of_file(model.files.front()));
  put_all(feed, model.tensors);
  expect_layers_of(feed, model.checkpoint);

  const Bytes first = bytes_of_file(model.files[0]);
  const Bytes second = bytes_of_file(model.files[1]);
  const std::vector<std::span<const std::byte>> twice(2, second);
  const auto twins = error_of([&] { CheckpointFeed::from_gguf(first, twice); });
  ASSERT_TRUE(twins);
  EXPECT_EQ(twins->code(), ErrorCode::kGgufDuplicateTensor) << twins->what();
  const Bytes other = bytes_of_file(PushedModel("llama-q4_0").files.front());
  const std::vector<std::span<const std::byte>> strange = {second, other};
  const auto stranger = error_of([&] { CheckpointFeed::from_gguf(first, strange); });
  ASSERT_TRUE(stranger);
  EXPECT_EQ(stranger->code(), ErrorCode::kGgufSplit) << stranger->what();
  EXPECT_EQ(stranger->detail().file, "GGUF header 3");
  const std::vector<std::span<const std::byte>> many(3, second);
  const auto more = error_of([&] { CheckpointFeed::from_gguf(first, many); });
  ASSERT_TRUE(more);
  EXPECT_EQ(more->code(), ErrorCode::kGgufSplit) << more->what();
}

TEST(GgufFeed, SplitModelWithoutSomeOfItsTensors_NamesTheirCount) {
  const PushedModel model("llama-split");
  const Bytes empty = keys_of(model.reader, {GgufKey::of_u32("split.no", 1)});
  const Bytes first = bytes_of_file(model.files[0]);
  const std::vector<std::span<const std::byte>> others = {empty, empty};
  const auto error = error_of([&] { CheckpointFeed::from_gguf(first, others); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kGgufSplit) << error->what();
  EXPECT_EQ(error->detail().tensor, "split.tensors.count");
  EXPECT_EQ(error->detail().expected, std::to_string(model.tensors.size()));
}

// A list that has no data behind it may have any sizes: 128 matrices of 2^57 + 1 rows have, by
// their lower 64 bits, 128 rows.
TEST(GgufFeed, SizesOfAList_AreNotMultipliedBeyondTheirBits) {
  const PushedModel model("qwen3moe-q4_k_m");
  const std::vector<GgufKey> keys = {GgufKey::of_u32("qwen3moe.embedding_length", 1),
                                     GgufKey::of_u32("qwen3moe.expert_count", 128),
                                     GgufKey::of_u32("split.count", 2)};
  constexpr uint64_t kWidth = (uint64_t{1} << 57) + 1;
  CheckpointFeed feed = CheckpointFeed::from_gguf(
      keys_of(model.reader, keys, {{"blk.0.ffn_latent_down.weight", {1, kWidth}}}));
  const Bytes ones(128 * sizeof(float));
  const auto error = error_of([&] {
    feed.put("blk.0.ffn_down_exps.weight", {.type = 0, .shape = {128, 1, 1}, .bytes = ones});
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorShape) << error->what();
  EXPECT_NE(error->detail().expected.find("144115188075855873"), std::string::npos)
      << error->what();
}

TEST(GgufFeed, Headers_AreRefusedAsFilesAre) {
  const PushedModel model("qwen3moe-q4_k_m");
  const auto code_of = [](const Bytes& header) {
    const auto error = error_of([&] { CheckpointFeed::from_gguf(header); });
    if (!error) return ErrorCode::kInternal;
    EXPECT_EQ(error->detail().file, "GGUF header") << error->what();
    return error->code();
  };
  const Bytes keys = keys_of(model.reader);
  EXPECT_EQ(code_of({}), ErrorCode::kGgufTruncatedHeader);
  EXPECT_EQ(code_of(Bytes(64)), ErrorCode::kGgufMagic);
  Bytes cut = bytes_of_file(model.files.front());
  const GgufReader& reader = model.reader;
  cut.resize(200);
  EXPECT_NE(code_of(cut), ErrorCode::kInternal);
  EXPECT_EQ(code_of(keys_of(reader, {GgufKey::of_text("general.architecture", "bert")})),
            ErrorCode::kUnknownArchitecture);
  EXPECT_EQ(code_of(keys_of(reader, {GgufKey::of_u32("qwen3moe.expert_count", 0)})),
            ErrorCode::kConfigValue);
  EXPECT_EQ(code_of(keys_of(reader, {GgufKey::of_u32("qwen3moe.block_count", 5000)})),
            ErrorCode::kConfigValue);
  EXPECT_EQ(code_of(keys_of(reader, {GgufKey::of_text("split.count", "two")})),
            ErrorCode::kGgufSplit);
  // A list of tensors that are not the model's.
  Bytes other = bytes_of_file(model.files.front());
  const std::string_view name = "blk.0.ffn_up_exps.weight";
  const auto at =
      std::search(other.begin(), other.end(), name.begin(), name.end(),
                  [](std::byte one, char c) { return std::to_integer<char>(one) == c; });
  ASSERT_NE(at, other.end());
  *(at + 4) = std::byte{'9'};
  EXPECT_EQ(code_of(other), ErrorCode::kTensorMissing);
}

TEST(GgufFeed, TensorsOfTheOtherContainer_AreRefusedByName) {
  const TinyModel directory = make_tiny_model({});
  CheckpointFeed feed = CheckpointFeed::from_config(directory.config.dump());
  const Bytes zeros(64);
  const auto error = error_of(
      [&] { feed.put("blk.0.ffn_up_exps.weight", {.type = 0, .shape = {16}, .bytes = zeros}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error->detail().tensor, "blk.0.ffn_up_exps.weight");
}

}  // namespace
}  // namespace conclave::testing
