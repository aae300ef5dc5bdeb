// Compares released configurations, reduced to the keys that matter, with the layers they describe.
#include "checkpoint/model_config.h"
#include "checkpoint/tiny_model.h"
#include "io/json.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace conclave::checkpoint {
namespace {

using conclave::testing::error_of;
using nlohmann::json;

ModelConfig read(const json& config) {
  const io::JsonDocument document = io::JsonDocument::parse(config.dump(), "config.json");
  return read_model_config(document.root());
}

struct Family {
  const char* name;
  const char* config;
  std::vector<int64_t> first_layers;  // the first MoE layers
  size_t num_layers;                  // how many MoE layers there are
  std::function<void(const MoeSpec&)> check;
};

void expect_sizes(const MoeSpec& spec, int64_t experts, int64_t top_k, int64_t hidden,
                  int64_t intermediate, int64_t shared) {
  EXPECT_EQ(spec.num_experts, experts);
  EXPECT_EQ(spec.top_k, top_k);
  EXPECT_EQ(spec.hidden_size, hidden);
  EXPECT_EQ(spec.intermediate_size, intermediate);
  EXPECT_EQ(spec.shared.intermediate_size, shared);
}

void expect_noaux_tc(const MoeSpec& spec, int64_t groups, int64_t kept, double scale) {
  const RouterSpec& router = spec.router;
  EXPECT_EQ(router.score, RouterScore::kSigmoid);
  EXPECT_TRUE(router.has_selection_bias);
  EXPECT_EQ(router.num_groups, groups);
  EXPECT_EQ(router.topk_groups, kept);
  EXPECT_EQ(router.group_score, GroupScore::kTop2Sum);
  EXPECT_EQ(router.group_mask, GroupMask::kNegInf);
  EXPECT_EQ(router.renormalize, Renormalize::kSum);
  EXPECT_EQ(router.epsilon, 1e-20);
  EXPECT_EQ(router.scale, scale);
  EXPECT_EQ(router.logits_dtype, DType::kF32);
}

const std::vector<Family> kReleased = {
    {"DeepSeekV3",
     R"({"model_type": "deepseek_v3", "hidden_size": 7168, "moe_intermediate_size": 2048,
         "num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8,
         "topk_group": 4, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
         "norm_topk_prob": true, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
         "topk_method": "noaux_tc", "hidden_act": "silu", "torch_dtype": "bfloat16"})",
     {3, 4, 5},
     58,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 256, 8, 7168, 2048, 2048);
       expect_noaux_tc(spec, 8, 4, 2.5);
     }},
    {"KimiK2",
     R"({"model_type": "kimi_k2", "hidden_size": 7168, "moe_intermediate_size": 2048,
         "num_hidden_layers": 61, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1,
         "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
         "routed_scaling_factor": 2.827, "torch_dtype": "bfloat16"})",
     {1, 2},
     60,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 384, 8, 7168, 2048, 2048);
       expect_noaux_tc(spec, 1, 1, 2.827);
     }},
    {"DeepSeekV2",
     R"({"model_type": "deepseek_v2", "hidden_size": 5120, "moe_intermediate_size": 1536,
         "num_hidden_layers": 60, "n_routed_experts": 160, "num_experts_per_tok": 6, "n_group": 8,
         "topk_group": 3, "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
         "norm_topk_prob": false, "routed_scaling_factor": 16.0,
         "topk_method": "group_limited_greedy", "torch_dtype": "bfloat16"})",
     {1, 2},
     59,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 160, 6, 5120, 1536, 3072);
       EXPECT_EQ(spec.router.score, RouterScore::kSoftmax);
       EXPECT_EQ(spec.router.num_groups, 8);
       EXPECT_EQ(spec.router.topk_groups, 3);
       EXPECT_EQ(spec.router.group_score, GroupScore::kMax);
       EXPECT_EQ(spec.router.group_mask, GroupMask::kZero);
       EXPECT_EQ(spec.router.renormalize, Renormalize::kNone);
       EXPECT_EQ(spec.router.scale, 16.0);
     }},
    {"GptOss120b",
     R"({"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
         "num_hidden_layers": 36, "num_local_experts": 128, "num_experts_per_tok": 4,
         "swiglu_limit": 7.0, "hidden_act": "silu", "torch_dtype": "bfloat16"})",
     {0, 1},
     36,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 128, 4, 2880, 2880, 0);
       EXPECT_TRUE(spec.has_bias);
       EXPECT_TRUE(spec.router.has_logit_bias);
       EXPECT_EQ(spec.router.order, RouterOrder::kTopkThenScore);
       EXPECT_EQ(spec.router.score_dtype, DType::kBF16);
       EXPECT_EQ(spec.activation.name, "swiglu_oai");
       EXPECT_EQ(spec.activation.limit, 7.0);
       EXPECT_EQ(spec.activation.alpha, 1.702);
       EXPECT_EQ(spec.activation.beta, 1.0);
     }},
    {"Llama4Maverick",
     R"({"model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_size": 5120,
         "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
         "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
         "hidden_act": "silu", "torch_dtype": "bfloat16"}})",
     {1, 3, 5},
     24,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 128, 1, 5120, 8192, 8192);
       EXPECT_EQ(spec.weight_on, WeightOn::kInput);
       EXPECT_EQ(spec.router.score, RouterScore::kSigmoid);
       EXPECT_EQ(spec.shared.mode, SharedMode::kAdd);
     }},
    {"Jamba15Large",
     R"({"model_type": "jamba", "hidden_size": 8192, "intermediate_size": 24576,
         "num_hidden_layers": 72, "num_experts": 16, "num_experts_per_tok": 2,
         "expert_layer_period": 2, "expert_layer_offset": 1, "torch_dtype": "bfloat16"})",
     {1, 3, 5},
     36,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 16, 2, 8192, 24576, 0);
       EXPECT_EQ(spec.router.renormalize, Renormalize::kNone);
     }},
    {"HunyuanA13B",
     R"({"model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072,
         "moe_intermediate_size": [3072, 3072], "num_hidden_layers": 2, "num_experts": 64,
         "moe_topk": [8, 7], "num_shared_expert": [1, 1], "torch_dtype": "bfloat16"})",
     {0, 1},
     2,
     [](const MoeSpec& spec) { expect_sizes(spec, 64, 8, 4096, 3072, 3072); }},
    {"Ernie45_300B",
     R"({"model_type": "ernie4_5_moe", "hidden_size": 8192, "moe_intermediate_size": 3584,
         "num_hidden_layers": 54, "moe_num_experts": 64, "moe_k": 8, "moe_layer_start_index": 3,
         "moe_layer_end_index": 53, "moe_layer_interval": 1, "moe_num_shared_experts": 0,
         "torch_dtype": "bfloat16"})",
     {3, 4},
     51,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 64, 8, 8192, 3584, 0);
       EXPECT_EQ(spec.router.epsilon_mode, EpsilonMode::kClampMin);
       EXPECT_EQ(spec.router.epsilon, 1e-12);
       EXPECT_EQ(spec.shared.mode, SharedMode::kNone);
     }},
    {"Ernie45Vl",
     R"({"model_type": "ernie4_5_moe_vl", "hidden_size": 2560, "moe_intermediate_size": [1536, 512],
         "num_hidden_layers": 28, "moe_num_experts": [64, 64], "moe_k": 6,
         "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28],
         "moe_num_shared_experts": 2, "torch_dtype": "bfloat16"})",
     {1, 2},
     27,
     [](const MoeSpec& spec) { expect_sizes(spec, 64, 6, 2560, 1536, 3072); }},
    {"Dbrx",
     R"({"model_type": "dbrx", "d_model": 6144, "n_layers": 40, "ffn_config": {
         "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4,
         "moe_normalize_expert_weights": 1, "ffn_act_fn": {"name": "silu"}},
         "torch_dtype": "bfloat16"})",
     {0, 1},
     40,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 16, 4, 6144, 10752, 0);
       EXPECT_EQ(spec.router.renormalize, Renormalize::kPNorm);
       EXPECT_EQ(spec.router.renormalize_p, 1.0);
     }},
    {"PhiMoe",
     R"({"model_type": "phimoe", "hidden_size": 4096, "intermediate_size": 6400,
         "num_hidden_layers": 32, "num_local_experts": 16, "num_experts_per_tok": 2,
         "router_jitter_noise": 0.01, "torch_dtype": "bfloat16"})",
     {0, 1},
     32,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 16, 2, 4096, 6400, 0);
       EXPECT_EQ(spec.router.name, "sparse_mixer");
       EXPECT_EQ(spec.router.jitter_epsilon, 0.01);
     }},
    {"NemotronNano",
     R"({"model_type": "nemotron_h", "hidden_size": 2688, "moe_intermediate_size": 1856,
         "num_hidden_layers": 6, "hybrid_override_pattern": "MEM*E-", "n_routed_experts": 128,
         "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
         "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
         "mlp_hidden_act": "relu2", "torch_dtype": "bfloat16"})",
     {1, 4},
     2,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 128, 6, 2688, 1856, 3712);
       expect_noaux_tc(spec, 1, 1, 2.5);
       EXPECT_EQ(spec.activation.name, "relu2_no_mul");
       EXPECT_EQ(spec.latent.size, 0);
     }},
    {"Step35Flash",
     R"({"model_type": "step3p5", "hidden_size": 4096, "moe_intermediate_size": 1280,
         "num_hidden_layers": 6, "moe_num_experts": 288, "moe_top_k": 8, "share_expert_dim": 1280,
         "moe_layers_enum": "3, 4,5", "moe_router_scaling_factor": 3.0, "use_moe_router_bias": true,
         "moe_router_activation": "sigmoid", "swiglu_limits": [0, 0, 0, 7.0, null, 0, 0],
         "swiglu_limits_shared": [0, 0, 0, 0, 16.0, 0, 0], "torch_dtype": "bfloat16"})",
     {3, 4, 5},
     3,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 288, 8, 4096, 1280, 1280);
       EXPECT_EQ(spec.output_scale, 1.0);
       EXPECT_EQ(spec.router.scale, 3.0);
       EXPECT_EQ(spec.activation.name, "silu_clamp_after");
       EXPECT_EQ(spec.activation.limit, 7.0);
       EXPECT_EQ(spec.shared.activation.name, "silu");
     }},
    {"LongcatFlash",
     R"({"model_type": "longcat_flash", "hidden_size": 6144, "expert_ffn_hidden_size": 2048,
         "num_layers": 28, "n_routed_experts": 512, "moe_topk": 12, "zero_expert_num": 256,
         "zero_expert_type": "identity", "router_bias": false, "routed_scaling_factor": 6.0,
         "torch_dtype": "bfloat16"})",
     {0, 1},
     28,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 512, 12, 6144, 2048, 0);
       EXPECT_EQ(spec.num_zero_experts, 256);
       EXPECT_EQ(spec.router.renormalize, Renormalize::kNone);
       EXPECT_EQ(spec.router.scale, 6.0);
     }},
    {"DeepSeekV4Flash",
     R"({"model_type": "deepseek_v4", "hidden_size": 4096, "moe_intermediate_size": 2048,
         "num_hidden_layers": 43, "n_routed_experts": 256, "num_experts_per_tok": 6,
         "num_hash_layers": 3, "vocab_size": 129280, "scoring_func": "sqrtsoftplus",
         "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "torch_dtype": "bfloat16"})",
     {0, 1},
     43,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 256, 6, 4096, 2048, 2048);
       EXPECT_EQ(spec.router.name, "hash");
       EXPECT_EQ(spec.router.vocab_size, 129280);
       EXPECT_FALSE(spec.router.has_selection_bias);
       EXPECT_EQ(spec.activation.name, "silu_clamp_before");
     }},
    {"KimiK3",
     R"({"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear", "hidden_size": 7168,
         "moe_intermediate_size": 3072, "num_hidden_layers": 61, "num_experts": 896,
         "num_experts_per_token": 16, "routed_expert_hidden_size": 3584,
         "latent_moe_use_norm": true, "num_shared_experts": 2, "hidden_act": "situ",
         "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
         "first_k_dense_replace": 1, "rms_norm_eps": 1e-05, "dtype": "bfloat16"}})",
     {1, 2},
     60,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 896, 16, 7168, 3072, 6144);
       EXPECT_EQ(spec.latent.size, 3584);
       EXPECT_TRUE(spec.latent.has_norm);
       EXPECT_EQ(spec.latent.norm_epsilon, 1e-5);
       EXPECT_EQ(spec.activation.name, "situ");
       EXPECT_EQ(spec.activation.linear_beta, 25.0);
     }},
    {"Ling2",
     R"({"model_type": "bailing_moe", "hidden_size": 2048, "moe_intermediate_size": 512,
         "moe_shared_expert_intermediate_size": 512, "num_hidden_layers": 20, "num_experts": 256,
         "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "num_shared_experts": 1,
         "moe_router_enable_expert_bias": true, "score_function": "sigmoid",
         "routed_scaling_factor": 2.5, "norm_topk_prob": true, "first_k_dense_replace": 1,
         "torch_dtype": "bfloat16"})",
     {1, 2},
     19,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 256, 8, 2048, 512, 512);
       expect_noaux_tc(spec, 8, 4, 2.5);
     }},
    {"LingLite",
     R"({"model_type": "bailing_moe", "hidden_size": 2048, "moe_intermediate_size": 1408,
         "num_hidden_layers": 28, "num_experts": 64, "num_experts_per_tok": 6,
         "num_shared_experts": 2, "norm_topk_prob": true, "torch_dtype": "bfloat16"})",
     {0, 1},
     28,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 64, 6, 2048, 1408, 2816);
       EXPECT_EQ(spec.router.score, RouterScore::kSoftmax);
       EXPECT_FALSE(spec.router.has_selection_bias);
       EXPECT_EQ(spec.router.logits_dtype, DType::kBF16);
     }},
    {"MimoV2Flash",
     R"({"model_type": "mimo_v2_flash", "hidden_size": 4096, "moe_intermediate_size": 2048,
         "num_hidden_layers": 4, "n_routed_experts": 256, "num_experts_per_tok": 8,
         "n_shared_experts": null, "moe_layer_freq": [0, 1, 0, 1], "routed_scaling_factor": null,
         "n_group": 1, "topk_group": 1, "torch_dtype": "bfloat16"})",
     {1, 3},
     2,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 256, 8, 4096, 2048, 0);
       expect_noaux_tc(spec, 1, 1, 1.0);
       EXPECT_EQ(spec.shared.mode, SharedMode::kNone);
     }},
    {"Gemma4_26B",
     R"({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "hidden_size": 2816,
         "moe_intermediate_size": 704, "num_hidden_layers": 30, "num_experts": 128,
         "top_k_experts": 8, "enable_moe_block": true, "hidden_activation": "gelu_pytorch_tanh",
         "rms_norm_eps": 1e-06, "dtype": "bfloat16"}})",
     {0, 1},
     30,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 128, 8, 2816, 704, 0);
       EXPECT_TRUE(spec.router.input_norm.enabled);
       EXPECT_TRUE(spec.router.has_expert_scale);
       EXPECT_EQ(spec.activation.name, "gelu_tanh");
     }},
    {"Inkling",
     R"({"model_type": "inkling_mm_model", "text_config": {"model_type": "inkling_text",
         "hidden_size": 6144, "intermediate_size": 3072, "dense_intermediate_size": 24576,
         "num_hidden_layers": 66, "n_routed_experts": 256, "num_experts_per_tok": 6,
         "n_shared_experts": 2, "route_scale": 8.0, "dense_mlp_idx": 2, "dtype": "bfloat16"}})",
     {2, 3},
     64,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 256, 6, 6144, 3072, 3072);
       EXPECT_EQ(spec.router.name, "sink_softmax");
       EXPECT_EQ(spec.shared.count, 2);
       EXPECT_EQ(num_logits(spec), 258);
     }},
    {"Arctic",
     R"({"model_type": "arctic", "hidden_size": 7168, "intermediate_size": 4864,
         "num_hidden_layers": 35, "num_local_experts": 128, "num_experts_per_tok": 2,
         "moe_layer_frequency": 2, "use_residual": true, "torch_dtype": "bfloat16"})",
     {1, 3},
     17,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 128, 2, 7168, 4864, 0);
       EXPECT_EQ(spec.residual.intermediate_size, 7168);
     }},
    {"Phixtral",
     R"({"model_type": "phi-msft", "n_embd": 2560, "n_layer": 32, "n_inner": null,
         "num_local_experts": 4, "num_experts_per_tok": 2, "activation_function": "gelu_new",
         "torch_dtype": "float16"})",
     {0, 1},
     32,
     [](const MoeSpec& spec) {
       expect_sizes(spec, 4, 2, 2560, 10240, 0);
       EXPECT_EQ(spec.activation.name, "gelu_tanh_no_mul");
       EXPECT_TRUE(spec.has_bias);
     }},
};

class ReleasedConfig : public ::testing::TestWithParam<Family> {};

INSTANTIATE_TEST_SUITE_P(Families, ReleasedConfig, ::testing::ValuesIn(kReleased),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(ReleasedConfig, Layers_AreAsPublished) {
  const ModelConfig config = read(json::parse(GetParam().config));
  EXPECT_TRUE(config.support) << config.support.reason();
  for (const LayerConfig& layer : config.layers) {
    EXPECT_TRUE(layer.support) << layer.support.reason();
  }
  ASSERT_EQ(config.layers.size(), GetParam().num_layers);
  for (size_t i = 0; i < GetParam().first_layers.size(); ++i) {
    EXPECT_EQ(config.layers[i].index, GetParam().first_layers[i]);
  }
  GetParam().check(config.layers.front().spec);
}

json family(const std::string& name) {
  const auto found = std::find_if(kReleased.begin(), kReleased.end(),
                                  [&](const Family& known) { return name == known.name; });
  return json::parse(found->config);
}

TEST(FamilyConfig, ListsPerLayer_ReachEachLayer) {
  const ModelConfig hunyuan = read(family("HunyuanA13B"));
  EXPECT_EQ(hunyuan.layers[0].spec.top_k, 8);
  EXPECT_EQ(hunyuan.layers[1].spec.top_k, 7);
  const ModelConfig step = read(family("Step35Flash"));
  EXPECT_EQ(step.layers[1].spec.activation.name, "silu");
  EXPECT_EQ(step.layers[1].spec.shared.activation.name, "silu_clamp_after");
  EXPECT_EQ(step.layers[1].spec.shared.activation.limit, 16.0);
}

TEST(FamilyConfig, HashLayers_AreTheFirstOrThoseNamed) {
  json config = family("DeepSeekV4Flash");
  ModelConfig model = read(config);
  EXPECT_EQ(model.layers[2].spec.router.name, "hash");
  EXPECT_EQ(model.layers[3].spec.router.name, "topk");
  EXPECT_TRUE(model.layers[3].spec.router.has_selection_bias);
  config["num_hidden_layers"] = 2;
  config["mlp_layer_types"] = {"moe", "hash_moe"};
  model = read(config);
  EXPECT_EQ(model.layers[0].spec.router.name, "topk");
  EXPECT_EQ(model.layers[1].spec.router.name, "hash");
}

TEST(FamilyConfig, KindsDecideAlone) {
  json config = family("DeepSeekV3");
  config["num_hidden_layers"] = 4;
  config["mlp_layer_types"] = {"sparse", "dense", "sparse", "dense"};
  const ModelConfig model = read(config);
  ASSERT_EQ(model.layers.size(), 2U);
  EXPECT_EQ(model.layers[0].index, 0);
  EXPECT_EQ(model.layers[1].index, 2);
}

TEST(FamilyConfig, NullNorm_MeansNoNorm) {
  json config = family("Dbrx");
  config["ffn_config"]["moe_normalize_expert_weights"] = nullptr;
  EXPECT_EQ(read(config).layers[0].spec.router.renormalize, Renormalize::kNone);
  config["ffn_config"].erase("moe_normalize_expert_weights");
  EXPECT_EQ(read(config).layers[0].spec.router.renormalize, Renormalize::kPNorm);
}

TEST(FamilyConfig, NamedChoices_AreReadOrReported) {
  json greedy = family("DeepSeekV2");
  greedy["topk_method"] = "greedy";
  EXPECT_EQ(read(greedy).layers[0].spec.router.num_groups, 1);
  greedy["topk_method"] = "other";
  EXPECT_FALSE(read(greedy).layers[0].support);
  json zero = family("LongcatFlash");
  zero["zero_expert_type"] = "copy\n";
  const ModelConfig config = read(zero);
  EXPECT_FALSE(config.layers[0].support);
  EXPECT_EQ(config.layers[0].support.reason().find('\n'), std::string::npos);
}

TEST(FamilyConfig, NoExperts_MakesADenseModelWhereTheFamilyHasSuch) {
  const json granite = {{"model_type", "granitemoehybrid"}, {"hidden_size", 64},
                        {"intermediate_size", 32},          {"num_hidden_layers", 2},
                        {"num_local_experts", 0},           {"num_experts_per_tok", 0}};
  EXPECT_TRUE(read(granite).layers.empty());
  json phi = family("Phixtral");
  phi.erase("num_local_experts");
  EXPECT_TRUE(read(phi).layers.empty());
  json gemma = family("Gemma4_26B");
  gemma["text_config"]["enable_moe_block"] = false;
  EXPECT_TRUE(read(gemma).layers.empty());
}

struct Bad {
  const char* family;
  const char* key;  // in the text_config if there is one
  json value;
  ErrorCode code;
};

TEST(FamilyConfig, ImpossibleValues_NameTheKey) {
  const std::vector<Bad> cases = {
      {"DeepSeekV3", "n_group", 0, ErrorCode::kConfigValue},
      {"DeepSeekV3", "n_group", 7, ErrorCode::kConfigValue},
      {"DeepSeekV3", "n_group", 256, ErrorCode::kConfigValue},
      {"DeepSeekV3", "n_group", 100000, ErrorCode::kConfigValue},
      {"DeepSeekV3", "topk_group", 9, ErrorCode::kConfigValue},
      {"DeepSeekV3", "topk_group", -1, ErrorCode::kConfigValue},
      {"DeepSeekV3", "num_experts_per_tok", 257, ErrorCode::kConfigValue},
      {"DeepSeekV3", "routed_scaling_factor", -1.0, ErrorCode::kConfigValue},
      {"DeepSeekV3", "routed_scaling_factor", "2.5", ErrorCode::kConfigValue},
      {"DeepSeekV3", "routed_scaling_factor", 1e300, ErrorCode::kConfigValue},
      {"DeepSeekV3", "scoring_func", "tanh", ErrorCode::kConfigValue},
      {"DeepSeekV3", "scoring_func", 1, ErrorCode::kJsonType},
      {"DeepSeekV3", "norm_topk_prob", "yes", ErrorCode::kJsonType},
      {"DeepSeekV3", "first_k_dense_replace", -1, ErrorCode::kConfigValue},
      {"DeepSeekV3", "moe_layer_freq", 0, ErrorCode::kConfigValue},
      {"DeepSeekV3", "moe_layer_freq", {1, 1}, ErrorCode::kConfigValue},
      {"DeepSeekV3", "mlp_layer_types", {"sparse"}, ErrorCode::kConfigValue},
      {"DeepSeekV3", "mlp_layer_types", "sparse", ErrorCode::kJsonType},
      {"DeepSeekV3", "n_shared_experts", -1, ErrorCode::kConfigValue},
      {"DeepSeekV3", "n_shared_experts", 100000, ErrorCode::kConfigValue},
      {"GptOss120b", "swiglu_limit", -7.0, ErrorCode::kConfigValue},
      {"GptOss120b", "swiglu_limit", 0, ErrorCode::kConfigValue},
      {"Step35Flash", "moe_layers_enum", "3,x", ErrorCode::kConfigValue},
      {"Step35Flash", "moe_layers_enum", "3,-4", ErrorCode::kConfigValue},
      {"Step35Flash", "moe_layers_enum", "99999999999999999999", ErrorCode::kConfigValue},
      {"Step35Flash", "swiglu_limits", {0, 0}, ErrorCode::kConfigValue},
      {"Step35Flash", "swiglu_limits", {0, 0, 0, -7.0, 0, 0}, ErrorCode::kConfigValue},
      {"HunyuanA13B", "moe_topk", {8}, ErrorCode::kConfigValue},
      {"HunyuanA13B", "moe_topk", {8, 65}, ErrorCode::kConfigValue},
      {"HunyuanA13B", "moe_topk", json::array(), ErrorCode::kConfigValue},
      {"NemotronNano", "hybrid_override_pattern", "ME", ErrorCode::kConfigValue},
      {"Jamba15Large", "expert_layer_period", 0, ErrorCode::kConfigValue},
      {"LongcatFlash", "zero_expert_num", -1, ErrorCode::kConfigValue},
      {"LongcatFlash", "moe_topk", 769, ErrorCode::kConfigValue},
      {"DeepSeekV4Flash", "vocab_size", 0, ErrorCode::kConfigValue},
      {"Phixtral", "n_inner", 1 << 30, ErrorCode::kConfigValue},
      {"Arctic", "moe_layer_frequency", 0, ErrorCode::kConfigValue},
      {"Dbrx", "ffn_config", 3, ErrorCode::kConfigMissingKey},
  };
  for (const Bad& bad : cases) {
    json config = family(bad.family);
    config[bad.key] = bad.value;
    const auto error = error_of([&] { read(config); });
    ASSERT_TRUE(error) << bad.family << " " << bad.key << " " << bad.value.dump();
    EXPECT_EQ(error->code(), bad.code) << error->what();
    EXPECT_EQ(error->detail().file, "config.json") << error->what();
  }
  const io::JsonDocument not_a_number = io::JsonDocument::parse(
      R"({"model_type": "deepseek_v3", "hidden_size": 8, "moe_intermediate_size": 8,
          "num_hidden_layers": 4, "n_routed_experts": 16, "num_experts_per_tok": 2,
          "routed_scaling_factor": NaN})",
      "config.json", io::kConfigLimits);
  const auto error = error_of([&] { read_model_config(not_a_number.root()); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kConfigValue) << error->what();
}

TEST(FamilyConfig, DefaultGroupsThatDoNotFit_AreRejected) {
  for (const int64_t experts : {4, 8, 12}) {
    json config = family("DeepSeekV3");
    config.erase("n_group");
    config["n_routed_experts"] = experts;
    config["num_experts_per_tok"] = 2;
    const auto error = error_of([&] { read(config); });
    ASSERT_TRUE(error) << experts;
    EXPECT_EQ(error->code(), ErrorCode::kConfigValue) << error->what();
  }
}

TEST(FamilyConfig, UnknownType_SuggestsTheNearest) {
  json config = family("DeepSeekV3");
  config["model_type"] = "deepseek_v33";
  const auto error = error_of([&] { read(config); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kUnknownArchitecture);
  EXPECT_NE(error->detail().hint.find("nearest known name is deepseek_v3"), std::string::npos)
      << error->what();
  EXPECT_LT(std::string(error->what()).size(), 8000U);
}

}  // namespace
}  // namespace conclave::checkpoint
