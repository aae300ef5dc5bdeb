// Modules with schemes of their own: layers, matrices and experts of one model in several forms.

#include "checkpoint/common_form.h"
#include "checkpoint/golden_folder.h"
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/quantise.h"
#include "conclave/reference.h"
#include "conclave/synthetic.h"
#include "conclave/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using checkpoint::common_form;
using checkpoint::CommonForm;
using checkpoint::MatrixMeaning;

constexpr auto kTensor = WeightScale::kTensor;
constexpr auto kChannel = WeightScale::kChannel;
constexpr auto kBlock = WeightScale::kBlock;

MatrixMeaning grouped(DType type, int64_t cols) {
  return {.element = type, .quant = {.weights = kBlock, .block_rows = 1, .block_cols = cols}};
}
MatrixMeaning scaled(DType type, WeightScale weights) {
  return {.element = type, .quant = {.weights = weights}};
}

TEST(CommonForm, Types_HoldEveryCode) {
  const auto type = [](DType one, DType other) {
    const std::vector<MatrixMeaning> both = {grouped(one, 32), grouped(other, 16)};
    return common_form(both).meaning.element;
  };
  EXPECT_EQ(type(DType::kI4, DType::kI8), DType::kI8);
  EXPECT_EQ(type(DType::kF4, DType::kF8E4M3), DType::kF8E4M3);
  EXPECT_EQ(type(DType::kI4, DType::kF8E4M3), DType::kF8E4M3);
  EXPECT_EQ(type(DType::kI4, DType::kF4), DType::kF8E4M3);
  EXPECT_EQ(type(DType::kI4, DType::kI4), DType::kI4);
  EXPECT_EQ(type(DType::kI8, DType::kF8E4M3), DType::kF32);
  EXPECT_EQ(type(DType::kNF4, DType::kI4), DType::kF32);
  EXPECT_EQ(type(DType::kF8E5M2, DType::kF8E4M3), DType::kF32);
  EXPECT_EQ(type(DType::kBF16, DType::kI4), DType::kF32);
}

// Matrices of one layer, some of whose codes are known to have fewer bits than their type.
TEST(CommonForm, KnownCodes_AreTheWidestOfAll) {
  MatrixMeaning bytes{.element = DType::kI8, .quant = {.weights = WeightScale::kChannel}};
  MatrixMeaning sixes = bytes;
  sixes.quant.gate_up_codes.dtype = sixes.quant.down_codes.dtype = DType::kI6;
  MatrixMeaning halves = bytes;
  halves.element = DType::kI4;
  const auto known = [&](const std::vector<MatrixMeaning>& meanings, const MatrixMeaning& layer) {
    return known_codes(meanings, layer).dtype;
  };
  EXPECT_EQ(known({sixes}, bytes), DType::kI6);
  EXPECT_EQ(known({sixes, halves}, bytes), DType::kI6);
  EXPECT_EQ(known({halves}, bytes), DType::kI4);
  EXPECT_EQ(known({sixes, bytes}, bytes), std::nullopt);
  EXPECT_EQ(known({bytes}, bytes), std::nullopt);
  EXPECT_EQ(known({halves}, halves), std::nullopt);
}

TEST(CommonForm, Blocks_LieInOneBlockOfEach) {
  const auto spec = [](const MatrixMeaning& one, const MatrixMeaning& other) {
    const std::vector<MatrixMeaning> both = {one, other};
    return common_form(both).meaning.quant;
  };
  const MatrixMeaning blocks = scaled(DType::kI8, kBlock);
  EXPECT_EQ(spec(blocks, grouped(DType::kI8, 48)), grouped(DType::kI8, 16).quant);
  EXPECT_EQ(spec(scaled(DType::kI8, kChannel), grouped(DType::kI4, 32)),
            grouped(DType::kI8, 32).quant);
  EXPECT_EQ(spec(scaled(DType::kI8, kChannel), blocks), grouped(DType::kI8, 128).quant);
  EXPECT_EQ(spec(scaled(DType::kI8, kTensor), scaled(DType::kI4, kChannel)),
            scaled(DType::kI8, kChannel).quant);
  EXPECT_EQ(spec(scaled(DType::kI8, kTensor), blocks), blocks.quant);
  MatrixMeaning global = grouped(DType::kF4, 16);
  global.quant.has_global_scale = true;
  MatrixMeaning points = grouped(DType::kF4, 32);
  points.quant.zeros = WeightZero::kPoint;
  const QuantSpec both = spec(global, points);
  EXPECT_FALSE(both.has_global_scale) << "it is a part of the scales";
  EXPECT_EQ(both.zeros, WeightZero::kOffset);
  // Files that store equal codes in two ways are read as two all the same.
  EXPECT_EQ(spec(points, points).zeros, WeightZero::kOffset);
  EXPECT_FALSE(spec(global, global).has_global_scale);
  EXPECT_EQ(common_form(std::vector{points}).meaning, points);
}

TEST(CommonForm, Rows_AreKeptWhereAllAskForTheSame) {
  const auto form = [](MatrixMeaning one, MatrixMeaning other, ActivationScale a,
                       ActivationScale b) {
    one.quant.activations = a;
    other.quant.activations = b;
    const std::vector<MatrixMeaning> both = {one, other};
    return common_form(both);
  };
  using enum ActivationScale;
  const MatrixMeaning int4 = grouped(DType::kI4, 32);
  const MatrixMeaning int8 = scaled(DType::kI8, kChannel);
  const CommonForm same = form(int4, int8, kToken, kToken);
  EXPECT_TRUE(same.keeps_rows);
  EXPECT_EQ(same.meaning.quant.activations, kToken);
  const CommonForm one = form(int4, int8, kToken, kNone);
  EXPECT_FALSE(one.keeps_rows);
  EXPECT_EQ(one.meaning.quant.activations, kNone);
  // Rows beside int4 are int8, beside e4m3 they would be e4m3.
  EXPECT_FALSE(form(int4, scaled(DType::kF8E4M3, kChannel), kToken, kToken).keeps_rows);
  EXPECT_TRUE(form(int4, scaled(DType::kF8E4M3, kChannel), kNone, kNone).keeps_rows);
}

std::vector<float> values_of(const QuantSpec& quant, const WeightSource& source, WeightId id,
                             int64_t expert) {
  const WeightInfo info = source.describe(id);
  std::vector<float> values(static_cast<size_t>(info.rows * info.cols));
  read_values(quant, source, id, expert, {0, info.rows, 0, info.cols}, values);
  return values;
}

constexpr std::array kMatrices = {weights::kGate, weights::kUp, weights::kDown};

// An expert's matrices in one model have the values that they have in another.
void expect_same_values(const CheckpointLayer& layer, const WeightSource& source,
                        const Checkpoint& origin, int64_t expert) {
  const auto from = origin.layer_source(0);
  for (const WeightId id : kMatrices) {
    EXPECT_EQ(values_of(layer.spec.quant, source, id, expert),
              values_of(origin.layer(0).spec.quant, *from, id, expert))
        << to_string(id) << " of expert " << expert;
  }
}

// The same but for the offsets, which another middle of the codes makes: one rounding of each.
void expect_near_values(const CheckpointLayer& layer, const WeightSource& source,
                        const Checkpoint& origin, int64_t expert) {
  const auto from = origin.layer_source(0);
  for (const WeightId id : kMatrices) {
    const auto found = values_of(layer.spec.quant, source, id, expert);
    const auto wanted = values_of(origin.layer(0).spec.quant, *from, id, expert);
    float largest = 0;
    for (const float value : wanted) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < wanted.size(); ++i) {
      // Offsets are up to 128 scales, and a scale is at most the largest value.
      ASSERT_NEAR(found[i], wanted[i], 128 * largest * 0x1p-24) << to_string(id) << " " << i;
    }
  }
}

// Takes the tensors whose names have the part from another model.
void take(TinyModel& model, const TinyModel& from, const std::string& part) {
  std::erase_if(model.tensors, [&](const TinyTensor& tensor) {
    return tensor.name.find(part) != std::string::npos;
  });
  for (const TinyTensor& tensor : from.tensors) {
    if (tensor.name.find(part) != std::string::npos) model.tensors.push_back(tensor);
  }
}

const std::string kPlain = "qwen3_moe-gptq-int4-group32";
const std::string kOrdered = "qwen3_moe-gptq-int4-order";

TEST(MixedForms, LayersOfTheirOwn_RunAsTheyAre) {
  TinyModel model = golden_folder(kPlain);
  for (TinyTensor tensor : golden_folder(kOrdered).tensors) {
    tensor.name.replace(tensor.name.find("layers.0"), 8, "layers.1");
    model.tensors.push_back(std::move(tensor));
  }
  model.config["num_hidden_layers"] = 2;
  model.config["quantization_config"]["dynamic"] = {
      {"+:model\\.layers\\.1\\..*experts.*", {{"desc_act", true}}}};
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_FALSE(checkpoint.layer(0).spec.quant.has_column_order);
  EXPECT_TRUE(checkpoint.layer(1).spec.quant.has_column_order);
  for (int64_t layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(checkpoint.layer(layer).spec.weight_dtype, DType::kI4);
    const Checkpoint origin =
        Checkpoint::open(fs::path("testdata/quantised") / (layer == 0 ? kPlain : kOrdered));
    const auto source = checkpoint.layer_source(layer);
    expect_same_values(checkpoint.layer(layer), *source, origin, 2);
  }
}

TinyModel mixed_experts() {
  TinyModel model = golden_folder(kPlain);
  const TinyModel other = golden_folder(kOrdered);
  for (const char* expert : {"experts.1.", "experts.2."}) take(model, other, expert);
  model.config["quantization_config"]["dynamic"] = {
      {".*experts\\.[12]\\..*", {{"desc_act", true}}}};
  return model;
}

TEST(MixedForms, MatricesOutsideAnySchemeThatAreNoValues_AreUnsupportedWithReason) {
  TinyModel model = golden_folder("qwen3_moe-mixed-int4-int8-down");
  model.config["quantization_config"]["config_groups"].erase("group_1");
  for (const TinyTensor& tensor : std::vector<TinyTensor>(model.tensors)) {
    if (tensor.name.find("down_proj") == std::string::npos) continue;
    model.drop(tensor.name);
    if (!tensor.name.ends_with("_scale")) continue;
    const std::string name = tensor.name.substr(0, tensor.name.size() - 6);
    model.add(name, DType::kI32, {tensor.shape[0], 64});
  }
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_FALSE(checkpoint.layer(0).support);
  EXPECT_NE(checkpoint.layer(0).support.reason().find("stored as I32"), std::string::npos)
      << checkpoint.layer(0).support.reason();
  const auto error = error_of([&] { static_cast<void>(checkpoint.layer_source(0)); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kUnsupportedQuantization);
}

TEST(MixedForms, ExpertsOfTheirOwn_HaveTheirValues) {
  const TempDir directory;
  write_single(mixed_experts(), directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const CheckpointLayer& layer = checkpoint.layer(0);
  EXPECT_EQ(layer.spec.weight_dtype, DType::kI4);
  EXPECT_TRUE(layer.spec.quant.has_column_order);
  const auto notes = checkpoint.notes();
  EXPECT_TRUE(std::ranges::any_of(notes, [](const std::string& note) {
    return note.find("several forms") != std::string::npos;
  }));
  const auto source = checkpoint.layer_source(0);
  for (int64_t expert = 0; expert < 4; ++expert) {
    const bool ordered = expert == 1 || expert == 2;
    const Checkpoint origin =
        Checkpoint::open(fs::path("testdata/quantised") / (ordered ? kOrdered : kPlain));
    expect_same_values(layer, *source, origin, expert);
  }
}

TEST(MixedForms, TensorsInAnyOrder_AreTheSameLayer) {
  TinyModel model = mixed_experts();
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const auto expected = checkpoint.layer_source(0);
  std::mt19937 random(5);
  std::shuffle(model.tensors.begin(), model.tensors.end(), random);
  CheckpointFeed feed = CheckpointFeed::from_config(model.config.dump());
  EXPECT_FALSE(feed.is_complete(0));
  for (const TinyTensor& tensor : model.tensors) {
    EXPECT_TRUE(feed.put(tensor.name, {.data = tensor.bytes.data(),
                                       .dtype = tensor.dtype,
                                       .shape = Shape(std::span(tensor.shape))}));
  }
  ASSERT_TRUE(feed.is_complete(0)) << feed.missing().front();
  EXPECT_EQ(feed.layer(0).spec.quant, checkpoint.layer(0).spec.quant);
  const auto source = feed.layer_source(0);
  for (const WeightId id : kMatrices) {
    for (int64_t expert = 0; expert < 4; ++expert) {
      EXPECT_EQ(values_of(feed.layer(0).spec.quant, *source, id, expert),
                values_of(checkpoint.layer(0).spec.quant, *expected, id, expert));
    }
  }
}

// Replaces the codes of an expert's matrices by their values.
void make_plain(TinyModel& model, const Checkpoint& origin, int64_t expert) {
  const auto source = origin.layer_source(0);
  const std::string start = "model.layers.0.mlp.experts." + std::to_string(expert) + ".";
  take(model, {}, start);
  const char* const names[] = {"gate_proj", "up_proj", "down_proj"};
  for (size_t i = 0; i < kMatrices.size(); ++i) {
    const WeightInfo info = source->describe(kMatrices[i]);
    const auto values = values_of(origin.layer(0).spec.quant, *source, kMatrices[i], expert);
    TinyTensor& tensor =
        model.add(start + names[i] + ".weight", DType::kF32, {info.rows, info.cols});
    tensor.bytes.resize(values.size() * sizeof(float));
    std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  }
}

TEST(MixedForms, ExpertsThatWereLeftOut_AreValuesBesideOthers) {
  for (const std::string name : {"qwen3_moe-awq-group32", "qwen3_moe-compressed-int4-group32"}) {
    TinyModel model = golden_folder(name);
    const Checkpoint origin = Checkpoint::open(fs::path("testdata/quantised") / name);
    make_plain(model, origin, 1);
    const TempDir directory;
    write_single(model, directory.path());
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    const CheckpointLayer& layer = checkpoint.layer(0);
    EXPECT_EQ(layer.spec.weight_dtype, DType::kF32);
    const auto source = checkpoint.layer_source(0);
    for (int64_t expert = 0; expert < layer.spec.num_experts; ++expert) {
      expect_same_values(layer, *source, origin, expert);
    }
  }
}

double distance(const std::vector<double>& expected, const Tensor& found) {
  double error = 0;
  double length = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(expected[i] - double{found.as<float>()[i]}, 2);
    length += expected[i] * expected[i];
  }
  return std::sqrt(error / length);
}

// Slices and experts of ranks add up to the layer.
TEST(MixedForms, RanksHoldPartsOfThem) {
  const Context context({.num_threads = 1});
  for (const char* name :
       {"qwen3_moe-mixed-int4-int8-down", "qwen3_moe-mixed-experts", "qwen2_moe-mixed-shared"}) {
    const Checkpoint checkpoint = Checkpoint::open(fs::path("testdata/quantised") / name);
    const MoeSpec& spec = checkpoint.layer(0).spec;
    const auto source = checkpoint.layer_source(0);
    Tensor hidden(DType::kF32, {7, spec.hidden_size});
    fill_random(hidden.view(), 3);
    const ReferenceResult expected =
        reference_forward(context, spec, *source, {.hidden = hidden.view()});
    Tensor sum(DType::kF32, {7, spec.hidden_size});
    for (const int32_t rank : {0, 1, 2, 3, 4, 5}) {
      const MoeLayer layer = MoeLayer::create(context, spec, *source, {},
                                              {.ep_size = 2,
                                               .ep_rank = rank / 3,
                                               .tp_size = 3,
                                               .tp_rank = rank % 3,
                                               .reduce = Reduce::kPartial});
      Tensor part(DType::kF32, {7, spec.hidden_size});
      layer.forward({.hidden = hidden.view(), .out = part.view()});
      for (int64_t i = 0; i < 7 * spec.hidden_size; ++i) {
        sum.as<float>()[i] += part.as<float>()[i];
      }
    }
    EXPECT_LE(distance(expected.output, sum), 6e-3) << name;
  }
}

// The same codes, each in a byte instead of half of one.
void widen_codes(TinyTensor& tensor) {
  std::vector<std::byte> bytes;
  for (const std::byte pair : tensor.bytes) {
    bytes.push_back(pair & std::byte{0xf});
    bytes.push_back(pair >> 4);
  }
  tensor.bytes = std::move(bytes);
  tensor.shape.back() *= 2;
}

TEST(MixedForms, StacksOfMlx_HaveTheirOwnBits) {
  TinyModel model = golden_folder("qwen3_moe-mlx-4bit");
  const std::string module = "model.layers.0.mlp.switch_mlp.down_proj";
  widen_codes(model.at(module + ".weight"));
  for (const char* key : {"quantization", "quantization_config"}) {
    if (!model.config.contains(key)) continue;
    model.config[key][module] = {{"group_size", 64}, {"bits", 8}};
  }
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const CheckpointLayer& layer = checkpoint.layer(0);
  ASSERT_TRUE(layer.support) << layer.support.reason();
  EXPECT_EQ(layer.spec.weight_dtype, DType::kI8);
  const Checkpoint origin = Checkpoint::open("testdata/quantised/qwen3_moe-mlx-4bit");
  const auto source = checkpoint.layer_source(0);
  for (int64_t expert = 0; expert < 4; ++expert) {
    expect_near_values(layer, *source, origin, expert);
  }
}

// As mlx-lm writes a model of which a predicate left a matrix out: false under both keys.
TEST(MixedForms, StacksOfMlx_ThatWereLeftOutAreValues) {
  const std::string name = "qwen3_moe-mlx-4bit";
  TinyModel model = golden_folder(name);
  const Checkpoint origin = Checkpoint::open(fs::path("testdata/quantised") / name);
  const std::string module = "model.layers.0.mlp.switch_mlp.down_proj";
  for (const char* key : {"quantization", "quantization_config"}) model.config[key][module] = false;
  const auto decoded = origin.layer_source(0);
  const WeightInfo info = decoded->describe(weights::kDown);
  take(model, {}, module + ".");
  TinyTensor& tensor =
      model.add(module + ".weight", DType::kF32, {info.count, info.rows, info.cols});
  tensor.bytes.clear();
  for (int64_t expert = 0; expert < info.count; ++expert) {
    const auto values = values_of(origin.layer(0).spec.quant, *decoded, weights::kDown, expert);
    const auto bytes = std::as_bytes(std::span(values));
    tensor.bytes.insert(tensor.bytes.end(), bytes.begin(), bytes.end());
  }
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const CheckpointLayer& layer = checkpoint.layer(0);
  ASSERT_TRUE(layer.support) << layer.support.reason();
  const auto source = checkpoint.layer_source(0);
  for (int64_t expert = 0; expert < info.count; ++expert) {
    expect_same_values(layer, *source, origin, expert);
  }
}

TEST(MixedForms, SchemesThatAreNotRead_CountOnlyForExperts) {
  TinyModel model = golden_folder(kPlain);
  const auto support = [&](const char* rule, int bits) {
    model.config["quantization_config"]["dynamic"] = {{rule, {{"bits", bits}}}};
    const TempDir directory;
    write_single(model, directory.path());
    return Checkpoint::open(directory.path()).layer(0).support;
  };
  EXPECT_TRUE(support(".*self_attn.*", 5));
  const Support refused = support(".*experts\\.3\\..*", 5);
  EXPECT_FALSE(refused);
  EXPECT_NE(refused.reason().find("5 bits"), std::string::npos) << refused.reason();
  // Nothing tells which modules these are.
  EXPECT_FALSE(support("(?<!attn).*experts.*", 8));
}

TEST(MixedForms, MatricesNameTheirTensors) {
  const TempDir directory;
  write_single(mixed_experts(), directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const auto named = checkpoint.stored_matrices(0);
  ASSERT_EQ(named.size(), 12U);
  for (size_t i = 0; i < named.size(); ++i) {
    EXPECT_EQ(named[i].id, kMatrices[i / 4]);
    EXPECT_EQ(named[i].expert, static_cast<int64_t>(i % 4));
    EXPECT_EQ(named[i].tensors.size(), 4U) << named[i].module;
  }
}

// A file may hold anything under an expert's name.
class WordsSource final : public WeightSource {
 public:
  WeightInfo describe(WeightId) const override {
    return {.count = 1, .rows = 2, .cols = 4, .dtype = DType::kI32};
  }
  void read(WeightId, int64_t, const WeightBlock&, std::span<std::byte> to) const override {
    std::ranges::fill(to, std::byte{0});
  }
};

TEST(ReadValues, TypeThatNoWeightsHave_IsNamed) {
  const auto error = error_of([] { values_of({}, WordsSource(), weights::kUp, 0); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorDType) << error->what();
  EXPECT_EQ(error->detail().found, "I32") << error->what();
}

}  // namespace
}  // namespace conclave::testing
