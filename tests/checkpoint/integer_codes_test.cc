// Checkpoints of integer codes: int8 in bytes and int4 in words of 32 bits, what is read of them,
// and that what is not read is refused with a reason or by the name of its tensor.

#include "checkpoint/quantization.h"
#include "tiny_model.h"

#include "conclave/context.h"
#include "conclave/layer.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

using checkpoint::Quantization;
using nlohmann::json;

constexpr int64_t kGroup = 32;
constexpr int64_t kCodesInAWord = 8;
constexpr const char* kMatrix = "model.layers.0.mlp.experts.2.up_proj.weight";
std::string of_matrix(const std::string& suffix) { return kMatrix + suffix; }

json scheme(int64_t bits, const std::string& strategy) {
  json weights = {{"num_bits", bits}, {"type", "int"}, {"symmetric", true}, {"strategy", strategy}};
  if (strategy == "group") weights["group_size"] = kGroup;
  return weights;
}
json config_of(const std::string& format, const json& weights, const json& rows = nullptr) {
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"config_groups", {{"group_0", {{"weights", weights}, {"input_activations", rows}}}}}};
}
json token_rows(int64_t bits) {
  json rows = scheme(bits, "token");
  rows["dynamic"] = true;
  return rows;
}

Quantization read(const json& config) {
  const io::JsonDocument document =
      io::JsonDocument::parse(config.dump(), "config.json", io::kConfigLimits);
  return checkpoint::read_quantization(document.root());
}

TEST(IntegerConfig, WhatIsRead) {
  const auto int8 = read(config_of("int-quantized", scheme(8, "channel"), token_rows(8)));
  ASSERT_TRUE(int8.weights) << int8.reason;
  EXPECT_EQ(int8.weights->element, DType::kI8);
  EXPECT_TRUE(int8.weights->planes.empty());
  EXPECT_EQ(int8.weights->spec.weights, WeightScale::kChannel);
  EXPECT_EQ(int8.weights->spec.activations, ActivationScale::kToken);
  json ordered = scheme(4, "group");
  for (const json& order : {json(nullptr), json("weight"), json("static")}) {
    ordered["actorder"] = order;
    const auto int4 = read(config_of("pack-quantized", ordered));
    ASSERT_TRUE(int4.weights) << int4.reason;
    EXPECT_EQ(int4.weights->element, DType::kI4);
    EXPECT_FALSE(int4.weights->planes.empty());
    EXPECT_EQ(int4.weights->spec.weights, WeightScale::kBlock);
    EXPECT_EQ(int4.weights->spec.block_rows, 1);
    EXPECT_EQ(int4.weights->spec.block_cols, kGroup);
  }
}

TEST(IntegerConfig, WhatIsNotRead_HasAReason) {
  const auto expect_reason = [](const json& config, const std::string& words) {
    const Quantization found = read(config);
    EXPECT_FALSE(found.weights) << words;
    EXPECT_NE(found.reason.find(words), std::string::npos) << found.reason;
  };
  json rows = token_rows(8);
  rows["symmetric"] = false;
  expect_reason(config_of("int-quantized", scheme(8, "channel"), rows), "zero points");
  json ordered = scheme(4, "group");
  for (const json& order : {json("dynamic"), json(1)}) {
    ordered["actorder"] = order;
    expect_reason(config_of("pack-quantized", ordered), "actorder");
  }
  for (const int64_t bits : {1, 9}) {
    expect_reason(config_of("pack-quantized", scheme(bits, "group")),
                  "int codes of " + std::to_string(bits) + " bits");
  }
  expect_reason(config_of("int-quantized", scheme(4, "group")), "int-quantized");
  json nameless = scheme(4, "group");
  nameless["type"] = "";
  expect_reason(config_of("pack-quantized", nameless), "\"\" codes of 4 bits");
  expect_reason(config_of("", scheme(8, "channel")), "the format");
  expect_reason(config_of("marlin-24", scheme(4, "group")), "marlin-24");
  expect_reason(config_of("pack-quantized", scheme(4, "group"), token_rows(4)), "I4");
}

// Every matrix of an expert as words or bytes, its scales and its shape.
TinyModel integer_model(DType type, TinyOptions options = {}) {
  options.hidden_size = 64;
  options.intermediate_size = 32;
  TinyModel model = make_tiny_model(options);
  const bool in_words = type == DType::kI4;
  model.config["quantization_config"] = in_words ? config_of("pack-quantized", scheme(4, "group"))
                                                 : config_of("int-quantized", scheme(8, "channel"));
  for (const TinyTensor& tensor : std::vector<TinyTensor>(model.tensors)) {
    if (tensor.name.find(".experts.") == std::string::npos) continue;
    model.drop(tensor.name);
    std::vector<int64_t> shape = tensor.shape;
    if (in_words) shape.back() /= kCodesInAWord;
    TinyTensor& codes = model.add(tensor.name + (in_words ? "_packed" : ""),
                                  in_words ? DType::kI32 : DType::kI8, shape);
    std::copy_n(tensor.bytes.begin(), codes.bytes.size(), codes.bytes.begin());
    std::vector<int64_t> scales = tensor.shape;
    scales.back() = in_words ? tensor.shape.back() / kGroup : 1;
    TinyTensor& scale = model.add(tensor.name + "_scale", DType::kF32, scales);
    for (size_t at = 0; at < scale.bytes.size(); at += sizeof(float)) {
      const float value = 0.5F + static_cast<float>(at % 7);
      std::memcpy(scale.bytes.data() + at, &value, sizeof(value));
    }
    if (!in_words) continue;
    TinyTensor& says = model.add(tensor.name + "_shape", DType::kI64, {2});
    std::memcpy(says.bytes.data(), tensor.shape.data(), says.bytes.size());
  }
  return model;
}

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

std::vector<std::byte> codes_of(const WeightSource& source, WeightId role, int64_t expert) {
  const WeightInfo info = source.describe(role);
  const int64_t bits = info.rows * info.cols * bit_size(info.dtype);
  std::vector<std::byte> bytes(static_cast<size_t>(bits / 8));
  source.read(role, expert, {0, info.rows, 0, info.cols}, bytes);
  return bytes;
}

class IntegerCheckpoint : public ::testing::TestWithParam<DType> {
 protected:
  static std::string codes_name() { return of_matrix(GetParam() == DType::kI4 ? "_packed" : ""); }
};
INSTANTIATE_TEST_SUITE_P(Codes, IntegerCheckpoint, ::testing::Values(DType::kI8, DType::kI4),
                         [](const auto& test) { return std::string(to_string(test.param)); });

TEST_P(IntegerCheckpoint, EveryFamily_OpensAndRuns) {
  for (const std::string& family : kFamilies) {
    SCOPED_TRACE(family);
    const TempDir directory;
    const TinyModel model = integer_model(GetParam(), {.family = family});
    const Checkpoint checkpoint = open(model, directory);
    const CheckpointLayer& layer = checkpoint.layers().front();
    ASSERT_TRUE(layer.support) << layer.support.reason();
    EXPECT_EQ(layer.spec.weight_dtype, GetParam());
    const auto source = checkpoint.layer_source(layer.index);
    const Context context({.num_threads = 1});
    EXPECT_NO_THROW(static_cast<void>(MoeLayer::create(context, layer.spec, *source)));
  }
}

TEST_P(IntegerCheckpoint, ScaleMissing_IsNamed) {
  TinyModel model = integer_model(GetParam());
  model.drop(of_matrix("_scale"));
  expect_open_error(model, ErrorCode::kTensorMissing, of_matrix("_scale"));
}

TEST_P(IntegerCheckpoint, CodesMissing_AreNamed) {
  TinyModel model = integer_model(GetParam());
  model.drop(codes_name());
  expect_open_error(model, ErrorCode::kTensorMissing, codes_name());
}

TEST_P(IntegerCheckpoint, ScaleOfAnotherShape_IsNamed) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{32, 3}, {31, 2}, {1, 1}, {64}}) {
    TinyModel model = integer_model(GetParam());
    model.drop(of_matrix("_scale"));
    model.add(of_matrix("_scale"), DType::kF32, shape);
    expect_open_error(model, ErrorCode::kTensorShape, of_matrix("_scale"));
  }
}

TEST_P(IntegerCheckpoint, ColumnsThatDoNotFit_AreNamed) {
  const int64_t fitting = GetParam() == DType::kI4 ? 64 / kCodesInAWord : 64;
  const DType stored = GetParam() == DType::kI4 ? DType::kI32 : DType::kI8;
  for (const int64_t cols : {fitting - 1, fitting + 1, 2 * fitting}) {
    TinyModel model = integer_model(GetParam());
    model.drop(codes_name());
    model.add(codes_name(), stored, {32, cols});
    expect_open_error(model, ErrorCode::kTensorShape, codes_name());
  }
}

TEST_P(IntegerCheckpoint, ZeroPointsAndOrdersOfColumns_AreNamed) {
  const std::string module = "model.layers.0.mlp.experts.2.up_proj.";
  for (const auto& [name, shape] :
       {std::pair{module + "weight_zero_point", std::vector<int64_t>{4, 2}},
        std::pair{module + "weight_g_idx", std::vector<int64_t>{64}}}) {
    TinyModel model = integer_model(GetParam());
    model.add(name, DType::kI32, shape);
    expect_open_error(model, ErrorCode::kTensorUnexpected, name);
  }
}

TEST_P(IntegerCheckpoint, BadScaleValue_IsRefusedNamingTheTensor) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -0.5F}) {
    TinyModel model = integer_model(GetParam());
    std::vector<std::byte>& bytes = model.at(of_matrix("_scale")).bytes;
    std::memcpy(bytes.data() + bytes.size() - sizeof(bad), &bad, sizeof(bad));
    const TempDir directory;
    const Checkpoint checkpoint = open(model, directory);
    const auto source = checkpoint.layer_source(0);
    const Context context({.num_threads = 1});
    const auto error = error_of(
        [&] { static_cast<void>(MoeLayer::create(context, checkpoint.layer(0).spec, *source)); });
    ASSERT_TRUE(error) << bad;
    EXPECT_EQ(error->code(), ErrorCode::kTensorValue);
    EXPECT_NE(error->detail().tensor.find(of_matrix("_scale")), std::string::npos) << error->what();
  }
}

TEST_P(IntegerCheckpoint, TruncatedFile_IsNamed) {
  const TempDir directory;
  write_single(integer_model(GetParam()), directory.path());
  const auto file = directory / "model.safetensors";
  for (const uintmax_t lost : {uintmax_t{1}, std::filesystem::file_size(file) / 2}) {
    std::filesystem::resize_file(file, std::filesystem::file_size(file) - lost);
    const auto error = open_error(directory.path());
    ASSERT_TRUE(error);
    EXPECT_NE(error->detail().file.find("model.safetensors"), std::string::npos) << error->what();
  }
}

TEST(Int4Checkpoint, OtherTypesOfWords_AreRefused) {
  for (const DType stored : {DType::kI64, DType::kU8, DType::kBF16}) {
    TinyModel model = integer_model(DType::kI4);
    const std::vector<int64_t> shape = model.at(of_matrix("_packed")).shape;
    model.drop(of_matrix("_packed"));
    model.add(of_matrix("_packed"), stored, shape);
    const TempDir directory;
    write_single(model, directory.path());
    const auto error = open_error(directory.path());
    ASSERT_TRUE(error) << to_string(stored);
    EXPECT_EQ(error->detail().tensor, of_matrix("_packed")) << error->what();
  }
}

TEST(Int4Checkpoint, UnsignedWords_AreTheSameCodes) {
  TinyModel model = integer_model(DType::kI4);
  const TempDir directory;
  const auto expected =
      codes_of(*open(model, directory).layer_source(0), weights::kUp, /*expert=*/2);
  for (TinyTensor& tensor : model.tensors) {
    if (tensor.name.ends_with("_packed")) tensor.dtype = DType::kU32;
  }
  const TempDir other;
  EXPECT_EQ(codes_of(*open(model, other).layer_source(0), weights::kUp, 2), expected);
  EXPECT_EQ(expected, model.at(of_matrix("_packed")).bytes);
}

TEST(Int4Checkpoint, CodesByColumns_AreRefused) {
  const TinyModel model = integer_model(DType::kI4, {.layout = Layout::kStackedTransposed});
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorShape) << error->what();
  EXPECT_NE(error->detail().tensor.find("experts."), std::string::npos) << error->what();
}

// Words and the configuration already say each shape twice.
TEST(Int4Checkpoint, WeightShape_IsNotRead) {
  TinyModel model = integer_model(DType::kI4);
  model.drop(of_matrix("_shape"));
  std::fill_n(model.at("model.layers.0.mlp.experts.1.up_proj.weight_shape").bytes.begin(), 8,
              std::byte{1});
  const TempDir directory;
  EXPECT_TRUE(open(model, directory).layer(0).support);
}

void put(CheckpointFeed& feed, const TinyTensor& tensor) {
  static_cast<void>(feed.put(tensor.name, {.data = tensor.bytes.data(),
                                           .dtype = tensor.dtype,
                                           .shape = Shape(std::span(tensor.shape))}));
}

void expect_fed(CheckpointFeed feed, const TinyModel& model, const WeightSource& expected) {
  for (const TinyTensor& tensor : model.tensors) put(feed, tensor);
  ASSERT_TRUE(feed.is_complete(0)) << feed.missing().front();
  const auto source = feed.layer_source(0);
  for (const WeightId role :
       {weights::kGate, weights::kUp, weights::kDown, weights::kUp.with(WeightPlane::kScale),
        weights::kDown.with(WeightPlane::kScale)}) {
    for (int64_t expert = 0; expert < 5; ++expert) {
      EXPECT_EQ(codes_of(*source, role, expert), codes_of(expected, role, expert))
          << to_string(role) << " of expert " << expert;
    }
  }
  const Context context({.num_threads = 1});
  EXPECT_NO_THROW(static_cast<void>(MoeLayer::create(context, feed.layer(0).spec, *source)));
}

TEST_P(IntegerCheckpoint, Feed_TakesTensorsInAnyOrder) {
  TinyModel model = integer_model(GetParam());
  const TempDir directory;
  const Checkpoint checkpoint = open(model, directory);
  const auto expected = checkpoint.layer_source(0);
  const std::vector<int64_t> layers = {0};
  std::mt19937 random(7);
  for (int turn = 0; turn < 5; ++turn) {
    SCOPED_TRACE(turn);
    expect_fed(CheckpointFeed::from_config(model.config.dump()), model, *expected);
    expect_fed(CheckpointFeed::from_spec(checkpoint.layer(0).spec, "qwen3_moe", layers), model,
               *expected);
    if (turn == 0) std::reverse(model.tensors.begin(), model.tensors.end());
    if (turn > 0) std::shuffle(model.tensors.begin(), model.tensors.end(), random);
  }
}

// Rows of codes may lie apart in the caller's memory, at whole bytes.
TEST(Int4Checkpoint, FeedOfStridedCodes_KeepsThemAndNotWhatLiesBetween) {
  const TinyModel model = integer_model(DType::kI4);
  const TempDir directory;
  const Checkpoint checkpoint = open(model, directory);
  const auto expected = checkpoint.layer_source(0);
  CheckpointFeed feed = CheckpointFeed::from_config(model.config.dump());
  for (const TinyTensor& tensor : model.tensors) {
    if (!tensor.name.ends_with("_packed")) {
      put(feed, tensor);
      continue;
    }
    const int64_t rows = tensor.shape[0];
    const int64_t cols = tensor.shape[1] * kCodesInAWord;
    const int64_t stride = cols + 6;
    std::vector<std::byte> apart(static_cast<size_t>(rows * stride / 2), std::byte{0xee});
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(apart.data() + row * stride / 2, tensor.bytes.data() + row * cols / 2,
                  static_cast<size_t>(cols / 2));
    }
    const ConstTensorView view{
        .data = apart.data(), .dtype = DType::kI4, .shape = {rows, cols}, .row_stride = stride};
    ConstTensorView halved = view;
    halved.row_stride = stride + 1;
    const auto error = error_of([&] { static_cast<void>(feed.put(tensor.name, halved)); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kStride) << "rows that begin inside a byte";
    EXPECT_TRUE(feed.put(tensor.name, view));
  }
  ASSERT_TRUE(feed.is_complete(0)) << feed.missing().front();
  const auto source = feed.layer_source(0);
  for (const WeightId id : {weights::kGate, weights::kUp, weights::kDown}) {
    for (int64_t expert = 0; expert < 5; ++expert) {
      EXPECT_EQ(codes_of(*source, id, expert), codes_of(*expected, id, expert))
          << to_string(id) << " of expert " << expert;
    }
  }
}

TEST_P(IntegerCheckpoint, Feed_RefusesWhatDoesNotFitByName) {
  const TinyModel model = integer_model(GetParam());
  CheckpointFeed feed = CheckpointFeed::from_config(model.config.dump());
  const auto refusal = [&](TinyTensor tensor) {
    const auto error = error_of([&] { put(feed, tensor); });
    EXPECT_TRUE(error) << tensor.name;
    return error ? error->detail().tensor : "";
  };
  TinyModel odd = model;
  odd.drop(codes_name());
  const DType stored = GetParam() == DType::kI4 ? DType::kI32 : DType::kI8;
  EXPECT_EQ(refusal(odd.add(codes_name(), stored, {32, 9})), codes_name());
  odd.drop(of_matrix("_scale"));
  EXPECT_EQ(refusal(odd.add(of_matrix("_scale"), DType::kF32, {3, 3})), of_matrix("_scale"));
  for (const TinyTensor& tensor : model.tensors) put(feed, tensor);
  EXPECT_TRUE(feed.is_complete(0));
}

}  // namespace
}  // namespace conclave::testing
