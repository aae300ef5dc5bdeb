// Shapes that a hostile or careless file may give its tensors: no elements, an axis too many or too
// few, more than the matrix.
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;

ConstTensorView view_of(const TinyTensor& tensor) {
  return {.data = tensor.bytes.data(), .dtype = tensor.dtype, .shape = Shape(tensor.shape)};
}

// A bundled model with its tensors in memory.
TinyModel read_model(const fs::path& directory) {
  TinyModel model;
  std::ifstream file(directory / "config.json");
  model.config = nlohmann::json::parse(file);
  const SafetensorsFile weights = SafetensorsFile::open(directory / "model.safetensors");
  for (const TensorInfo& info : weights.tensors()) {
    const Tensor tensor = weights.load(info.name);
    TinyTensor& copy = model.add(info.name, info.dtype, info.shape);
    std::memcpy(copy.bytes.data(), tensor.as<std::byte>(), copy.bytes.size());
  }
  return model;
}

void reshape(TinyModel& model, const std::string& name, std::vector<int64_t> shape) {
  const DType dtype = model.at(name).dtype;
  model.drop(name);
  model.add(name, dtype, std::move(shape));
}

// The error for the same model, opened from a file and pushed as tensors.
struct Refusals {
  std::optional<Error> opened;
  std::optional<Error> fed;
};
Refusals refusals_of(const TinyModel& model) {
  const TempDir directory;
  write_single(model, directory.path());
  Refusals refusals{.opened = open_error(directory.path()), .fed = std::nullopt};
  refusals.fed = error_of([&] {
    CheckpointFeed feed = CheckpointFeed::from_config(model.config.dump());
    for (const TinyTensor& tensor : model.tensors) feed.put(tensor.name, view_of(tensor));
    for (const int64_t layer : feed.layers()) static_cast<void>(feed.layer(layer));
  });
  return refusals;
}

void expect_shape_error(const TinyModel& model, const std::string& name,
                        const std::string& expected, const std::string& found) {
  const Refusals refusals = refusals_of(model);
  for (const auto& error : {refusals.opened, refusals.fed}) {
    ASSERT_TRUE(error) << name << " " << found;
    EXPECT_EQ(error->code(), ErrorCode::kTensorShape) << error->what();
    EXPECT_EQ(error->detail().tensor, name);
    EXPECT_EQ(error->detail().expected, expected);
    EXPECT_EQ(error->detail().found, found);
  }
}

void expect_taken(const TinyModel& model) {
  const Refusals refusals = refusals_of(model);
  EXPECT_FALSE(refusals.opened) << refusals.opened->what();
  EXPECT_FALSE(refusals.fed) << refusals.fed->what();
}

TEST(EmptyTensors, OfEveryFamily_CountAsAbsent) {
  int families = 0;
  for (const auto& entry : fs::directory_iterator("testdata/models")) {
    if (!entry.is_directory()) continue;
    SCOPED_TRACE(entry.path().filename().string());
    TinyModel model = read_model(entry.path());
    const Checkpoint plain = Checkpoint::open(entry.path());
    for (const CheckpointLayer& layer : plain.layers()) {
      model.add(layer.prefix + "left_out.down_proj.weight", DType::kBF16, {72, 0});
      model.add(layer.prefix + "left_out.up_proj.weight", DType::kBF16, {0, 72});
    }
    const TempDir directory;
    write_single(model, directory.path());
    const auto error = open_error(directory.path());
    ASSERT_FALSE(error) << error->what();
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    ASSERT_EQ(checkpoint.layers().size(), plain.layers().size());
    for (size_t i = 0; i < plain.layers().size(); ++i) {
      EXPECT_EQ(checkpoint.layers()[i].parameters.total, plain.layers()[i].parameters.total);
      EXPECT_EQ(checkpoint.layers()[i].bytes, plain.layers()[i].bytes);
    }
    ++families;
  }
  EXPECT_GT(families, 60);
}

// transformers saves a model with `n_shared_experts` 0 in this way.
TEST(EmptyTensors, NoSharedExperts_LoadPushAndVerify) {
  TinyModel model = read_model("testdata/models/deepseek_v3");
  model.config["n_shared_experts"] = 0;
  const int64_t hidden = model.config["hidden_size"].get<int64_t>();
  for (TinyTensor& tensor : model.tensors) {
    if (tensor.name.find("shared_experts.") == std::string::npos) continue;
    const bool down = tensor.name.find("down_proj") != std::string::npos;
    tensor.shape = down ? std::vector<int64_t>{hidden, 0} : std::vector<int64_t>{0, hidden};
    tensor.bytes.clear();
  }
  expect_taken(model);
  const TempDir directory;
  write_single(model, directory.path());
  Checkpoint::write_manifest(directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path(), {.verify_manifest = true});
  ASSERT_FALSE(checkpoint.layers().empty());
  const CheckpointLayer& layer = checkpoint.layers().front();
  EXPECT_TRUE(layer.support) << layer.support.reason();
  EXPECT_EQ(layer.spec.shared.mode, SharedMode::kNone);
  const auto source = checkpoint.layer_source(layer.index);
  EXPECT_EQ(source->describe(weights::kSharedDown).count, 0);
  EXPECT_NO_THROW(read_matrix(*source, weights::kDown, 0));
}

// The gate of the sum exists, but there is nothing that it could weigh.
TEST(EmptyTensors, SharedExpertOfWidthZero_NeedsNoGate) {
  TinyModel model = make_tiny_model({.family = "qwen2_moe"});
  model.config["shared_expert_intermediate_size"] = 0;
  for (const int64_t layer : model.moe_layers) {
    const std::string start = "model.layers." + std::to_string(layer) + ".mlp.shared_expert.";
    reshape(model, start + "gate_proj.weight", {0, 10});
    reshape(model, start + "up_proj.weight", {0, 10});
    reshape(model, start + "down_proj.weight", {10, 0});
  }
  expect_taken(model);
  // A shared expert that config.json does not mention is still a fault.
  reshape(model, "model.layers.0.mlp.shared_expert.up_proj.weight", {4, 10});
  const Refusals refusals = refusals_of(model);
  for (const auto& error : {refusals.opened, refusals.fed}) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kTensorUnexpected) << error->what();
  }
}

TEST(EmptyTensors, ForMatricesOfSomeSize_AreRefused) {
  const std::string start = "model.layers.0.mlp.";
  const struct {
    const char* name;
    std::vector<int64_t> shape;
    const char* expected;
    const char* found;
  } cases[] = {{"experts.2.down_proj.weight", {10, 0}, "[10, 6]", "[10, 0]"},
               {"experts.2.up_proj.weight", {0, 10}, "[6, 10]", "[0, 10]"},
               {"gate.weight", {0, 10}, "[5, 10]", "[0, 10]"},
               {"gate.weight", {0}, "[5, 10]", "[0]"}};
  for (const auto& c : cases) {
    TinyModel model = make_tiny_model({});
    reshape(model, start + c.name, c.shape);
    expect_shape_error(model, start + c.name, c.expected, c.found);
  }
}

TEST(TensorAxes, OneTooManyOrMerged_AreRefused) {
  TinyModel model = make_tiny_model({});
  reshape(model, "model.layers.0.mlp.experts.1.up_proj.weight", {1, 6, 10});
  expect_shape_error(model, "model.layers.0.mlp.experts.1.up_proj.weight", "[6, 10]", "[1, 6, 10]");
  TinyModel router = make_tiny_model({});
  reshape(router, "model.layers.0.mlp.gate.weight", {1, 5, 10});
  expect_shape_error(router, "model.layers.0.mlp.gate.weight", "[5, 10]", "[1, 5, 10]");
  TinyModel flat = make_tiny_model({.layout = Layout::kStacked});
  reshape(flat, "model.layers.0.mlp.experts.down_proj", {50, 6});
  expect_shape_error(flat, "model.layers.0.mlp.experts.down_proj", "[5, 10, 6] or [5, 6, 10]",
                     "[50, 6]");
}

// DBRX is only released with its experts' axis merged with the rows.
TEST(TensorAxes, FamilyThatMergesThem_TakesNoOthers) {
  TinyModel model = read_model("testdata/models/dbrx");
  expect_taken(model);
  const std::string name = "transformer.blocks.0.ffn.experts.mlp.w1";
  const std::vector<int64_t> merged = model.at(name).shape;
  const int64_t experts = model.config["ffn_config"]["moe_num_experts"].get<int64_t>();
  const std::string wanted =
      "[" + std::to_string(merged[0]) + ", " + std::to_string(merged[1]) + "]";
  const Shape apart{experts, merged[0] / experts, merged[1]};
  reshape(model, name, {apart[0], apart[1], apart[2]});
  expect_shape_error(model, name, wanted, apart.to_string());
}

TEST(TensorSizes, LargerThanTheMatrix_AreRefused) {
  const std::string start = "model.layers.0.mlp.";
  const struct {
    Layout layout;
    const char* name;
    std::vector<int64_t> shape;
    const char* expected;
    const char* found;
  } cases[] = {
      {Layout::kPerExpert, "experts.1.up_proj.weight", {12, 10}, "[6, 10]", "[12, 10]"},
      {Layout::kPerExpert, "experts.1.down_proj.weight", {10, 12}, "[10, 6]", "[10, 12]"},
      {Layout::kPerExpert, "gate.weight", {6, 10}, "[5, 10]", "[6, 10]"},
      {Layout::kStacked,
       "experts.gate_up_proj",
       {6, 12, 10},
       "[5, 12, 10] or [5, 10, 12]",
       "[6, 12, 10]"},
      {Layout::kStacked,
       "experts.gate_up_proj",
       {5, 24, 10},
       "[5, 12, 10] or [5, 10, 12]",
       "[5, 24, 10]"},
  };
  for (const auto& c : cases) {
    TinyModel model = make_tiny_model({.layout = c.layout});
    reshape(model, start + c.name, c.shape);
    expect_shape_error(model, start + c.name, c.expected, c.found);
  }
}

}  // namespace
}  // namespace conclave::testing
