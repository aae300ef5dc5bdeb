// Quantised checkpoints: what configurations mean, which scales belong to which matrix, and that
// each scale that is missing, left over or of another shape is named.

#include "checkpoint/quantization.h"
#include "checkpoint/scale_names.h"
#include "tiny_model.h"

#include "conclave/context.h"
#include "conclave/layer.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

using checkpoint::Quantization;
using nlohmann::json;

Quantization read(const json& config) {
  const io::JsonDocument document =
      io::JsonDocument::parse(config.dump(), "config.json", io::kConfigLimits);
  return checkpoint::read_quantization(document.root());
}

json fp8() {
  return {{"quant_method", "fp8"},
          {"activation_scheme", "dynamic"},
          {"weight_block_size", json::array({4, 128})}};
}

json compressed(const json& weights, const json& activations) {
  return {
      {"quant_method", "compressed-tensors"},
      {"format", "float-quantized"},
      {"config_groups", {{"group_0", {{"weights", weights}, {"input_activations", activations}}}}}};
}
json e4m3(const std::string& strategy) {
  return {{"num_bits", 8}, {"type", "float"}, {"symmetric", true}, {"strategy", strategy}};
}
json dynamic(json scheme) {
  scheme["dynamic"] = true;
  return scheme;
}

void expect_spec(const Quantization& found, const QuantSpec& wanted) {
  ASSERT_TRUE(found.weights) << found.method << ": " << found.reason;
  EXPECT_EQ(found.weights->spec.weights, wanted.weights);
  EXPECT_EQ(found.weights->spec.activations, wanted.activations);
  EXPECT_EQ(found.weights->spec.block_rows, wanted.block_rows);
  EXPECT_EQ(found.weights->spec.block_cols, wanted.block_cols);
  EXPECT_EQ(found.weights->spec.power_of_two_scales, wanted.power_of_two_scales);
}

TEST(QuantizationConfig, Fp8) {
  expect_spec(
      read(fp8()),
      {.weights = WeightScale::kBlock, .block_rows = 4, .activations = ActivationScale::kGroup});
  json ue8m0 = fp8();
  ue8m0["scale_fmt"] = "ue8m0";
  EXPECT_TRUE(read(ue8m0).weights->spec.power_of_two_scales);
  expect_spec(read({{"quant_method", "fp8"}, {"weight_block_size", nullptr}}),
              {.weights = WeightScale::kTensor, .activations = ActivationScale::kToken});
  expect_spec(read({{"quant_method", "fp8"}, {"activation_scheme", "static"}}),
              {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic});
}

TEST(QuantizationConfig, CompressedTensors) {
  expect_spec(read(compressed(e4m3("channel"), dynamic(e4m3("token")))),
              {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken});
  expect_spec(read(compressed(e4m3("tensor"), e4m3("tensor"))),
              {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic});
  expect_spec(read(compressed(e4m3("tensor"), dynamic(e4m3("tensor")))),
              {.weights = WeightScale::kTensor, .activations = ActivationScale::kToken});
  expect_spec(read(compressed(e4m3("channel"), nullptr)), {.weights = WeightScale::kChannel});
  json block = e4m3("block");
  json group = dynamic(e4m3("group"));
  group["group_size"] = 128;
  for (const json& sizes : {json::array({64, 128}), json("64x128")}) {
    block["block_structure"] = sizes;
    expect_spec(
        read(compressed(block, group)),
        {.weights = WeightScale::kBlock, .block_rows = 64, .activations = ActivationScale::kGroup});
  }
}

TEST(QuantizationConfig, ModelOpt) {
  expect_spec(read({{"quant_method", "modelopt"}, {"quant_algo", "FP8"}}),
              {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic});
  expect_spec(read({{"quant_method", "modelopt"},
                    {"quantization", {{"quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"}}}}),
              {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken});
  expect_spec(read({{"quant_method", "modelopt"}, {"quant_algo", "FP8_PB_WO"}}),
              {.weights = WeightScale::kBlock});
}

TEST(QuantizationConfig, WhatIsNotRead_HasAReason) {
  const auto reason = [](const json& config) {
    const Quantization found = read(config);
    EXPECT_FALSE(found.weights);
    EXPECT_FALSE(found.method.empty());
    return found.reason;
  };
  EXPECT_EQ(reason({{"quant_method", "unheard_of"}}), "");
  json other = fp8();
  other["fmt"] = "e5m2";
  EXPECT_NE(reason(other).find("e5m2"), std::string::npos);
  other = fp8();
  other["weight_block_size"] = {128, 64};
  const QuantSpec narrow = read(other).weights->spec;
  EXPECT_EQ(narrow.activations, ActivationScale::kGroup);
  EXPECT_EQ(narrow.activation_group, 64);
  json three_bits = e4m3("channel");
  three_bits["num_bits"] = 3;
  EXPECT_NE(reason(compressed(three_bits, nullptr)).find("3 bits"), std::string::npos);
  json group = e4m3("group");
  group["group_size"] = 64;
  group["actorder"] = "dynamic";
  EXPECT_NE(reason(compressed(group, nullptr)).find("actorder"), std::string::npos);
  EXPECT_NE(reason(compressed(e4m3("tensor"), e4m3("token"))).find("static"), std::string::npos);
  json packed = compressed(e4m3("channel"), nullptr);
  packed["format"] = "pack-quantized";
  EXPECT_NE(reason(packed).find("pack-quantized"), std::string::npos);
  json two = compressed(e4m3("channel"), nullptr);
  two["config_groups"]["group_1"] = {{"weights", e4m3("tensor")}};
  EXPECT_NE(reason(two).find("differ"), std::string::npos);
  EXPECT_NE(reason({{"quant_method", "modelopt"}, {"quant_algo", "W4A8_LUT"}}).find("W4A8_LUT"),
            std::string::npos);
}

TEST(QuantizationConfig, BadValues_NameTheKey) {
  const auto code = [](const json& config) {
    const auto error = error_of([&] { static_cast<void>(read(config)); });
    return error ? error->code() : ErrorCode{0};
  };
  json config = fp8();
  config["weight_block_size"] = {128, 0};
  EXPECT_EQ(code(config), ErrorCode::kConfigValue);
  config["weight_block_size"] = {128, 128, 128};
  EXPECT_EQ(code(config), ErrorCode::kConfigValue);
  config["weight_block_size"] = "128";
  EXPECT_EQ(code(config), ErrorCode::kJsonType);
  config = fp8();
  config["activation_scheme"] = "sometimes";
  EXPECT_EQ(code(config), ErrorCode::kConfigValue);
  json block = e4m3("block");
  for (const char* sizes : {"128", "128x", "x128", "0x128", "128x128x1"}) {
    block["block_structure"] = sizes;
    EXPECT_EQ(code(compressed(block, nullptr)), ErrorCode::kConfigValue) << sizes;
  }
  EXPECT_EQ(code(compressed(e4m3("block"), nullptr)), ErrorCode::kConfigMissingKey);
}

TEST(ScaleNames, EachSuffix_LeadsToItsMatrix) {
  const auto leads = [](const std::string& name, const std::string& matrix, WeightPlane plane) {
    for (const checkpoint::ScaleName& found : checkpoint::scale_names(name)) {
      if (found.matrix == matrix && found.plane == plane) return true;
    }
    return false;
  };
  EXPECT_TRUE(leads("w1.weight_scale_inv", "w1.weight", WeightPlane::kScale));
  EXPECT_TRUE(leads("w1.weight_scale", "w1.weight", WeightPlane::kScale));
  EXPECT_TRUE(leads("w1.scale", "w1.weight", WeightPlane::kScale));
  EXPECT_TRUE(leads("w1.input_scale", "w1.weight", WeightPlane::kInputScale));
  EXPECT_TRUE(leads("w1.activation_scale", "w1.weight", WeightPlane::kInputScale));
  EXPECT_TRUE(leads("experts.down_proj_scale_inv", "experts.down_proj", WeightPlane::kScale));
  EXPECT_TRUE(
      leads("experts.down_proj_activation_scale", "experts.down_proj", WeightPlane::kInputScale));
  EXPECT_TRUE(checkpoint::scale_names("w1.weight").empty());
  EXPECT_TRUE(checkpoint::scale_names("_scale").empty());
}

bool is_expert(const TinyTensor& tensor) {
  return tensor.name.find(".experts.") != std::string::npos;
}

// Fills the tensor with the bytes of `value`.
template <class T>
void fill(TinyTensor& tensor, T value) {
  for (size_t at = 0; at + sizeof(value) <= tensor.bytes.size(); at += sizeof(value)) {
    std::memcpy(tensor.bytes.data() + at, &value, sizeof(value));
  }
}

std::vector<int64_t> block_scale_shape(const std::vector<int64_t>& shape) {
  std::vector<int64_t> scales = shape;
  scales[shape.size() - 2] = (shape[shape.size() - 2] + 3) / 4;
  scales[shape.size() - 1] = 1;
  return scales;
}

// Codes replace every expert's matrix, with one scale for 4 rows and all columns.
TinyModel quantised_model(const TinyOptions& options = {},
                          const std::string& suffix = "_scale_inv") {
  TinyModel model = make_tiny_model(options);
  model.config["quantization_config"] = fp8();
  const std::vector<TinyTensor> tensors = model.tensors;
  for (const TinyTensor& tensor : tensors) {
    if (!is_expert(tensor)) continue;
    TinyTensor& codes = model.at(tensor.name);
    codes.dtype = DType::kF8E4M3;
    codes.bytes.resize(codes.bytes.size() / 2);
    for (std::byte& code : codes.bytes) code &= std::byte{0xbf};  // below 2, no NaN
    fill(model.add(tensor.name + suffix, DType::kF32, block_scale_shape(tensor.shape)), 0.5F);
  }
  return model;
}

constexpr const char* kExpert = "model.layers.0.mlp.experts.2.up_proj.weight";

Checkpoint open(const TinyModel& model, const TempDir& directory) {
  write_single(model, directory.path());
  return Checkpoint::open(directory.path());
}

void expect_open_error(const TinyModel& model, ErrorCode code, const std::string& tensor) {
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error) << tensor;
  EXPECT_EQ(error->code(), code) << error->what();
  EXPECT_EQ(error->detail().tensor, tensor) << error->what();
}

TEST(QuantisedCheckpoint, EveryFamily_OpensAndRuns) {
  for (const std::string& family : kFamilies) {
    for (const char* suffix : {"_scale_inv", "_scale"}) {
      SCOPED_TRACE(family + suffix);
      const TempDir directory;
      const Checkpoint checkpoint = open(quantised_model({.family = family}, suffix), directory);
      const CheckpointLayer& layer = checkpoint.layers().front();
      ASSERT_TRUE(layer.support) << layer.support.reason();
      EXPECT_EQ(layer.spec.weight_dtype, DType::kF8E4M3);
      const auto source = checkpoint.layer_source(layer.index);
      EXPECT_EQ(source->describe(weights::kUp.with(WeightPlane::kScale)).rows, 2);
      EXPECT_EQ(source->describe(weights::kDown.with(WeightPlane::kScale)).rows, 3);
      const Context context({.num_threads = 1});
      EXPECT_NO_THROW(static_cast<void>(MoeLayer::create(context, layer.spec, *source)));
    }
  }
}

TEST(QuantisedCheckpoint, LayersLeftOut_ArePlain) {
  TinyModel model = quantised_model();
  const TinyModel plain = make_tiny_model({});
  for (const TinyTensor& tensor : plain.tensors) {
    if (!is_expert(tensor) || tensor.name.find("layers.2.") == std::string::npos) continue;
    model.at(tensor.name) = tensor;
    model.drop(tensor.name + "_scale_inv");
  }
  const TempDir directory;
  const Checkpoint checkpoint = open(model, directory);
  EXPECT_EQ(checkpoint.layer(0).spec.weight_dtype, DType::kF8E4M3);
  EXPECT_EQ(checkpoint.layer(2).spec.weight_dtype, DType::kBF16);
  EXPECT_EQ(checkpoint.layer(2).spec.quant.weights, WeightScale::kNone);
  EXPECT_TRUE(checkpoint.layer(2).support);
}

TEST(QuantisedCheckpoint, ScaleMissing_IsNamed) {
  TinyModel model = quantised_model();
  model.drop(std::string(kExpert) + "_scale_inv");
  expect_open_error(model, ErrorCode::kTensorMissing, std::string(kExpert) + "_scale_inv");
}

TEST(QuantisedCheckpoint, ScaleTooMany_IsNamed) {
  TinyModel model = quantised_model();
  const std::string name = "model.layers.0.mlp.experts.2.up_proj.input_scale";
  fill(model.add(name, DType::kF32, {1}), 0.5F);
  expect_open_error(model, ErrorCode::kTensorUnexpected, name);

  TinyModel unquantised = make_tiny_model({});
  unquantised.config["quantization_config"] = fp8();
  const std::string scale = std::string(kExpert) + "_scale_inv";
  fill(unquantised.add(scale, DType::kF32, {2, 1}), 0.5F);
  expect_open_error(unquantised, ErrorCode::kTensorUnexpected, scale);
}

TEST(QuantisedCheckpoint, TwoScalesOfAMatrix_AreRefused) {
  TinyModel model = quantised_model();
  const std::string name = std::string(kExpert) + "_scale";
  fill(model.add(name, DType::kF32, {2, 1}), 0.5F);
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorDuplicate);
}

TEST(QuantisedCheckpoint, ScaleOfAnotherShapeOrType_IsNamed) {
  const std::string name = std::string(kExpert) + "_scale_inv";
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1, 2}, {6, 1}, {1}, {3, 1}}) {
    TinyModel model = quantised_model();
    model.drop(name);
    fill(model.add(name, DType::kF32, shape), 0.5F);
    expect_open_error(model, ErrorCode::kTensorShape, name);
  }
  TinyModel model = quantised_model();
  for (const TinyTensor& tensor : std::vector<TinyTensor>(model.tensors)) {
    if (!tensor.name.ends_with("up_proj.weight_scale_inv")) continue;
    model.drop(tensor.name);
    model.add(tensor.name, DType::kI32, tensor.shape);
  }
  expect_open_error(model, ErrorCode::kTensorDType,
                    "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv");
}

TEST(QuantisedCheckpoint, E8m0AndBf16Scales_AreRead) {
  for (const DType dtype : {DType::kF8E8M0, DType::kBF16, DType::kF16}) {
    TinyModel model = quantised_model();
    for (const TinyTensor& tensor : std::vector<TinyTensor>(model.tensors)) {
      if (!tensor.name.ends_with("_scale_inv")) continue;
      model.drop(tensor.name);
      TinyTensor& scale = model.add(tensor.name, dtype, tensor.shape);
      dtype == DType::kF8E8M0 ? fill(scale, uint8_t{126}) : fill(scale, uint16_t{0x3800});
    }
    const TempDir directory;
    const Checkpoint checkpoint = open(model, directory);
    const auto source = checkpoint.layer_source(0);
    const Context context({.num_threads = 1});
    EXPECT_EQ(source->describe(weights::kUp.with(WeightPlane::kScale)).dtype, dtype);
    EXPECT_NO_THROW(
        static_cast<void>(MoeLayer::create(context, checkpoint.layer(0).spec, *source)));
  }
}

TEST(QuantisedCheckpoint, BadScaleValue_IsRefusedNamingTheTensor) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -1.0F}) {
    TinyModel model = quantised_model();
    fill(model.at(std::string(kExpert) + "_scale_inv"), bad);
    const TempDir directory;
    const Checkpoint checkpoint = open(model, directory);
    const auto source = checkpoint.layer_source(0);
    const Context context({.num_threads = 1});
    const auto error = error_of(
        [&] { static_cast<void>(MoeLayer::create(context, checkpoint.layer(0).spec, *source)); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kTensorValue);
    EXPECT_EQ(error->detail().tensor, std::string(kExpert) + "_scale_inv") << error->what();
    EXPECT_EQ(error->detail().file, "model.safetensors");
  }
}

// A stacked model has one tensor of gate and up, whose blocks must be whole for each.
TinyModel stacked_model(int64_t intermediate, std::vector<int64_t> fused_scale) {
  TinyModel model =
      quantised_model({.layout = Layout::kStacked, .intermediate_size = intermediate});
  for (const int64_t layer : model.moe_layers) {
    const std::string name =
        "model.layers." + std::to_string(layer) + ".mlp.experts.gate_up_proj_scale_inv";
    model.drop(name);
    fill(model.add(name, DType::kF32, fused_scale), 0.5F);
  }
  return model;
}

TEST(QuantisedCheckpoint, StackedScales_BelongToGateAndUp) {
  const TempDir directory;
  TinyModel model = stacked_model(8, {5, 4, 1});
  TinyTensor& scale = model.at("model.layers.0.mlp.experts.gate_up_proj_scale_inv");
  for (size_t i = 0; i < 20; ++i) {
    const auto value = static_cast<float>(i);
    std::memcpy(scale.bytes.data() + i * sizeof(float), &value, sizeof(value));
  }
  const Checkpoint checkpoint = open(model, directory);
  const auto source = checkpoint.layer_source(0);
  const auto first = [&](WeightId role, int64_t expert) {
    float value = 0;
    std::memcpy(&value, read_matrix(*source, role, expert).data(), sizeof(value));
    return value;
  };
  EXPECT_EQ(first(weights::kGate.with(WeightPlane::kScale), 0), 0);
  EXPECT_EQ(first(weights::kUp.with(WeightPlane::kScale), 0), 2);
  EXPECT_EQ(first(weights::kGate.with(WeightPlane::kScale), 3), 12);
  EXPECT_EQ(first(weights::kUp.with(WeightPlane::kScale), 3), 14);
}

TEST(QuantisedCheckpoint, BlocksAcrossGateAndUp_AreRefused) {
  // 2 * 6 rows are 3 blocks of 4; the middle one has rows of both.
  expect_open_error(stacked_model(6, {5, 3, 1}), ErrorCode::kTensorShape,
                    "model.layers.0.mlp.experts.gate_up_proj_scale_inv");
  // There are as many blocks as two separate halves would have, but one still has rows of both.
  expect_open_error(stacked_model(6, {5, 4, 1}), ErrorCode::kTensorShape,
                    "model.layers.0.mlp.experts.gate_up_proj_scale_inv");
}

TEST(QuantisedCheckpoint, QuantisedRouter_HasItsValues) {
  TinyModel model = quantised_model();
  const std::string router = "model.layers.0.mlp.gate.weight";
  TinyTensor& codes = model.at(router);
  codes.dtype = DType::kF8E4M3;
  codes.bytes.assign(codes.bytes.size() / 2, std::byte{0x38});  // 1
  fill(model.add(router + "_scale_inv", DType::kF32, {2, 1}), 0.5F);
  const TempDir directory;
  const Checkpoint checkpoint = open(model, directory);
  EXPECT_TRUE(checkpoint.layer(0).support) << checkpoint.layer(0).support.reason();
  const auto source = checkpoint.layer_source(0);
  EXPECT_EQ(source->describe(weights::kRouter).dtype, DType::kF32);
  const std::vector<std::byte> bytes = read_matrix(*source, weights::kRouter, 0);
  for (size_t at = 0; at < bytes.size(); at += sizeof(float)) {
    float value = 0;
    std::memcpy(&value, bytes.data() + at, sizeof(value));
    EXPECT_EQ(value, 0.5F);
  }
}

// Other codes than the method's have no form.
TEST(QuantisedCheckpoint, RouterInCodesOfAnotherType_IsUnsupportedWithReason) {
  TinyModel model = quantised_model();
  const std::string router = "model.layers.0.mlp.gate.weight";
  TinyTensor& codes = model.at(router);
  codes.dtype = DType::kI8;
  codes.bytes.resize(codes.bytes.size() / 2);
  fill(model.add(router + "_scale_inv", DType::kF32, {2, 1}), 0.5F);
  const TempDir directory;
  const Checkpoint checkpoint = open(model, directory);
  EXPECT_FALSE(checkpoint.layer(0).support);
  EXPECT_NE(checkpoint.layer(0).support.reason().find(router), std::string::npos);
  EXPECT_TRUE(checkpoint.layer(2).support);
}

// DeepSeek-V4 has two fp4 codes per byte beside e4m3; the type identifies them, whatever the shape.
TEST(QuantisedCheckpoint, OtherCodes_OpenButDoNotRun) {
  TinyModel model = quantised_model();
  for (const TinyTensor& tensor : std::vector<TinyTensor>(model.tensors)) {
    if (!is_expert(tensor) || tensor.name.ends_with("_scale_inv")) continue;
    model.drop(tensor.name);
    model.add(tensor.name, DType::kI8, {tensor.shape[0], tensor.shape[1] / 2});
  }
  const TempDir directory;
  const Checkpoint checkpoint = open(model, directory);
  EXPECT_FALSE(checkpoint.layer(0).support);
  EXPECT_NE(checkpoint.layer(0).support.reason().find("stored as I8"), std::string::npos);
  const auto error = error_of([&] { static_cast<void>(checkpoint.layer_source(0)); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kUnsupportedQuantization);
}

TEST(QuantisedCheckpoint, ModelOptFile_IsReadBesideTheConfiguration) {
  TinyModel model = quantised_model({}, "_scale");
  model.config.erase("quantization_config");
  for (const TinyTensor& tensor : std::vector<TinyTensor>(model.tensors)) {
    if (!tensor.name.ends_with("_scale")) continue;
    model.drop(tensor.name);
    fill(model.add(tensor.name, DType::kF32, {}), 0.5F);
    const std::string module = tensor.name.substr(0, tensor.name.rfind(".weight_scale"));
    fill(model.add(module + ".input_scale", DType::kF32, {}), 0.25F);
  }
  const TempDir directory;
  write_single(model, directory.path());
  write_text(directory / "hf_quant_config.json",
             R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})");
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_TRUE(checkpoint.layer(0).support) << checkpoint.layer(0).support.reason();
  EXPECT_EQ(checkpoint.layer(0).spec.quant.activations, ActivationScale::kTensorStatic);
  EXPECT_EQ(
      checkpoint.layer_source(0)->describe(weights::kDown.with(WeightPlane::kInputScale)).count, 5);
}

TEST(QuantisedFeed, FromSpec_TakesCodesAndScales) {
  const TinyModel model = quantised_model();
  const TempDir directory;
  const MoeSpec spec = open(model, directory).layer(0).spec;
  const std::vector<int64_t> layers = {0};
  CheckpointFeed feed = CheckpointFeed::from_spec(spec, "qwen3_moe", layers);
  for (const TinyTensor& tensor : model.tensors) {
    const bool scale = tensor.name.ends_with("_scale_inv");
    if (!scale && is_expert(tensor)) {
      EXPECT_FALSE(feed.is_complete(0)) << tensor.name;
    }
    static_cast<void>(feed.put(tensor.name, {.data = tensor.bytes.data(),
                                             .dtype = tensor.dtype,
                                             .shape = Shape(std::span(tensor.shape))}));
  }
  EXPECT_TRUE(feed.is_complete(0)) << feed.missing().front();
  EXPECT_EQ(feed.layer(0).spec.weight_dtype, DType::kF8E4M3);
  const Context context({.num_threads = 1});
  EXPECT_NO_THROW(
      static_cast<void>(MoeLayer::create(context, feed.layer(0).spec, *feed.layer_source(0))));
}

// Types arrive with the tensors: layers and modules that the quantiser left out are plain.
TEST(QuantisedFeed, FromConfig_SettlesTypesAsTensorsCome) {
  for (const bool reversed : {false, true}) {
    TinyModel model = quantised_model();
    const TempDir directory;
    const MoeSpec expected = open(model, directory).layer(0).spec;
    if (reversed) std::reverse(model.tensors.begin(), model.tensors.end());
    CheckpointFeed feed = CheckpointFeed::from_config(model.config.dump());
    for (const TinyTensor& tensor : model.tensors) {
      static_cast<void>(feed.put(tensor.name, {.data = tensor.bytes.data(),
                                               .dtype = tensor.dtype,
                                               .shape = Shape(std::span(tensor.shape))}));
    }
    ASSERT_TRUE(feed.missing().empty()) << feed.missing().front();
    const MoeSpec spec = feed.layer(0).spec;
    EXPECT_EQ(spec.weight_dtype, DType::kF8E4M3);
    EXPECT_EQ(spec.quant.weights, expected.quant.weights);
    EXPECT_EQ(spec.quant.activations, expected.quant.activations);
    const Context context({.num_threads = 1});
    EXPECT_NO_THROW(static_cast<void>(MoeLayer::create(context, spec, *feed.layer_source(0))));
  }
}

TEST(QuantisedFeed, PlainExpertsOfAQuantisedModel_AreTakenAsTheyAre) {
  TinyModel model = make_tiny_model({});
  model.config["quantization_config"] = fp8();
  CheckpointFeed feed = CheckpointFeed::from_config(model.config.dump());
  for (const TinyTensor& tensor : model.tensors) {
    static_cast<void>(feed.put(tensor.name, {.data = tensor.bytes.data(),
                                             .dtype = tensor.dtype,
                                             .shape = Shape(std::span(tensor.shape))}));
  }
  ASSERT_TRUE(feed.missing().empty()) << feed.missing().front();
  EXPECT_NE(feed.layer(feed.layers()[0]).spec.weight_dtype, DType::kF8E4M3);
  EXPECT_EQ(feed.layer(feed.layers()[0]).spec.quant.weights, WeightScale::kNone);
}

}  // namespace
}  // namespace conclave::testing
