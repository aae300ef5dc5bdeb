// Reads MoE layers beyond num_hidden_layers, in both forms of names.
#include "checkpoint/model_config.h"
#include "checkpoint/tiny_model.h"
#include "io/json.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

using nlohmann::json;

constexpr int64_t kExtra = 3;  // the first layer beyond those of a tiny model
constexpr CheckpointOptions kAsked = {.extra_layers = true};

// Copies layer 2 under another name, with other weights.
void add_layer(TinyModel& model, const std::string& trunk, const std::string& start) {
  const std::string from = trunk + "layers.2.";
  const std::vector<TinyTensor> tensors = model.tensors;
  for (const TinyTensor& tensor : tensors) {
    if (!tensor.name.starts_with(from)) continue;
    TinyTensor copy = tensor;
    copy.name.replace(0, from.size(), start);
    for (std::byte& byte : copy.bytes) byte = ~byte;
    model.tensors.push_back(std::move(copy));
  }
}

struct Form {
  const char* family;
  const char* trunk;
  const char* start;
};
constexpr std::array<Form, 4> kForms = {{
    {"qwen2_moe", "model.", "mtp.layers.0."},
    {"qwen2_moe", "model.language_model.", "mtp.layers.0."},
    {"qwen3_moe", "model.", "model.layers.3."},
    {"mixtral", "", "layers.3."},
}};

TinyModel model_with_extra(const Form& form) {
  TinyModel model = make_tiny_model({.family = form.family, .trunk = form.trunk});
  add_layer(model, form.trunk, form.start);
  return model;
}

std::string notes_of(const Checkpoint& checkpoint) {
  std::string notes;
  for (const std::string& note : checkpoint.notes()) notes += note + "\n";
  return notes;
}

std::vector<int64_t> indexes(const Checkpoint& checkpoint) {
  std::vector<int64_t> numbers;
  for (const CheckpointLayer& layer : checkpoint.layers()) numbers.push_back(layer.index);
  return numbers;
}

TEST(ExtraLayers, Asked_AreListedWithTheirOwnWeights) {
  for (const Form& form : kForms) {
    TinyModel model = model_with_extra(form);
    const TempDir directory;
    write_sharded(model, directory.path(), 2);
    const Checkpoint checkpoint = Checkpoint::open(directory.path(), kAsked);
    std::vector<int64_t> expected = model.moe_layers;
    expected.push_back(kExtra);
    EXPECT_EQ(indexes(checkpoint), expected) << form.start;
    EXPECT_EQ(checkpoint.num_hidden_layers(), 3);
    const CheckpointLayer& extra = checkpoint.layer(kExtra);
    EXPECT_TRUE(extra.prefix.starts_with(form.start)) << extra.prefix;
    EXPECT_TRUE(extra.support) << extra.support.reason();
    EXPECT_EQ(extra.bytes, checkpoint.layer(2).bytes);
    EXPECT_EQ(notes_of(checkpoint), "");

    const auto own = checkpoint.layer_source(kExtra);
    const auto other = checkpoint.layer_source(2);
    for (const WeightId role : {weights::kRouter, weights::kGate, weights::kDown}) {
      std::vector<std::byte> bytes = read_matrix(*other, role, 0);
      for (std::byte& byte : bytes) byte = ~byte;
      EXPECT_EQ(read_matrix(*own, role, 0), bytes) << form.start << to_string(role);
    }
  }
}

TEST(ExtraLayers, NotAsked_AreNoted) {
  for (const Form& form : kForms) {
    const TinyModel model = model_with_extra(form);
    const TempDir directory;
    write_single(model, directory.path());
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    EXPECT_EQ(indexes(checkpoint), model.moe_layers);
    EXPECT_NE(notes_of(checkpoint).find("are not read"), std::string::npos) << form.start;
    const auto error = error_of([&] { checkpoint.layer(kExtra); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kLayerNotFound) << error->what();
  }
}

TEST(ExtraLayers, AskedButAbsent_AreNoted) {
  TinyModel model = make_tiny_model({});
  model.config["num_nextn_predict_layers"] = 1;
  model.add("model.layers.3.mlp.gate_proj.weight", DType::kBF16, {9, 10});
  model.add("mtp.layers.0.input_layernorm.weight", DType::kBF16, {10});
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path(), kAsked);
  EXPECT_EQ(indexes(checkpoint), model.moe_layers);
  EXPECT_NE(notes_of(checkpoint).find("no MoE layers beyond num_hidden_layers = 3"),
            std::string::npos)
      << notes_of(checkpoint);
}

TEST(ExtraLayers, DenseOnesBetween_ArePassedOver) {
  TinyModel model = make_tiny_model({});
  model.add("mtp.layers.0.mlp.gate_proj.weight", DType::kBF16, {9, 10});
  add_layer(model, "model.", "mtp.layers.1.");
  model.add("mtp.fc.weight", DType::kBF16, {10, 20});
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path(), kAsked);
  EXPECT_EQ(indexes(checkpoint), (std::vector<int64_t>{0, 2, 4}));
  EXPECT_EQ(checkpoint.layer(4).prefix, "mtp.layers.1.mlp.");
  EXPECT_NE(notes_of(checkpoint).find("1 tensors of a multi-token-prediction head"),
            std::string::npos)
      << notes_of(checkpoint);
}

TEST(ExtraLayers, Damaged_IsAnErrorThatNamesTheTensor) {
  for (const Form& form : kForms) {
    TinyModel model = model_with_extra(form);
    const auto damaged = [&](const TinyTensor& tensor) {
      return tensor.name.starts_with(form.start) && tensor.name.find(".4.") != std::string::npos;
    };
    const auto found = std::find_if(model.tensors.begin(), model.tensors.end(), damaged);
    ASSERT_NE(found, model.tensors.end());
    const std::string name = found->name;

    found->shape.front() += 1;
    found->bytes.resize(found->bytes.size() + static_cast<size_t>(2 * found->shape.back()));
    const TempDir misshapen;
    write_single(model, misshapen.path());
    auto error = error_of([&] { Checkpoint::open(misshapen.path(), kAsked); });
    ASSERT_TRUE(error) << name;
    EXPECT_EQ(error->code(), ErrorCode::kTensorShape) << error->what();
    EXPECT_EQ(error->detail().tensor, name);
    EXPECT_FALSE(open_error(misshapen.path())) << "not asked";

    model.drop(name);
    const TempDir incomplete;
    write_single(model, incomplete.path());
    error = error_of([&] { Checkpoint::open(incomplete.path(), kAsked); });
    ASSERT_TRUE(error) << name;
    EXPECT_EQ(error->code(), ErrorCode::kTensorMissing) << error->what();
    EXPECT_EQ(error->detail().tensor, name);

    model.add(std::string(form.start) + "mlp.experts.4.mystery", DType::kBF16, {1});
    const TempDir strange;
    write_single(model, strange.path());
    EXPECT_TRUE(error_of([&] { Checkpoint::open(strange.path(), kAsked); }));
  }
}

TEST(ExtraLayers, BothFormsForOneLayer_AreRejected) {
  TinyModel model = make_tiny_model({});
  add_layer(model, "model.", "mtp.layers.0.");
  add_layer(model, "model.", "model.layers.3.");
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = error_of([&] { Checkpoint::open(directory.path(), kAsked); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorDuplicate) << error->what();
}

TEST(ExtraLayers, HugeNumbers_AreNotRead) {
  for (const char* start : {"mtp.layers.64.", "model.layers.67.", "model.layers.4000000000.",
                            "mtp.layers.99999999999999999999."}) {
    TinyModel model = make_tiny_model({});
    add_layer(model, "model.", start);
    const TempDir directory;
    write_single(model, directory.path());
    const Checkpoint checkpoint = Checkpoint::open(directory.path(), kAsked);
    EXPECT_EQ(indexes(checkpoint), model.moe_layers) << start;
    EXPECT_NE(notes_of(checkpoint).find("are not read"), std::string::npos) << start;
  }
}

TEST(ExtraLayers, Quantised_AreSurveyed) {
  TinyModel model = model_with_extra(kForms[0]);
  model.config["quantization_config"] = {{"quant_method", "aqlm"}};
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path(), kAsked);
  EXPECT_EQ(checkpoint.layer(kExtra).prefix, "mtp.layers.0.mlp.");
  EXPECT_FALSE(checkpoint.layer(kExtra).support);
}

// The lists of Step 3.5 are longer than its layers; past their end the last value counts.
TEST(ExtraLayers, ListsByLayer_GoOnWithTheirLastValue) {
  const json config = {{"model_type", "step3p5"},
                       {"hidden_size", 8},
                       {"moe_intermediate_size", 8},
                       {"share_expert_dim", 8},
                       {"num_hidden_layers", 2},
                       {"moe_num_experts", 4},
                       {"moe_top_k", 2},
                       {"moe_layers_enum", "1"},
                       {"swiglu_limits", {0, 5, 6, 7}},
                       {"swiglu_limits_shared", {0, 9}}};
  const io::JsonDocument document =
      io::JsonDocument::parse(config.dump(), "config.json", io::kConfigLimits);
  checkpoint::ModelConfig model = checkpoint::read_model_config(document.root());
  const std::array<int64_t, 3> extra = {2, 3, 4};
  checkpoint::add_extra_layers(document.root(), extra, model);
  ASSERT_EQ(model.layers.size(), 4U);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(model.layers[i].index, static_cast<int64_t>(i + 1));
    EXPECT_EQ(model.layers[i].spec.activation.limit, std::min(5.0 + static_cast<double>(i), 7.0));
    EXPECT_EQ(model.layers[i].spec.shared.activation.limit, 9.0);
  }
}

}  // namespace
}  // namespace conclave::testing
