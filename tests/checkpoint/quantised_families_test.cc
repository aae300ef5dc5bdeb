// Every family, quantised: the matrices of each golden model as e4m3 codes with one scale per
// tensor, under names that one rule makes for all families.

#include "checkpoint/layer_shapes.h"
#include "checkpoint/layer_tensors.h"
#include "checkpoint/model_config.h"
#include "checkpoint/scale_names.h"
#include "checkpoint/tensor_name.h"
#include "checkpoint/tiny_model.h"
#include "core/float8.h"

#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using checkpoint::LayerConfig;
using checkpoint::ModelConfig;
using checkpoint::NamePattern;

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator("testdata/models")) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<float> as_floats(const ConstTensorView& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.shape.num_elements()));
  convert(tensor, {.data = values.data(), .dtype = DType::kF32, .shape = tensor.shape});
  return values;
}

// The pattern of a matrix that may be quantised, and the number of matrices in its tensor.
struct Matrix {
  const NamePattern* pattern = nullptr;
  int64_t stacked = 0;  // 0: one matrix
};

class QuantisedFamily : public ::testing::TestWithParam<std::string> {
 protected:
  QuantisedFamily()
      : plain_directory_(fs::path("testdata/models") / GetParam()),
        plain_(Checkpoint::open(plain_directory_)) {
    std::ifstream file(plain_directory_ / "config.json");
    model_.config = nlohmann::json::parse(file);
    const io::JsonDocument document =
        io::JsonDocument::parse(model_.config.dump(), "config.json", io::kConfigLimits);
    const ModelConfig config = checkpoint::read_model_config(document.root());
    const SafetensorsFile weights = SafetensorsFile::open(plain_directory_ / "model.safetensors");
    for (const TensorInfo& info : weights.tensors()) {
      add(config, info, weights.load(info.name));
    }
    model_.config["quantization_config"] = {{"quant_method", "fp8"}};
    write_single(model_, directory_.path());
  }

  static const LayerConfig* layer_of(const ModelConfig& config, int64_t index) {
    for (const LayerConfig& layer : config.layers) {
      if (layer.index == index) return &layer;
    }
    return nullptr;
  }

  static Matrix matrix_of(const ModelConfig& config, const TensorInfo& info) {
    const auto name = checkpoint::split_model_name(*config.architecture, info.name);
    const LayerConfig* layer = name ? layer_of(config, name->layer) : nullptr;
    if (layer == nullptr) return {};
    const checkpoint::LayerShapes shapes = checkpoint::layer_shapes(layer->spec);
    const auto wanted = [&](const NamePattern& pattern) {
      const auto ids = checkpoint::ids_of(pattern.part);
      return std::all_of(ids.begin(), ids.end(), [&](WeightId id) { return shapes[id].count > 0; });
    };
    const auto match = checkpoint::match_name(*config.architecture, name->rest, wanted);
    if (!match || !checkpoint::is_quantisable(match->pattern->part)) return {};
    const NamePattern& pattern = *match->pattern;
    Matrix matrix{.pattern = &pattern};
    if (checkpoint::is_expert_part(pattern.part)) {
      if (checkpoint::has_expert_placeholder(pattern.text)) return matrix;
      // This also holds if the experts' axis is merged with the rows.
      matrix.stacked = info.shape.size() == 3 ? info.shape[0] : layer->spec.num_experts;
    } else if (layer->spec.shared.count > 1) {
      matrix.stacked = layer->spec.shared.count;
    }
    return matrix;
  }

  void add(const ModelConfig& config, const TensorInfo& info, const Tensor& tensor) {
    const Matrix matrix = matrix_of(config, info);
    if (matrix.pattern == nullptr) {
      TinyTensor& copy = model_.add(info.name, info.dtype, info.shape);
      std::memcpy(copy.bytes.data(), tensor.as<std::byte>(), copy.bytes.size());
      return;
    }
    const std::vector<float> values = as_floats(tensor.view());
    const auto count = static_cast<size_t>(std::max<int64_t>(matrix.stacked, 1));
    const size_t each = values.size() / count;
    TinyTensor codes{.name = info.name, .dtype = DType::kF8E4M3, .shape = info.shape, .bytes = {}};
    std::vector<float> scales;
    for (size_t block = 0; block < count; ++block) {
      float largest = 0;
      for (size_t i = block * each; i < (block + 1) * each; ++i) {
        largest = std::max(largest, std::abs(values[i]));
      }
      scales.push_back(largest == 0 ? 1 : largest / kLargestE4m3);
      for (size_t i = block * each; i < (block + 1) * each; ++i) {
        codes.bytes.push_back(std::byte{float_to_e4m3(values[i] / scales.back())});
      }
    }
    model_.tensors.push_back(std::move(codes));
    const std::vector<int64_t> shape =
        matrix.stacked == 0 ? std::vector<int64_t>{} : std::vector<int64_t>{matrix.stacked, 1, 1};
    TinyTensor& scale = model_.add(info.name + "_scale_inv", DType::kF32, shape);
    std::memcpy(scale.bytes.data(), scales.data(), scale.bytes.size());
    ++quantised_;
  }

  fs::path plain_directory_;
  Checkpoint plain_;
  TinyModel model_;
  TempDir directory_;
  int quantised_ = 0;
};

// Code times scale is the plain weight within half a step of e4m3.
void expect_close(const WeightSource& quantised, const WeightSource& plain, WeightId role,
                  WeightId scale_role, int64_t expert) {
  const WeightInfo info = plain.describe(role);
  Tensor wanted(info.dtype, {info.rows, info.cols});
  plain.read(role, expert, {0, info.rows, 0, info.cols},
             {wanted.as<std::byte>(), wanted.size_bytes()});
  const std::vector<float> values = as_floats(wanted.view());
  const std::vector<std::byte> codes = read_matrix(quantised, role, expert);
  float scale = 0;
  std::memcpy(&scale, read_matrix(quantised, scale_role, expert).data(), sizeof(scale));
  ASSERT_EQ(codes.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = e4m3_to_float(static_cast<uint8_t>(codes[i])) * scale;
    ASSERT_NEAR(value, values[i], std::abs(values[i]) / 15 + scale * 0x1p-9F)
        << to_string(role) << " of expert " << expert << " element " << i;
  }
}

TEST_P(QuantisedFamily, EveryMatrix_HasItsScale) {
  ASSERT_GT(quantised_, 0);
  const Checkpoint checkpoint = Checkpoint::open(directory_.path());
  const Context context({.num_threads = 1});
  ASSERT_EQ(checkpoint.layers().size(), plain_.layers().size());
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    SCOPED_TRACE(layer.index);
    const CheckpointLayer& before = plain_.layer(layer.index);
    ASSERT_EQ(static_cast<bool>(layer.support), static_cast<bool>(before.support))
        << layer.support.reason();
    EXPECT_EQ(layer.layout, before.layout);
    EXPECT_EQ(layer.spec.weight_dtype, DType::kF8E4M3);
    EXPECT_EQ(layer.parameters.total, before.parameters.total);
    const auto source = checkpoint.layer_source(layer.index);
    const auto plain = plain_.layer_source(layer.index);
    using namespace weights;
    const std::vector<std::pair<WeightId, WeightId>> pairs = {
        {kGate, kGate.with(WeightPlane::kScale)},
        {kUp, kUp.with(WeightPlane::kScale)},
        {kDown, kDown.with(WeightPlane::kScale)},
        {kSharedGate, kSharedGate.with(WeightPlane::kScale)},
        {kSharedUp, kSharedUp.with(WeightPlane::kScale)},
        {kSharedDown, kSharedDown.with(WeightPlane::kScale)}};
    for (const auto& [role, scale] : pairs) {
      const int64_t count = plain->describe(role).count;
      ASSERT_EQ(source->describe(scale).count, count) << to_string(scale);
      for (int64_t expert = 0; expert < count; ++expert) {
        expect_close(*source, *plain, role, scale, expert);
      }
    }
    if (!layer.support) continue;
    EXPECT_NO_THROW(static_cast<void>(MoeLayer::create(context, layer.spec, *source)));
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, QuantisedFamily, ::testing::ValuesIn(golden_names()),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char letter) { return letter == '-' || letter == '.'; }, '_');
                           return name;
                         });

}  // namespace
}  // namespace conclave::testing
