// Every published method of quantisation on its golden files: each tensor that is missing, of
// another shape or type is named, feeds give the same planes as files, and damage is found.
#include "checkpoint/golden_folder.h"
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;

const fs::path kQuantised = "testdata/quantised";

// Parts of names of files that a method wrote in a form of its own.
std::vector<std::string> method_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kQuantised)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::erase_if(names, [](const std::string& name) {
    const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
    return !(has("gptq") || has("awq") || has("bnb") || has("mlx") || has("fp4") || has("mxfp") ||
             has("quark") || has("asymmetric") || has("order") || has("packed") || has("mixed"));
  });
  std::sort(names.begin(), names.end());
  return names;
}

class Method : public ::testing::TestWithParam<std::string> {
 protected:
  Method() : from_(kQuantised / GetParam()) {
    std::ifstream config(from_ / "config.json");
    model_.config = nlohmann::json::parse(config);
    const SafetensorsFile file = SafetensorsFile::open(from_ / "model.safetensors");
    for (const TensorInfo& info : file.tensors()) {
      TinyTensor& tensor = model_.add(info.name, info.dtype, info.shape);
      tensor.bytes.resize(info.bytes);
      file.read(info, 0, tensor.bytes);
    }
  }

  // Where the model stands as it is now.
  fs::path written() {
    directories_.emplace_back(std::make_unique<TempDir>());
    const fs::path path = directories_.back()->path();
    write_single(model_, path);
    const fs::path beside = from_ / "hf_quant_config.json";
    if (fs::exists(beside)) fs::copy_file(beside, path / beside.filename());
    return path;
  }

  // The names of one expert's tensors, or of a stack's.
  std::vector<std::string> expert_names() const {
    std::vector<std::string> names;
    for (const TinyTensor& tensor : model_.tensors) {
      if (tensor.name.ends_with("_bias")) continue;
      const bool stacked = tensor.name.find("switch_mlp") != std::string::npos ||
                           tensor.name.find("_proj_") != std::string::npos;
      if (stacked || tensor.name.find("experts.1.") != std::string::npos) {
        names.push_back(tensor.name);
      }
    }
    return names;
  }

  fs::path from_;
  TinyModel model_;
  std::vector<std::unique_ptr<TempDir>> directories_;
};

std::vector<std::byte> plane_of(const WeightSource& source, WeightId id, int64_t expert) {
  const WeightInfo info = source.describe(id);
  std::vector<std::byte> bytes(
      static_cast<size_t>(info.rows * ((info.cols * bit_size(info.dtype) + 7) / 8)));
  source.read(id, expert, {0, info.rows, 0, info.cols}, bytes);
  return bytes;
}

// Reads all that a layer would.
std::optional<Error> read_error(const fs::path& directory, const CheckpointOptions& options = {}) {
  return error_of([&] {
    const Checkpoint checkpoint = Checkpoint::open(directory, options);
    for (const CheckpointLayer& layer : checkpoint.layers()) {
      const auto source = checkpoint.layer_source(layer.index);
      for (const WeightId id : weights::kAll) {
        for (int64_t expert = 0; expert < source->describe(id).count; ++expert) {
          plane_of(*source, id, expert);
        }
      }
    }
  });
}

// Tensors that repeat what the configuration says, or that nothing here needs.
bool may_be_absent(const std::string& golden, const nlohmann::json& config,
                   const std::string& name) {
  const auto ends = [&](const char* suffix) { return name.ends_with(suffix); };
  const bool is_awq = golden.find("awq-rows") != std::string::npos;
  const bool has_steps = is_awq || golden.find("modelopt-nvfp4") != std::string::npos ||
                         golden.find("int8-static") != std::string::npos;
  if (ends("input_scale")) return !has_steps;
  if (ends("_scale_2")) return is_awq;
  if (ends("_shape") || ends("weight_format") || ends("input_zero_point")) return true;
  const auto flag = [&](const char* key, bool otherwise) {
    if (!config.contains("quantization_config")) return otherwise;
    return config["quantization_config"].value(key, otherwise);
  };
  if (ends(".g_idx")) return !flag("desc_act", false);
  if (ends("_zero_point") && golden.find("quark") != std::string::npos) {
    return golden.find("-uint") == std::string::npos;
  }
  if (ends(".qzeros")) return flag("sym", false) || !flag("zero_point", true);
  return false;
}

TEST_P(Method, MissingTensor_IsNamed) {
  const TinyModel whole = model_;
  for (const std::string& name : expert_names()) {
    model_ = whole;
    model_.drop(name);
    const auto error = open_error(written());
    if (may_be_absent(GetParam(), model_.config, name)) {
      EXPECT_FALSE(error) << name << ": " << error->what();
      continue;
    }
    ASSERT_TRUE(error) << name;
    EXPECT_EQ(error->code(), ErrorCode::kTensorMissing) << error->what();
    EXPECT_EQ(error->detail().tensor, name) << error->what();
  }
}

// Shapes are seen when the file is opened, those of tensors beside a plane when it is read.
TEST_P(Method, AnotherShape_IsNamed) {
  const TinyModel whole = model_;
  for (const std::string& name : expert_names()) {
    for (const int64_t more : {-1, 1}) {
      model_ = whole;
      TinyTensor& tensor = model_.at(name);
      if (tensor.shape.empty() || tensor.shape[0] + more == 0) continue;
      const size_t row = tensor.bytes.size() / static_cast<size_t>(tensor.shape[0]);
      tensor.shape[0] += more;
      tensor.bytes.resize(static_cast<size_t>(tensor.shape[0]) * row);
      const auto error = read_error(written());
      if (name.ends_with("_shape")) {
        EXPECT_FALSE(error) << name;
        continue;
      }
      ASSERT_TRUE(error) << name << " of " << tensor.shape[0] << " rows";
      EXPECT_NE((error->detail().file + error->detail().tensor).find(name), std::string::npos)
          << error->what();
    }
  }
}

TEST_P(Method, AnotherType_IsNamed) {
  const TinyModel whole = model_;
  for (const std::string& name : expert_names()) {
    model_ = whole;
    TinyTensor& tensor = model_.at(name);
    tensor.dtype = DType::kF64;
    tensor.bytes.assign(tensor.bytes.size() * 8, std::byte{0});
    int64_t count = 1;
    for (const int64_t size : tensor.shape) count *= size;
    tensor.bytes.resize(static_cast<size_t>(count) * 8);
    const auto error = read_error(written());
    const bool unused = name.ends_with("_shape") || name.ends_with("weight_format") ||
                        name.ends_with("input_scale") || name.ends_with("_scale_2") ||
                        name.ends_with("input_zero_point") ||
                        name.find("quant_state") != std::string::npos;
    if (unused && may_be_absent(GetParam(), model_.config, name)) continue;
    if (name.find("quant_state") != std::string::npos) continue;
    ASSERT_TRUE(error) << name;
    EXPECT_TRUE(error->code() == ErrorCode::kTensorDType ||
                error->code() == ErrorCode::kTensorShape ||
                error->code() == ErrorCode::kUnsupportedQuantization)
        << error->what();
  }
}

TEST_P(Method, Feed_GivesThePlanesOfTheFile) {
  if (fs::exists(from_ / "hf_quant_config.json")) GTEST_SKIP() << "config.json names no method";
  const Checkpoint checkpoint = Checkpoint::open(from_);
  const auto expected = checkpoint.layer_source(0);
  std::mt19937 random(3);
  for (int turn = 0; turn < 3; ++turn) {
    CheckpointFeed feed = CheckpointFeed::from_config(model_.config.dump());
    for (const TinyTensor& tensor : model_.tensors) {
      static_cast<void>(feed.put(tensor.name, {.data = tensor.bytes.data(),
                                               .dtype = tensor.dtype,
                                               .shape = Shape(std::span(tensor.shape))}));
    }
    ASSERT_TRUE(feed.is_complete(0)) << feed.missing().front();
    EXPECT_EQ(feed.layer(0).spec.weight_dtype, checkpoint.layer(0).spec.weight_dtype);
    const auto source = feed.layer_source(0);
    for (const WeightId id : weights::kAll) {
      ASSERT_EQ(source->describe(id).count, expected->describe(id).count) << to_string(id);
      for (int64_t expert = 0; expert < source->describe(id).count; ++expert) {
        EXPECT_EQ(plane_of(*source, id, expert), plane_of(*expected, id, expert)) << to_string(id);
      }
    }
    std::shuffle(model_.tensors.begin(), model_.tensors.end(), random);
  }
}

TEST_P(Method, DamagedBytes_AreFoundByTheManifest) {
  const fs::path path = written();
  Checkpoint::write_manifest(path);
  const auto fresh = read_error(path, {.verify_manifest = true});
  EXPECT_FALSE(fresh) << fresh->what();
  const SafetensorsFile file = SafetensorsFile::open(path / "model.safetensors");
  for (const std::string& name : expert_names()) {
    if (may_be_absent(GetParam(), model_.config, name)) continue;
    const uint64_t at = file.find(name)->file_offset;
    const auto flip = [&] {
      std::fstream damaged(path / "model.safetensors",
                           std::ios::in | std::ios::out | std::ios::binary);
      damaged.seekg(static_cast<std::streamoff>(at));
      const int byte = damaged.get();
      damaged.seekp(static_cast<std::streamoff>(at));
      damaged.put(static_cast<char>(byte ^ 1));
    };
    flip();
    const auto error = read_error(path, {.verify_manifest = true});
    ASSERT_TRUE(error) << name;
    EXPECT_EQ(error->code(), ErrorCode::kChecksum) << error->what();
    EXPECT_EQ(error->detail().tensor, name) << error->what();
    flip();
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, Method, ::testing::ValuesIn(method_names()), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace conclave::testing
