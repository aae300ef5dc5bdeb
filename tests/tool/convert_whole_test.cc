// Whole models from directories to GGUF files and back: every tensor outside the MoE layers, the
// order of its rows, what the two say of sizes, and what is left out or keeps a model from being
// whole.
#include "convert_tool.h"
#include "support/case_name.h"

#include "conclave/checkpoint.h"
#include "conclave/gguf.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const std::vector<std::string> kValues = {"--keep", "*=f32"};

std::vector<std::byte> bytes_of(const SafetensorsFile& file, const TensorInfo& tensor) {
  std::vector<std::byte> bytes(tensor.bytes);
  file.read(tensor, 0, bytes);
  return bytes;
}

std::vector<float> file_values(const GgufReader& file, const std::string& name) {
  const GgufTensorInfo* const tensor = file.find(name);
  if (tensor == nullptr) {
    ADD_FAILURE() << name << " is not there";
    return {};
  }
  std::vector<std::byte> bytes(tensor->bytes);
  file.read(*tensor, 0, bytes);
  int64_t count = 1;
  for (const int64_t size : tensor->shape) count *= size;
  std::vector<float> values(static_cast<size_t>(count));
  gguf_values(tensor->type, bytes, values);
  return values;
}

std::vector<float> directory_values(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo& tensor = *file.find(name);
  const std::vector<std::byte> bytes = bytes_of(file, tensor);
  std::vector<float> values(bytes.size() / static_cast<size_t>(byte_size(tensor.dtype)));
  gguf_values(to_string(tensor.dtype), bytes, values);
  return values;
}

std::set<std::string> names_of_layers(const Checkpoint& model) {
  std::set<std::string> names;
  for (const CheckpointLayer& layer : model.layers()) {
    for (const std::string& name : model.layer_tensors(layer.index)) names.insert(name);
  }
  return names;
}

class WholeModel : public ::testing::TestWithParam<const char*> {};

// Values of bf16 and f32 come back as they were, whatever types and orders files want.
TEST_P(WholeModel, ThereAndBack_EveryOtherTensorIsTheSources) {
  const std::string source = std::string("testdata/models/") + GetParam();
  const Json config = read_json(source + "/config.json");
  const bool is_wide = config.value("dtype", "") == "float32";
  const ScratchDirectory scratch;
  const ToolResult there = convert(source, scratch / "file", "q8_0", kValues);
  ASSERT_EQ(there.exit_code, 0) << there.err;
  const Json report = read_json(scratch / "file" / "conversion.json");
  EXPECT_EQ(report["incomplete"], "");
  EXPECT_FALSE(report["layers_alone"].get<bool>());
  EXPECT_TRUE(report["tensors_left_out"].empty());
  EXPECT_EQ(report["no_tokenizer"], "there is neither tokenizer.json nor tokenizer.model");
  EXPECT_EQ(there.out.find("MoE layers alone"), std::string::npos) << there.out;
  const ToolResult back = convert((scratch / "file" / "model.gguf").string(), scratch / "back",
                                  is_wide ? "f32" : "bf16");
  ASSERT_EQ(back.exit_code, 0) << back.err;
  EXPECT_EQ(read_json(scratch / "back" / "conversion.json")["incomplete"], "");

  const SafetensorsFile before = SafetensorsFile::open(source + "/model.safetensors");
  const SafetensorsFile after = SafetensorsFile::open(scratch / "back" / "model.safetensors");
  const std::set<std::string> in_layers = names_of_layers(Checkpoint::open(source));
  int64_t compared = 0;
  for (const TensorInfo& tensor : before.tensors()) {
    if (in_layers.contains(tensor.name)) continue;
    const TensorInfo* const found = after.find(tensor.name);
    ASSERT_NE(found, nullptr) << tensor.name;
    EXPECT_EQ(found->dtype, tensor.dtype) << tensor.name;
    EXPECT_EQ(found->shape, tensor.shape) << tensor.name;
    EXPECT_EQ(bytes_of(after, *found), bytes_of(before, tensor)) << tensor.name;
    ++compared;
  }
  EXPECT_GE(compared, 8);

  const Json written = read_json(scratch / "back" / "config.json");
  EXPECT_EQ(written["dtype"], config["dtype"]);
  EXPECT_FALSE(written["architectures"].empty());
  for (const char* key :
       {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "vocab_size", "rms_norm_eps", "tie_word_embeddings",
        "intermediate_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim", "use_qk_norm", "residual_multiplier", "logits_scaling"}) {
    if (!config.contains(key)) continue;
    EXPECT_EQ(written[key], config[key]) << key;
  }
  EXPECT_EQ(written["rope_theta"], config["rope_parameters"]["rope_theta"]);
}

INSTANTIATE_TEST_SUITE_P(Models, WholeModel,
                         ::testing::Values("mixtral", "deepseek_v3", "deepseek_v2-greedy",
                                           "glm4_moe", "glm4_moe_lite", "granitemoe",
                                           "granitemoeshared", "minimax_m2"),
                         [](const auto& instance) { return case_name(instance.param); });

// llama.cpp rotates neighbouring rows of a head; directories have its halves.
TEST(ConvertWhole, RotatedHeads_BecomePairs) {
  const std::string source = "testdata/models/mixtral";
  const ScratchDirectory scratch;
  ASSERT_EQ(convert(source, scratch / "file", "q8_0", kValues).exit_code, 0);
  const GgufReader file = GgufReader::open(scratch / "file" / "model.gguf");
  const SafetensorsFile model = SafetensorsFile::open(source + "/model.safetensors");
  struct Case {
    const char* file;
    const char* directory;
    size_t heads;
  };
  for (const auto& [name, origin, heads] :
       {Case{"blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight", 2},
        Case{"blk.1.attn_k.weight", "model.layers.1.self_attn.k_proj.weight", 1}}) {
    const std::vector<float> rows = file_values(file, name);
    const std::vector<float> halves = directory_values(model, origin);
    const size_t cols = 40;
    const size_t head = halves.size() / cols / heads;
    ASSERT_EQ(rows.size(), halves.size());
    for (size_t row = 0; row < heads * head; ++row) {
      const size_t in_head = row % head;
      const size_t from = row - in_head + (in_head % 2) * (head / 2) + in_head / 2;
      for (size_t col = 0; col < cols; ++col) {
        ASSERT_EQ(rows[row * cols + col], halves[from * cols + col]) << name << " row " << row;
      }
    }
  }
  EXPECT_EQ(file.find("blk.0.attn_norm.weight")->type, "F32");
  EXPECT_EQ(file.find("blk.0.attn_v.weight")->type, "BF16");
  EXPECT_EQ(file.find("output.weight"), nullptr) << "the embedding is the output's matrix";
}

// Keys of each head are turned round, values follow them.
TEST(ConvertWhole, LatentAttention_ComesApart) {
  const std::string source = "testdata/models/deepseek_v3";
  const ScratchDirectory scratch;
  ASSERT_EQ(convert(source, scratch / "file", "q8_0", kValues).exit_code, 0);
  const GgufReader file = GgufReader::open(scratch / "file" / "model.gguf");
  const SafetensorsFile model = SafetensorsFile::open(source + "/model.safetensors");
  const Json config = read_json(source + "/config.json");
  const auto heads = config["num_attention_heads"].get<size_t>();
  const auto latent = config["kv_lora_rank"].get<size_t>();
  const auto keys = config["qk_nope_head_dim"].get<size_t>();
  const auto values = config["v_head_dim"].get<size_t>();
  const std::vector<float> both =
      directory_values(model, "model.layers.1.self_attn.kv_b_proj.weight");
  const std::vector<float> key_part = file_values(file, "blk.1.attn_k_b.weight");
  const std::vector<float> value_part = file_values(file, "blk.1.attn_v_b.weight");
  EXPECT_EQ(file.find("blk.1.attn_kv_b.weight"), nullptr);
  EXPECT_EQ(file.find("blk.1.attn_k_b.weight")->shape,
            (std::vector<int64_t>{2, static_cast<int64_t>(latent), static_cast<int64_t>(keys)}));
  for (size_t head = 0; head < heads; ++head) {
    for (size_t at = 0; at < latent; ++at) {
      const auto stored = [&](size_t row) {
        return both[(head * (keys + values) + row) * latent + at];
      };
      for (size_t key = 0; key < keys; ++key) {
        EXPECT_EQ(key_part[(head * latent + at) * keys + key], stored(key));
      }
      for (size_t value = 0; value < values; ++value) {
        EXPECT_EQ(value_part[(head * values + value) * latent + at], stored(keys + value));
      }
    }
  }
}

// What has no place is stated by name, and the model's MoE layers remain.
TEST(ConvertWhole, WhatKeepsAModelFromBeingWhole_IsStated) {
  struct Case {
    const char* model;
    std::vector<std::string> more;
    const char* reason;
    const char* left_out;
  };
  for (const auto& [model, more, reason, left_out] :
       {Case{"qwen3_moe", {}, "no name for model.layers.0.mlp.", "model.embed_tokens.weight"},
        Case{"mixtral", {"--layers", "1"}, "only some of its MoE layers", "model.norm.weight"},
        Case{"dots1", {}, "as many heads of keys as of queries", "model.norm.weight"},
        Case{"exaone_moe",
             {},
             "no table of what else models of exaone_moe have",
             "model.norm.weight"},
        Case{"kimi_k2",
             {},
             "there is no tensor model.embed_tokens.weight",
             "model.layers.0.mlp.up_proj.weight"}}) {
    SCOPED_TRACE(model);
    const ScratchDirectory scratch;
    std::vector<std::string> options = kValues;
    options.insert(options.end(), more.begin(), more.end());
    const ToolResult result =
        convert(std::string("testdata/models/") + model, scratch / "out", "q8_0", options);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out.find("MoE layers alone"), std::string::npos) << result.out;
    EXPECT_NE(result.out.find(reason), std::string::npos) << result.out;
    const Json report = read_json(scratch / "out" / "conversion.json");
    EXPECT_TRUE(report["layers_alone"].get<bool>());
    const auto names = report["tensors_left_out"].get<std::vector<std::string>>();
    EXPECT_NE(std::ranges::find(names, left_out), names.end());
    EXPECT_EQ(GgufReader::open(scratch / "out" / "model.gguf").find("token_embd.weight"), nullptr);
  }
}

// A configuration may say anything of what MoE layers do not read.
TEST(ConvertWhole, ImpossibleSizes_AreReasons) {
  const Json config = read_json("testdata/models/mixtral/config.json");
  struct Case {
    const char* key;
    Json value;
  };
  for (const auto& [key, value] :
       {Case{"num_attention_heads", 0}, Case{"num_attention_heads", 1e300},
        Case{"num_attention_heads", 3}, Case{"num_key_value_heads", -1},
        Case{"num_attention_heads", "two"}, Case{"head_dim", 0.5}, Case{"vocab_size", nullptr},
        Case{"max_position_embeddings", 1e18}, Case{"rms_norm_eps", Json::array()},
        Case{"sliding_window", 128}, Case{"rope_parameters", Json::array({1})},
        Case{"rope_parameters", {{"rope_type", "llama3"}, {"rope_theta", 1e4}}},
        Case{"rope_parameters", nullptr}}) {
    SCOPED_TRACE(key + (" = " + value.dump()));
    const ScratchDirectory scratch;
    fs::create_directory(scratch / "model");
    fs::copy_file("testdata/models/mixtral/model.safetensors",
                  scratch / "model" / "model.safetensors");
    Json changed = config;
    changed[key] = value;
    std::ofstream(scratch / "model" / "config.json") << changed.dump();
    const ToolResult result =
        convert((scratch / "model").string(), scratch / "out", "q8_0", kValues);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const bool is_fine = std::string_view(key) == "vocab_size";
    EXPECT_EQ(read_json(scratch / "out" / "conversion.json")["incomplete"] == "", is_fine)
        << result.out;
  }
}

}  // namespace
}  // namespace conclave::testing
