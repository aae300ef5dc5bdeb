// Layers of GGUF files described as directories: every architecture has a family whose
// configuration reads back as its layers, or is refused with the property that differs.
#include "conclave/directory_layers.h"

#include "checkpoint/gguf/family.h"
#include "checkpoint/model_config.h"
#include "io/json.h"
#include "support/case_name.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/gguf.h"
#include "conclave/gguf_layers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kExperts = 4;
constexpr int64_t kHidden = 32;
constexpr int64_t kWidth = 8;

// What files of these architectures have where keys decide, and the family goes by no default.
struct Usual {
  GgufGating gating = GgufGating::kNone;
  bool renormalize = true;
  float scale = 1.8F;
};
const std::map<std::string_view, Usual> kUsual = {
    {"deepseek2", {.gating = GgufGating::kSigmoid}},
    {"deepseek2-ocr", {.gating = GgufGating::kSoftmax, .renormalize = false}},
    {"deepseek", {.gating = GgufGating::kSoftmax, .renormalize = false}},
};

// A file of one architecture: layers of three from `first` on have experts, in its usual form.
class TinyFile {
 public:
  TinyFile(const GgufFamily& family, int64_t first)
      : family_(family),
        first_(first),
        usual_(kUsual.contains(family.name) ? kUsual.at(family.name) : Usual{}),
        path_(fs::path(::testing::TempDir()) / ("directory-layers-" + std::string(family.name))) {
    write();
  }
  ~TinyFile() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  TinyFile(const TinyFile&) = delete;
  TinyFile& operator=(const TinyFile&) = delete;

  const fs::path& path() const { return path_; }

 private:
  std::string key(std::string_view name) const {
    return std::string(family_.name) + "." + std::string(name);
  }

  std::vector<GgufKey> keys() const {
    std::vector<GgufKey> keys = {GgufKey::of_text("general.architecture", family_.name),
                                 GgufKey::of_u32(key("block_count"), 3),
                                 GgufKey::of_u32(key("embedding_length"), kHidden),
                                 GgufKey::of_u32(key("expert_count"), kExperts),
                                 GgufKey::of_u32(key("expert_used_count"), 2)};
    if (family_.gating_by == GgufRule::kKey) {
      keys.push_back(GgufKey::of_u32(key("expert_gating_func"), static_cast<uint32_t>(gating())));
    }
    if (family_.renormalize == GgufRule::kKey) {
      keys.push_back(GgufKey::of_bool(key("expert_weights_norm"), usual_.renormalize));
    }
    if (family_.scale == GgufRule::kKey) {
      keys.push_back(GgufKey::of_f32(key("expert_weights_scale"), usual_.scale));
    }
    return keys;
  }

  GgufGating gating() const {
    if (usual_.gating != GgufGating::kNone) return usual_.gating;
    return family_.gating == GgufGating::kNone ? GgufGating::kSigmoid : family_.gating;
  }
  bool gated() const { return family_.gate != GgufPresence::kNever; }
  // Some families have one always.
  bool has_shared() const {
    return family_.shared_by == GgufRule::kAlways || family_.model_type == "deepseek_v4";
  }
  bool chooses_by_bias() const {
    if (family_.name == "mimo2" || family_.name == "nemotron_h_moe") return true;
    return family_.gating_by == GgufRule::kKey && gating() != GgufGating::kSoftmax &&
           family_.shared != SharedMode::kAverage;
  }

  void write() const {
    struct Named {
      std::string name;
      std::vector<int64_t> shape;
    };
    std::vector<Named> tensors;
    for (int64_t layer = first_; layer < 3; ++layer) {
      const auto add = [&](std::string_view name, std::vector<int64_t> shape) {
        tensors.push_back({"blk." + std::to_string(layer) + "." + std::string(name), shape});
      };
      add("ffn_gate_inp.weight", {kExperts, kHidden});
      if (gated()) add("ffn_gate_exps.weight", {kExperts, kWidth, kHidden});
      add("ffn_up_exps.weight", {kExperts, kWidth, kHidden});
      add("ffn_down_exps.weight", {kExperts, kHidden, kWidth});
      if (chooses_by_bias()) add("exp_probs_b.bias", {kExperts});
      if (family_.normalises_router) add("ffn_gate_inp.scale", {kHidden});
      if (family_.scales_experts) add("ffn_down_exps.scale", {kExperts});
      if (family_.name == "gpt-oss") {
        add("ffn_gate_inp.bias", {kExperts});
        add("ffn_gate_exps.bias", {kExperts, kWidth});
        add("ffn_up_exps.bias", {kExperts, kWidth});
        add("ffn_down_exps.bias", {kExperts, kHidden});
      }
      if (has_shared()) {
        add("ffn_gate_shexp.weight", {kWidth, kHidden});
        add("ffn_up_shexp.weight", {kWidth, kHidden});
        add("ffn_down_shexp.weight", {kHidden, kWidth});
      }
      if (family_.shared == SharedMode::kSigmoidGate) add("ffn_gate_inp_shexp.weight", {kHidden});
      if (family_.has_residual) {
        add("ffn_gate.weight", {kHidden, kHidden});
        add("ffn_up.weight", {kHidden, kHidden});
        add("ffn_down.weight", {kHidden, kHidden});
      }
    }
    GgufWriter writer(path_, keys());
    for (const Named& tensor : tensors) writer.declare(tensor.name, "F32", tensor.shape);
    writer.finish_with_zeros();
  }

  const GgufFamily& family_;
  int64_t first_;
  Usual usual_;
  fs::path path_;
};

// What keeps these from a configuration.
const std::map<std::string_view, std::string_view> kRefused = {
    {"cohere2moe", "another order of score and choice"},
    {"grok", "no family of this name is known"},
    {"grovemoe", "no family of this name is known"},
    {"laguna", "another factor of weights"},
    {"maple", "another activation"},
    {"minimax-m3", "another factor of weights"},
    {"nomic-bert-moe", "is not an activation"},
    {"smallthinker", "no family of this name is known"},
};

// In some families every layer has experts.
std::vector<int64_t> layers_of(const GgufFamily& family) {
  const Architecture* const table = find_architecture(family.model_type);
  const bool has_dense =
      table != nullptr &&
      (!table->layer_rule.first_moe.key.empty() || !table->layer_rule.dense_layers.empty() ||
       !table->layer_rule.pattern.empty() || !table->layer_rule.moe_layers.empty() ||
       !table->layer_rule.kinds.empty());
  return has_dense ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{0, 1, 2};
}

class DirectoryLayersOf : public ::testing::TestWithParam<GgufFamily> {};

TEST_P(DirectoryLayersOf, Configuration_ReadsBackAsTheLayers) {
  const std::vector<int64_t> layers = layers_of(GetParam());
  const TinyFile file(GetParam(), layers.front());
  const Checkpoint model = Checkpoint::open(file.path());
  ASSERT_EQ(model.layers().size(), layers.size());
  const auto refused = kRefused.find(GetParam().name);
  DirectoryLayers written;
  try {
    written = directory_layers(model, layers);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    ASSERT_TRUE(refused != kRefused.end()) << error.what();
    EXPECT_NE(std::string(error.what()).find(refused->second), std::string::npos) << error.what();
    EXPECT_EQ(error.detail().file, file.path().string());
    EXPECT_FALSE(error.detail().hint.empty());
    return;
  }
  EXPECT_TRUE(refused == kRefused.end()) << written.model_type;
  const io::JsonDocument document =
      io::JsonDocument::parse(written.config, "config.json", io::kConfigLimits);
  const ModelConfig config = read_model_config(document.root());
  ASSERT_EQ(config.layers.size(), layers.size());
  EXPECT_EQ(config.num_hidden_layers, 3);
  for (size_t i = 0; i < layers.size(); ++i) {
    EXPECT_EQ(config.layers[i].index, layers[i]);
    const Support same = means_the_same(model.layer(layers[i]).spec, config.layers[i].spec);
    EXPECT_TRUE(same) << same.reason() << written.config;
  }
  EXPECT_FALSE(written.tensors.empty());
}

INSTANTIATE_TEST_SUITE_P(Families, DirectoryLayersOf, ::testing::ValuesIn(gguf_families()),
                         [](const auto& instance) {
                           return testing::case_name(std::string(instance.param.name));
                         });

TEST(DirectoryLayers, Directory_IsNoSource) {
  const Checkpoint model = Checkpoint::open("testdata/qwen3-moe-tiny");
  const std::vector<int64_t> layers = {0};
  EXPECT_THROW(directory_layers(model, layers), Error);
}

}  // namespace
}  // namespace conclave::checkpoint
