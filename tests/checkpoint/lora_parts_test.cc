// What an adapter's configuration says of each module, and parts of layers that files hold as one.
#include "checkpoint/lora/lora_config.h"
#include "io/json.h"
#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/lora_checkpoint.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;

LoraConfig config_of(const std::string& more) {
  const std::string text = R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8)" + more + "}";
  return LoraConfig(io::JsonDocument::parse(text, "adapter_config.json").root());
}

TEST(LoraConfigs, TheFirstPatternThatFits_Counts) {
  const LoraConfig config = config_of(
      R"(, "rank_pattern": {"up_proj": 2, "experts.1.up_proj": 16},
           "alpha_pattern": {"down_proj": 3, ".*": 5})");
  EXPECT_EQ(config.rank_of("mlp.experts.1.up_proj"), 2);
  EXPECT_EQ(config.rank_of("mlp.experts.1.down_proj"), 4);
  EXPECT_EQ(config.scale_of("mlp.experts.1.down_proj", 4), 0.75);
  EXPECT_EQ(config.scale_of("mlp.experts.1.up_proj", 2), 2.5);
}

TEST(LoraConfigs, RankStabilisedScales_AreOverTheRoot) {
  EXPECT_EQ(config_of(R"(, "use_rslora": true)").scale_of("up_proj", 4), 4);
  EXPECT_EQ(config_of(R"(, "use_rslora": false)").scale_of("up_proj", 4), 2);
}

TEST(LoraConfigs, StacksAreTurned_ByVersionsBefore0_19) {
  for (const char* older : {"", R"(, "peft_version": "0.18.9")", R"(, "peft_version": "0.4")"}) {
    EXPECT_TRUE(config_of(older).may_turn_stacks()) << older;
  }
  for (const char* newer : {R"(, "peft_version": "0.19.0")", R"(, "peft_version": "0.21.2")",
                            R"(, "peft_version": "1.0.0")"}) {
    EXPECT_FALSE(config_of(newer).may_turn_stacks()) << newer;
  }
}

TEST(LoraConfigs, WhatChangesTheModelElsewhere_IsRefused) {
  EXPECT_EQ(code_of([] { config_of(R"(, "bias": "none", "layer_replication": [])"); }),
            ErrorCode{0});
  for (const char* more : {R"(, "bias": "all")", R"(, "bias": "lora_only")",
                           R"(, "layer_replication": [[0, 2]])", R"(, "lora_bias": true)"}) {
    EXPECT_EQ(code_of([&] { config_of(more); }), ErrorCode::kUnsupported) << more;
  }
}

// Pairs of factors [rows of A, columns of A] and [rows of B, columns of B], whose values count up.
class SavedPairs {
 public:
  explicit SavedPairs(const std::string& name)
      : folder_(fs::temp_directory_path() /
                ("conclave_lora_" + name + "_" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  SavedPairs(const SavedPairs&) = delete;
  SavedPairs& operator=(const SavedPairs&) = delete;
  ~SavedPairs() { fs::remove_all(folder_); }

  void put(const std::string& module, const Shape& a, const Shape& b) {
    add(module + ".lora_A.weight", a);
    add(module + ".lora_B.weight", b);
  }
  LoraCheckpoint open(const std::string& config) {
    std::ofstream(folder_ / "adapter_config.json") << config;
    std::vector<NamedTensor> named;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      named.push_back({names_[i], tensors_[i].const_view()});
    }
    save_safetensors(folder_ / "adapter_model.safetensors", named);
    return LoraCheckpoint::open(folder_);
  }

 private:
  void add(const std::string& name, const Shape& shape) {
    names_.push_back("base_model.model." + name);
    Tensor& tensor = tensors_.emplace_back(DType::kF32, shape);
    for (int64_t i = 0; i < shape.num_elements(); ++i) {
      tensor.as<float>()[i] = static_cast<float>(i);
    }
  }

  fs::path folder_;
  std::vector<std::string> names_;
  std::vector<Tensor> tensors_;
};

float at(const ConstTensorView& view, int64_t row, int64_t col) {
  return static_cast<const float*>(view.data)[row * view.shape[1] + col];
}

const LoraFactors& find(const LoraAdapter& adapter, WeightMatrix matrix, int64_t expert) {
  for (const LoraFactors& factors : adapter.factors) {
    if (factors.matrix == matrix && factors.expert == expert) return factors;
  }
  throw Error(ErrorCode::kInternal, "no such factors");
}

constexpr const char* kConfig =
    R"({"peft_type": "LORA", "peft_version": "0.21.2", "r": 2, "lora_alpha": 2})";

// Two shared experts of 3 columns are one MLP of 6 in the file.
TEST(LoraParts, SharedExpertsOfOneMlp_AreTakenApart) {
  MoeSpec spec = make_spec(4, 2, 8, 5, DType::kF32);
  spec.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 3, .count = 2};
  SavedPairs saved("shared");
  saved.put("model.layers.0.mlp.shared_experts.up_proj", {2, 8}, {6, 2});
  saved.put("model.layers.0.mlp.shared_experts.down_proj", {2, 6}, {8, 2});
  const LoraAdapter adapter = saved.open(kConfig).layer(0, spec);
  ASSERT_EQ(adapter.factors.size(), 4U);
  for (const int64_t expert : {0, 1}) {
    const LoraFactors& up = find(adapter, WeightMatrix::kUp, expert);
    const LoraFactors& down = find(adapter, WeightMatrix::kDown, expert);
    EXPECT_EQ(up.mlp, WeightMlp::kShared);
    EXPECT_EQ(at(up.a, 1, 7), 15);
    EXPECT_EQ(at(up.b, 2, 1), static_cast<float>((3 * expert + 2) * 2 + 1));
    EXPECT_EQ(at(down.a, 1, 2), static_cast<float>(6 + 3 * expert + 2));
    EXPECT_EQ(at(down.b, 7, 1), 15);
  }
}

TEST(LoraParts, TheLargestRankOfStacks_IsThatOfAnyParameter) {
  for (const char* parameter : {"gate_up_proj", "up_proj", "down_proj"}) {
    SavedPairs saved("ranks");
    saved.put("model.layers.0.mlp.experts", {20, 5}, {8, 20});
    const std::string config =
        R"({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "rank_pattern": {"experts.)" +
        std::string(parameter) + R"(": 5}})";
    EXPECT_EQ(saved.open(config).max_rank(), 5) << parameter;
  }
}

// A model whose checkpoint has rows of gate and up in turn has its adapters so.
TEST(LoraParts, GateAndUpInTurn_AreKnownByTheModel) {
  const Checkpoint model = Checkpoint::open("testdata/models/gpt_oss");
  const MoeSpec& spec = model.layer(0).spec;
  SavedPairs saved("turns");
  saved.put("model.layers.0.mlp.experts", {2 * spec.num_experts, spec.hidden_size},
            {2 * spec.intermediate_size, 2 * spec.num_experts});
  const LoraCheckpoint adapters = saved.open(kConfig);
  const LoraAdapter adapter = adapters.layer(0, model);
  const auto columns = static_cast<float>(2 * spec.num_experts);
  EXPECT_EQ(at(find(adapter, WeightMatrix::kGate, 0).b, 1, 0), 2 * columns);
  EXPECT_EQ(at(find(adapter, WeightMatrix::kUp, 0).b, 1, 0), 3 * columns);
  const LoraAdapter joined = adapters.layer(0, spec, GateUpOrder::kConcatenated);
  EXPECT_EQ(at(find(joined, WeightMatrix::kGate, 0).b, 1, 0), columns);
}

}  // namespace
}  // namespace conclave::testing
