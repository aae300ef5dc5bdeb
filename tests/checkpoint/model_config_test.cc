#include "checkpoint/model_config.h"

#include "checkpoint/tiny_model.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave::checkpoint {
namespace {

using conclave::testing::error_of;
using nlohmann::json;

json mixtral() {
  return {{"model_type", "mixtral"},   {"hidden_size", 4096},    {"intermediate_size", 14336},
          {"num_hidden_layers", 4},    {"num_local_experts", 8}, {"num_experts_per_tok", 2},
          {"torch_dtype", "bfloat16"}, {"hidden_act", "silu"}};
}

json qwen(const std::string& type) {
  json config = {{"model_type", type},        {"hidden_size", 2048},
                 {"intermediate_size", 5632}, {"moe_intermediate_size", 1408},
                 {"num_hidden_layers", 6},    {"num_experts", 60},
                 {"num_experts_per_tok", 4},  {"dtype", "float16"}};
  if (type == "qwen2_moe") config["shared_expert_intermediate_size"] = 5632;
  return config;
}

ModelConfig read(const json& config) {
  const io::JsonDocument document = io::JsonDocument::parse(config.dump(), "config.json");
  return read_model_config(document.root());
}

std::vector<int64_t> layers_of(const ModelConfig& config) {
  std::vector<int64_t> layers;
  for (const LayerConfig& layer : config.layers) layers.push_back(layer.index);
  return layers;
}

void expect_rejected(const json& config, ErrorCode code, const std::string& key,
                     const std::string& found = "") {
  const auto error = error_of([&] { read(config); });
  ASSERT_TRUE(error) << config.dump();
  EXPECT_EQ(error->code(), code) << error->what();
  EXPECT_NE(std::string(error->what()).find(key), std::string::npos) << error->what();
  EXPECT_EQ(error->detail().file, "config.json");
  if (!found.empty()) {
    EXPECT_EQ(error->detail().found, found);
    EXPECT_FALSE(error->detail().limit.empty());
  }
}

TEST(ModelConfig, Mixtral_ReadsSizesAndAlwaysRenormalises) {
  const ModelConfig config = read(mixtral());
  EXPECT_EQ(config.architecture->name, "mixtral");
  EXPECT_EQ(layers_of(config), (std::vector<int64_t>{0, 1, 2, 3}));
  const MoeSpec& spec = config.layers[0].spec;
  EXPECT_EQ(spec.num_experts, 8);
  EXPECT_EQ(spec.top_k, 2);
  EXPECT_EQ(spec.hidden_size, 4096);
  EXPECT_EQ(spec.intermediate_size, 14336);
  EXPECT_EQ(spec.router.renormalize, Renormalize::kSum);
  EXPECT_EQ(spec.router.logits_dtype, DType::kBF16);
  EXPECT_EQ(spec.activation.name, "silu");
  EXPECT_EQ(spec.shared.mode, SharedMode::kNone);
  EXPECT_TRUE(config.support);
}

TEST(ModelConfig, RenormalisationAbsent_FollowsPublishedDefault) {
  for (const char* type : {"qwen2_moe", "qwen3_moe"}) {
    EXPECT_EQ(read(qwen(type)).layers[0].spec.router.renormalize, Renormalize::kNone) << type;
  }
  json olmoe = mixtral();
  olmoe["model_type"] = "olmoe";
  EXPECT_EQ(read(olmoe).layers[0].spec.router.renormalize, Renormalize::kNone);
}

TEST(ModelConfig, RenormalisationGiven_IsUsed) {
  json config = qwen("qwen3_moe");
  config["norm_topk_prob"] = true;
  EXPECT_EQ(read(config).layers[0].spec.router.renormalize, Renormalize::kSum);
  config["norm_topk_prob"] = 1;
  expect_rejected(config, ErrorCode::kJsonType, "norm_topk_prob");
}

TEST(ModelConfig, MixtralNormKey_IsIgnored) {
  json config = mixtral();
  config["norm_topk_prob"] = false;
  EXPECT_EQ(read(config).layers[0].spec.router.renormalize, Renormalize::kSum);
}

TEST(ModelConfig, Qwen2_HasSharedExpertBehindSigmoidGate) {
  const MoeSpec spec = read(qwen("qwen2_moe")).layers[0].spec;
  EXPECT_EQ(spec.shared.mode, SharedMode::kSigmoidGate);
  EXPECT_EQ(spec.shared.intermediate_size, 5632);
  EXPECT_EQ(spec.intermediate_size, 1408);
  EXPECT_EQ(spec.router.logits_dtype, DType::kF16);
}

TEST(ModelConfig, AlternativeSpellings_AreRead) {
  json config = qwen("qwen3_moe");
  config.erase("num_experts");
  config["num_local_experts"] = 60;
  EXPECT_EQ(read(config).layers[0].spec.num_experts, 60);
  config["num_experts"] = nullptr;
  EXPECT_EQ(read(config).layers[0].spec.num_experts, 60);
}

TEST(ModelConfig, SparseStep_PicksEveryStepthLayer) {
  json config = qwen("qwen2_moe");
  config["decoder_sparse_step"] = 2;
  EXPECT_EQ(layers_of(read(config)), (std::vector<int64_t>{1, 3, 5}));
  config["mlp_only_layers"] = {3};
  EXPECT_EQ(layers_of(read(config)), (std::vector<int64_t>{1, 5}));
  config["mlp_only_layers"] = {1, 3, 5};
  const ModelConfig dense = read(config);
  EXPECT_TRUE(dense.layers.empty());
  EXPECT_FALSE(dense.notes.empty());
}

TEST(ModelConfig, NullLists_CountAsAbsent) {
  json config = qwen("qwen3_moe");
  config["mlp_only_layers"] = nullptr;
  EXPECT_EQ(read(config).layers.size(), 6U);
}

TEST(ModelConfig, NestedTextConfig_IsRead) {
  json inner = qwen("qwen3_moe");
  const json outer = {{"model_type", "some_vision_model"}, {"text_config", inner}};
  const ModelConfig config = read(outer);
  EXPECT_EQ(config.model_type, "qwen3_moe");
  EXPECT_EQ(config.layers.size(), 6U);
  const json deeper = {{"model_type", "omni"}, {"thinker_config", {{"text_config", inner}}}};
  EXPECT_EQ(read(deeper).layers.size(), 6U);
}

TEST(ModelConfig, MissingKeys_NameTheKey) {
  for (const char* key : {"num_local_experts", "num_experts_per_tok", "hidden_size",
                          "intermediate_size", "num_hidden_layers", "model_type"}) {
    json config = mixtral();
    config.erase(key);
    expect_rejected(config, ErrorCode::kConfigMissingKey, key);
  }
  json config = qwen("qwen2_moe");
  config.erase("moe_intermediate_size");
  expect_rejected(config, ErrorCode::kConfigMissingKey, "moe_intermediate_size");
}

TEST(ModelConfig, ImpossibleSizes_NameKeyValueAndLimit) {
  for (const char* key : {"num_local_experts", "num_experts_per_tok", "hidden_size",
                          "intermediate_size", "num_hidden_layers"}) {
    for (const auto& [value, found] :
         std::vector<std::pair<json, std::string>>{{0, "0"},
                                                   {-3, "-3"},
                                                   {int64_t{1} << 40, "1099511627776"},
                                                   {2.5, "2.5"},
                                                   {"8", "\"8\""},
                                                   {true, "true"}}) {
      json config = mixtral();
      config[key] = value;
      expect_rejected(config, ErrorCode::kConfigValue, key, found);
    }
  }
}

TEST(ModelConfig, TopKBeyondExperts_IsRejected) {
  json config = mixtral();
  config["num_experts_per_tok"] = 9;
  expect_rejected(config, ErrorCode::kConfigValue, "num_experts_per_tok", "9");
  config["num_experts_per_tok"] = 8;
  EXPECT_EQ(read(config).layers[0].spec.top_k, 8);
}

TEST(ModelConfig, BadLayerRule_IsRejected) {
  json config = qwen("qwen2_moe");
  config["decoder_sparse_step"] = 0;
  expect_rejected(config, ErrorCode::kConfigValue, "decoder_sparse_step", "0");
  config = qwen("qwen2_moe");
  config["mlp_only_layers"] = {1, -2};
  expect_rejected(config, ErrorCode::kConfigValue, "mlp_only_layers", "-2");
  config["mlp_only_layers"] = "1";
  expect_rejected(config, ErrorCode::kJsonType, "mlp_only_layers");
}

TEST(ModelConfig, UnknownFamily_ListsKnownOnes) {
  json config = mixtral();
  config["model_type"] = "llama";
  expect_rejected(config, ErrorCode::kUnknownArchitecture, "qwen3_moe");
}

TEST(ModelConfig, WrongRoot_IsRejected) {
  expect_rejected(json::array(), ErrorCode::kJsonType, "config.json");
}

TEST(ModelConfig, OtherActivation_IsUnsupportedWithReason) {
  json config = mixtral();
  config["hidden_act"] = "mish";
  const ModelConfig read_config = read(config);
  EXPECT_FALSE(read_config.layers.front().support);
  EXPECT_NE(read_config.layers.front().support.reason().find("mish"), std::string::npos);
  config["hidden_act"] = "swish";
  EXPECT_TRUE(read(config).layers.front().support);
}

// A fault of one layer is reported for that layer.
TEST(ModelConfig, LayerThatDoesNotRun_IsListedWithTheReasonInTheConfigsWords) {
  json config = json::parse(R"({"model_type": "phimoe", "hidden_size": 16, "intermediate_size": 8,
      "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 3,
      "hidden_act": "silu"})");
  const ModelConfig model = read(config);
  ASSERT_EQ(model.layers.size(), 2U);
  EXPECT_TRUE(model.support);
  for (const LayerConfig& layer : model.layers) {
    EXPECT_EQ(layer.support.reason(),
              "num_experts_per_tok does not fit router sparse_mixer: 3 (limit: 2)");
    EXPECT_EQ(layer.spec.top_k, 3);
  }
  json step = json::parse(R"({"model_type": "step3p5", "hidden_size": 16,
      "moe_intermediate_size": 8, "num_hidden_layers": 3, "moe_num_experts": 4, "moe_top_k": 2,
      "share_expert_dim": 8, "hidden_act": "gelu", "moe_layers_enum": "0,1,2",
      "swiglu_limits": [0, 7.0, 0]})");
  const ModelConfig clamped = read(step);
  ASSERT_EQ(clamped.layers.size(), 3U);
  EXPECT_TRUE(clamped.layers[0].support);
  EXPECT_NE(clamped.layers[1].support.reason().find("\"gelu\" with bounds"), std::string::npos)
      << clamped.layers[1].support.reason();
  EXPECT_TRUE(clamped.layers[2].support);
}

TEST(ModelConfig, Quantisation_IsUnsupportedNamingTheMethod) {
  json config = qwen("qwen3_moe");
  config["quantization_config"] = {{"quant_method", "unheard_of"}};
  const ModelConfig read_config = read(config);
  EXPECT_EQ(read_config.quantization, "unheard_of");
  EXPECT_NE(read_config.support.reason().find("unheard_of"), std::string::npos);
}

TEST(ModelConfig, DType_IsReadFromEitherKey) {
  json config = mixtral();
  config["torch_dtype"] = "torch.float16";
  EXPECT_EQ(read(config).dtype, DType::kF16);
  config.erase("torch_dtype");
  EXPECT_FALSE(read(config).dtype);
  config["dtype"] = "auto";
  const ModelConfig automatic = read(config);
  EXPECT_FALSE(automatic.dtype);
  EXPECT_EQ(automatic.notes.size(), 1U);
}

}  // namespace
}  // namespace conclave::checkpoint
