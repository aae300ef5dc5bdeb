// Tensors pushed in any order give the same layers as a checkpoint of these tensors.
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

ConstTensorView view_of(const TinyTensor& tensor) {
  return {.data = tensor.bytes.data(), .dtype = tensor.dtype, .shape = Shape(tensor.shape)};
}

CheckpointFeed feed_of(const TinyModel& model) {
  return CheckpointFeed::from_config(model.config.dump());
}

void put_all(CheckpointFeed& feed, const TinyModel& model, FeedMemory memory = FeedMemory::kCopy) {
  for (const TinyTensor& tensor : model.tensors) feed.put(tensor.name, view_of(tensor), memory);
}

class FeedOfFamily : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Families, FeedOfFamily, ::testing::ValuesIn(kFamilies));

TEST_P(FeedOfFamily, ShuffledTensors_GiveWhatTheCheckpointGives) {
  for (Layout layout : {Layout::kPerExpert, Layout::kStacked, Layout::kStackedTransposed}) {
    for (FeedMemory memory : {FeedMemory::kCopy, FeedMemory::kKeep}) {
      TinyModel model = make_tiny_model({.family = GetParam(), .layout = layout});
      std::mt19937 random(7);
      std::shuffle(model.tensors.begin(), model.tensors.end(), random);
      CheckpointFeed feed = feed_of(model);
      put_all(feed, model, memory);
      EXPECT_TRUE(feed.missing().empty());

      const TempDir directory;
      write_single(model, directory.path());
      const Checkpoint checkpoint = Checkpoint::open(directory.path());
      ASSERT_EQ(feed.layers().size(), checkpoint.layers().size());
      for (const CheckpointLayer& layer : checkpoint.layers()) {
        EXPECT_EQ(feed.layer(layer.index).layout, layer.layout);
        EXPECT_EQ(feed.layer(layer.index).prefix, layer.prefix);
        EXPECT_EQ(feed.layer(layer.index).bytes, layer.bytes);
        const auto pushed = feed.layer_source(layer.index);
        const auto read = checkpoint.layer_source(layer.index);
        for (const WeightId role : weights::kAll) {
          ASSERT_EQ(pushed->describe(role).count, read->describe(role).count) << to_string(role);
          for (int64_t expert = 0; expert < read->describe(role).count; ++expert) {
            EXPECT_EQ(read_matrix(*pushed, role, expert), read_matrix(*read, role, expert));
          }
        }
      }
    }
  }
}

TEST(Feed, OtherTensors_AreNotTaken) {
  const TinyModel model = make_tiny_model({});
  CheckpointFeed feed = feed_of(model);
  for (const TinyTensor& tensor : model.tensors) {
    const bool moe = tensor.name.find(".experts.") != std::string::npos ||
                     tensor.name.find("mlp.gate.weight") != std::string::npos;
    EXPECT_EQ(feed.put(tensor.name, view_of(tensor)), moe) << tensor.name;
  }
}

TEST(Feed, SameNameTwice_IsRejectedAndTheFirstStays) {
  const TinyModel model = make_tiny_model({});
  CheckpointFeed feed = feed_of(model);
  put_all(feed, model);
  TinyTensor again = model.tensors.back();
  for (const TinyTensor& tensor : model.tensors) {
    if (tensor.name.find(".experts.") == std::string::npos) continue;
    const auto error = error_of([&] { feed.put(tensor.name, view_of(tensor)); });
    ASSERT_TRUE(error) << tensor.name;
    EXPECT_EQ(error->code(), ErrorCode::kTensorDuplicate);
    EXPECT_EQ(error->detail().tensor, tensor.name);
  }
  EXPECT_TRUE(feed.missing().empty());
}

TEST(Feed, TwoLayouts_AreDuplicates) {
  const TinyModel model = make_tiny_model({});
  const TinyModel stacked = make_tiny_model({.layout = Layout::kStacked});
  CheckpointFeed feed = feed_of(model);
  put_all(feed, model);
  for (const TinyTensor& tensor : stacked.tensors) {
    if (tensor.name.find(".experts.") != std::string::npos) feed.put(tensor.name, view_of(tensor));
  }
  const auto error = error_of([&] { feed.layer_source(0); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorDuplicate) << error->what();
}

TEST(Feed, WrongTensors_AreRejectedAtOnceAndNotKept) {
  const TinyModel model = make_tiny_model({});
  CheckpointFeed feed = feed_of(model);
  const std::vector<std::byte> bytes(4096);
  const auto code_of = [&](const char* name, Shape shape) {
    const auto error = error_of(
        [&] { feed.put(name, {.data = bytes.data(), .dtype = DType::kBF16, .shape = shape}); });
    return error ? error->code() : ErrorCode::kInternal;
  };
  EXPECT_EQ(code_of("model.layers.0.mlp.experts.1.up_proj.weight", {10, 6}),
            ErrorCode::kTensorShape);
  EXPECT_EQ(code_of("model.layers.0.mlp.experts.5.up_proj.weight", {6, 10}),
            ErrorCode::kTensorUnexpected);
  EXPECT_EQ(code_of("model.layers.0.mlp.experts.1.up_porj.weight", {6, 10}),
            ErrorCode::kTensorUnexpected);
  EXPECT_EQ(code_of("model.layers.0.mlp.gate.weight", {6, 10}), ErrorCode::kTensorShape);
  const auto null = error_of([&] {
    feed.put("model.layers.0.mlp.gate.weight", {.dtype = DType::kBF16, .shape = {5, 10}});
  });
  ASSERT_TRUE(null);
  EXPECT_EQ(null->code(), ErrorCode::kNullPointer);
  put_all(feed, model);
  EXPECT_TRUE(feed.missing().empty());
}

// The rules are those of the header of a file, also for tensors that no layer has a use for.
TEST(Feed, NamesThatNoFileMayHave_AreRejectedAndShownEscaped) {
  const TinyModel model = make_tiny_model({});
  CheckpointFeed feed = feed_of(model);
  const std::vector<std::byte> bytes(120);
  const auto put = [&](std::string_view name) {
    const auto error = error_of([&] {
      feed.put(name, {.data = bytes.data(), .dtype = DType::kBF16, .shape = {6, 10}});
    });
    EXPECT_TRUE(error);
    return error ? error->code() : ErrorCode::kInternal;
  };
  using std::string_view_literals::operator""sv;
  for (const std::string_view ending : {"\n"sv, "\0"sv, "\x1b[2J"sv, "\x7f"sv}) {
    for (const std::string_view start : {"model.layers.0.mlp.experts.1.up_proj.weight"sv,
                                         "model.layers.0.mlp.experts.1.up"sv, "lm_head"sv, ""sv}) {
      EXPECT_EQ(put(std::string(start).append(ending)), ErrorCode::kSafetensorsName);
    }
  }
  EXPECT_EQ(put("model.layers.0.mlp.experts.1.\xff.weight"), ErrorCode::kSafetensorsUtf8);
  EXPECT_EQ(put(std::string(4097, 'n')), ErrorCode::kSafetensorsName);
  const auto error = error_of([&] { feed.put("lm_\x1b[2J\n", ConstTensorView{}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->detail().tensor, R"("lm_\x1b[2J\x0a")");
  put_all(feed, model);
  EXPECT_TRUE(feed.missing().empty());
}

TEST(Feed, Incomplete_NamesWhatIsMissing) {
  const TinyModel model = make_tiny_model({});
  CheckpointFeed feed = feed_of(model);
  const std::string absent = "model.layers.2.mlp.experts.3.down_proj.weight";
  for (const TinyTensor& tensor : model.tensors) {
    if (tensor.name != absent) feed.put(tensor.name, view_of(tensor));
  }
  EXPECT_EQ(feed.missing(), std::vector<std::string>{absent + " [10, 6]"});
  EXPECT_TRUE(feed.is_complete(0));
  EXPECT_FALSE(feed.is_complete(2));
  EXPECT_NO_THROW(feed.layer_source(0));
  const auto error = error_of([&] { feed.layer_source(2); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorMissing);
  EXPECT_EQ(error->detail().tensor, absent);
  const auto dense = error_of([&] { feed.layer_source(1); });
  ASSERT_TRUE(dense);
  EXPECT_EQ(dense->code(), ErrorCode::kLayerNotFound);
  EXPECT_EQ(feed_of(model).missing(3).size(), 3U);
}

TEST(Feed, StridedRows_AreCopiedDense) {
  const TinyModel model = make_tiny_model({});
  CheckpointFeed feed = feed_of(model);
  const std::string name = "model.layers.0.mlp.gate.weight";
  for (const TinyTensor& tensor : model.tensors) {
    if (tensor.name != name) feed.put(tensor.name, view_of(tensor));
  }
  std::vector<uint16_t> wide(5 * 12);
  std::vector<uint16_t> dense;
  for (size_t i = 0; i < wide.size(); ++i) {
    wide[i] = static_cast<uint16_t>(i);
    if (i % 12 < 10) dense.push_back(wide[i]);
  }
  const ConstTensorView view{
      .data = wide.data(), .dtype = DType::kBF16, .shape = {5, 10}, .row_stride = 12};
  const auto kept = error_of([&] { feed.put(name, view, FeedMemory::kKeep); });
  ASSERT_TRUE(kept);
  EXPECT_EQ(kept->code(), ErrorCode::kStride);
  feed.put(name, view);
  const auto read = read_matrix(*feed.layer_source(0), weights::kRouter, 0);
  EXPECT_EQ(std::memcmp(read.data(), dense.data(), read.size()), 0);
}

TEST(Feed, ReleasedLayer_CanBePutAgain) {
  const TinyModel model = make_tiny_model({});
  CheckpointFeed feed = feed_of(model);
  put_all(feed, model);
  feed.release(2);
  EXPECT_TRUE(feed.is_complete(0));
  EXPECT_FALSE(feed.is_complete(2));
  for (const TinyTensor& tensor : model.tensors) {
    if (tensor.name.find("layers.2.mlp.") != std::string::npos) {
      EXPECT_TRUE(feed.put(tensor.name, view_of(tensor)));
    }
  }
  EXPECT_TRUE(feed.is_complete(2));
}

TEST(Feed, FromSpec_UsesTheNamesOfTheFamily) {
  const TinyModel model = make_tiny_model({});
  MoeSpec spec;
  spec.num_experts = 5;
  spec.top_k = 2;
  spec.hidden_size = 10;
  spec.intermediate_size = 6;
  const std::vector<int64_t> layers = {2, 0};
  CheckpointFeed feed = CheckpointFeed::from_spec(spec, "qwen3_moe", layers);
  EXPECT_TRUE(
      std::equal(feed.layers().begin(), feed.layers().end(), std::vector<int64_t>{0, 2}.begin()));
  put_all(feed, model);
  EXPECT_TRUE(feed.missing().empty());
  const auto unknown = error_of([&] { CheckpointFeed::from_spec(spec, "qwen3_mo", layers); });
  ASSERT_TRUE(unknown);
  EXPECT_EQ(unknown->code(), ErrorCode::kUnknownArchitecture);
  EXPECT_NE(unknown->detail().hint.find("qwen3_moe"), std::string::npos) << unknown->what();
  const std::vector<int64_t> beyond = {5000};
  EXPECT_TRUE(error_of([&] { CheckpointFeed::from_spec(spec, "qwen3_moe", beyond); }));
}

TEST(Feed, UnreadQuantisation_IsRefused) {
  TinyModel model = make_tiny_model({});
  model.config["quantization_config"] = {{"quant_method", "aqlm"}};
  const auto error = error_of([&] { feed_of(model); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kUnsupportedQuantization);
}

// The spec that a layer would have without its quantisation, and without a gate of its own.
MoeSpec plain_spec_of(const MoeSpec& spec) {
  MoeSpec plain = spec;
  plain.weight_dtype = DType::kBF16;
  plain.quant = {};
  plain.has_gate = false;
  return plain;
}

TEST(Feed, FromSpecAndMethod_GivesWhatTheConfigurationGives) {
  const std::filesystem::path folder = "testdata/quantised/qwen3_moe-gptq-int4-order";
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const MoeSpec& expected = checkpoint.layer(0).spec;
  const SafetensorsFile file = SafetensorsFile::open(folder / "model.safetensors");
  std::ifstream config(folder / "config.json");
  const std::string method = nlohmann::json::parse(config)["quantization_config"].dump();
  const std::vector<int64_t> layers = {0};
  CheckpointFeed feed =
      CheckpointFeed::from_spec(plain_spec_of(expected), "qwen3_moe", layers, method);
  for (const TensorInfo& tensor : file.tensors()) {
    if (tensor.name.find(".experts.") == std::string::npos) continue;
    EXPECT_FALSE(feed.is_complete(0)) << tensor.name;
    const Tensor values = file.load(tensor.name);
    EXPECT_TRUE(feed.put(tensor.name, values.view()));
  }
  ASSERT_TRUE(feed.is_complete(0)) << feed.missing().front();
  const MoeSpec found = feed.layer(0).spec;
  EXPECT_EQ(found.weight_dtype, expected.weight_dtype);
  EXPECT_EQ(found.quant.block_cols, expected.quant.block_cols);
  EXPECT_EQ(found.quant.has_column_order, expected.quant.has_column_order);
  EXPECT_FALSE(found.has_gate);
  const Context context({.num_threads = 1});
  EXPECT_NO_THROW(static_cast<void>(MoeLayer::create(context, found, *feed.layer_source(0))));
}

TEST(Feed, FromSpecAndMethod_FollowsRulesForModules) {
  const std::vector<int64_t> layers = {0};
  MoeSpec spec;
  spec.num_experts = 1;
  spec.top_k = 1;
  spec.hidden_size = 64;
  spec.intermediate_size = 32;
  spec.has_gate = false;
  const std::string method =
      R"({"quant_method": "gptq", "bits": 8, "group_size": 16, "sym": true,
          "dynamic": {"-:.*layers.7": {}, ".*layers.9": {"bits": 4, "group_size": 32}}})";
  const auto feed_of = [&](const std::string& module) {
    const std::vector<std::string> modules = {module};
    return CheckpointFeed::from_spec(spec, "qwen3_moe", layers, method, modules);
  };
  CheckpointFeed feed = feed_of("model.layers.9.mlp.experts.0.up_proj");
  const std::vector<int32_t> words(64 * 32 / 8);
  const auto put = [&](const std::string& name, Shape shape) {
    const ConstTensorView view{.data = words.data(), .dtype = DType::kI32, .shape = shape};
    return feed.put("model.layers.0.mlp.experts.0." + name, view);
  };
  EXPECT_TRUE(put("up_proj.qweight", {8, 32}));
  const auto other = error_of([&] { put("down_proj.qweight", {8, 64}); });
  ASSERT_TRUE(other);
  EXPECT_EQ(other->code(), ErrorCode::kTensorShape);
  const auto left = error_of([&] { feed_of("model.layers.7.mlp.experts.0.up_proj"); });
  ASSERT_TRUE(left);
  EXPECT_EQ(left->code(), ErrorCode::kUnsupportedQuantization);
  EXPECT_EQ(left->detail().found, "model.layers.7.mlp.experts.0.up_proj");
}

TEST(Feed, MethodThatIsNotRead_IsRefused) {
  const std::vector<int64_t> layers = {0};
  MoeSpec spec;
  spec.num_experts = 5;
  spec.top_k = 2;
  spec.hidden_size = 10;
  spec.intermediate_size = 6;
  const auto refusal = [&](const MoeSpec& of, const std::string& method) {
    return error_of([&] { CheckpointFeed::from_spec(of, "qwen3_moe", layers, method); });
  };
  const auto unread = refusal(spec, R"({"quant_method": "aqlm"})");
  ASSERT_TRUE(unread);
  EXPECT_EQ(unread->code(), ErrorCode::kUnsupportedQuantization);
  EXPECT_EQ(unread->detail().found, "aqlm");
  MoeSpec codes = spec;
  codes.weight_dtype = DType::kF8E4M3;
  codes.quant.weights = WeightScale::kTensor;
  const auto twice = refusal(codes, R"({"quant_method": "fp8"})");
  ASSERT_TRUE(twice);
  EXPECT_EQ(twice->code(), ErrorCode::kUnsupportedQuantization);
  EXPECT_TRUE(refusal(spec, "{"));
}

}  // namespace
}  // namespace conclave::testing
