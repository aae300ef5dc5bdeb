// Opens the checkpoints in testdata/, which transformers itself wrote.
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Bundled {
  const char* folder;
  const char* model_type;
  std::vector<int64_t> layers;
  int64_t num_experts, top_k, hidden_size, intermediate_size;
  DType dtype;
  Renormalize renormalize;
  int64_t shared_size;
};

const std::vector<Bundled> kBundled = {
    {"mixtral-tiny", "mixtral", {0, 1}, 8, 2, 72, 40, DType::kBF16, Renormalize::kSum, 0},
    {"qwen2-moe-tiny", "qwen2_moe", {0, 2, 3}, 10, 3, 56, 36, DType::kF32, Renormalize::kNone, 44},
    {"qwen3-moe-tiny", "qwen3_moe", {0, 1, 2}, 60, 4, 88, 24, DType::kBF16, Renormalize::kSum, 0},
    {"olmoe-tiny", "olmoe", {0, 1}, 6, 3, 64, 45, DType::kF16, Renormalize::kNone, 0},
};

class BundledCheckpoint : public ::testing::TestWithParam<Bundled> {
 protected:
  fs::path directory() const { return fs::path("testdata") / GetParam().folder; }
};

INSTANTIATE_TEST_SUITE_P(Testdata, BundledCheckpoint, ::testing::ValuesIn(kBundled),
                         [](const auto& test) { return std::string(test.param.model_type); });

TEST_P(BundledCheckpoint, Layers_MatchTheConfig) {
  const Checkpoint checkpoint = Checkpoint::open(directory());
  EXPECT_EQ(checkpoint.model_type(), GetParam().model_type);
  EXPECT_TRUE(checkpoint.notes().empty()) << checkpoint.notes()[0];
  ASSERT_EQ(checkpoint.layers().size(), GetParam().layers.size());
  for (size_t i = 0; i < GetParam().layers.size(); ++i) {
    const CheckpointLayer& layer = checkpoint.layers()[i];
    EXPECT_EQ(layer.index, GetParam().layers[i]);
    EXPECT_EQ(layer.layout, "per_expert");
    EXPECT_TRUE(layer.support) << layer.support.reason();
    EXPECT_EQ(layer.spec.num_experts, GetParam().num_experts);
    EXPECT_EQ(layer.spec.top_k, GetParam().top_k);
    EXPECT_EQ(layer.spec.hidden_size, GetParam().hidden_size);
    EXPECT_EQ(layer.spec.intermediate_size, GetParam().intermediate_size);
    EXPECT_EQ(layer.spec.weight_dtype, GetParam().dtype);
    EXPECT_EQ(layer.spec.router.logits_dtype, GetParam().dtype);
    EXPECT_EQ(layer.spec.router.renormalize, GetParam().renormalize);
    EXPECT_EQ(layer.spec.shared.intermediate_size, GetParam().shared_size);
    EXPECT_NO_THROW(validate(layer.spec));
  }
}

// Names as the family writes them, independent of the tables under test.
std::string disk_name(const std::string& family, int64_t layer, WeightId role, int64_t expert) {
  const std::string start = "model.layers." + std::to_string(layer) + ".";
  const std::string e = std::to_string(expert);
  const bool mixtral = family == "mixtral";
  const std::string block = start + (mixtral ? "block_sparse_moe." : "mlp.");
  if (role == weights::kGate)
    return block + "experts." + e + (mixtral ? ".w1.weight" : ".gate_proj.weight");
  if (role == weights::kUp)
    return block + "experts." + e + (mixtral ? ".w3.weight" : ".up_proj.weight");
  if (role == weights::kDown)
    return block + "experts." + e + (mixtral ? ".w2.weight" : ".down_proj.weight");
  if (role == weights::kRouter) return block + "gate.weight";
  if (role == weights::kSharedGate) return block + "shared_expert.gate_proj.weight";
  if (role == weights::kSharedUp) return block + "shared_expert.up_proj.weight";
  if (role == weights::kSharedDown) return block + "shared_expert.down_proj.weight";
  if (role == weights::kSharedExpertGate) return block + "shared_expert_gate.weight";
  return "";
}

TEST_P(BundledCheckpoint, Matrices_EqualTheBytesInTheFiles) {
  std::map<std::string, Tensor> tensors;
  for (const auto& entry : fs::directory_iterator(directory())) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("model") || !name.ends_with(".safetensors")) continue;
    const SafetensorsFile file = SafetensorsFile::open(entry.path());
    for (const TensorInfo& info : file.tensors()) tensors.emplace(info.name, file.load(info.name));
  }
  const Checkpoint checkpoint = Checkpoint::open(directory());
  uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += tensor.size_bytes();
  EXPECT_EQ(checkpoint.total_bytes(), bytes);
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    const auto source = checkpoint.layer_source(layer.index);
    for (const WeightId role :
         {weights::kGate, weights::kUp, weights::kDown, weights::kRouter, weights::kSharedGate,
          weights::kSharedUp, weights::kSharedDown, weights::kSharedExpertGate}) {
      const WeightInfo info = source->describe(role);
      for (int64_t expert = 0; expert < info.count; ++expert) {
        const std::string name = disk_name(GetParam().model_type, layer.index, role, expert);
        ASSERT_TRUE(tensors.contains(name)) << name;
        const Tensor& tensor = tensors.at(name);
        const auto matrix = read_matrix(*source, role, expert);
        ASSERT_EQ(matrix.size(), tensor.size_bytes()) << name;
        EXPECT_EQ(std::memcmp(matrix.data(), tensor.view().data, matrix.size()), 0) << name;
      }
    }
  }
}

}  // namespace
}  // namespace conclave::testing
