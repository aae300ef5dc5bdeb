// Values in files of quantisation methods that mean nothing or contradict the configuration.

#include "checkpoint/golden_folder.h"
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/reference.h"
#include "conclave/tensor.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

// The error of the oracle, which reads every plane of every expert.
std::optional<Error> run_error(const TinyModel& model) {
  const TempDir directory;
  write_single(model, directory.path());
  return error_of([&] {
    const Context context({.num_threads = 1});
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    const MoeSpec& spec = checkpoint.layer(0).spec;
    const auto source = checkpoint.layer_source(0);
    const int64_t tokens = spec.num_experts;
    Tensor hidden(DType::kF32, {tokens, spec.hidden_size});
    Tensor ids(DType::kI32, {tokens, spec.top_k});
    Tensor weights(DType::kF32, {tokens, spec.top_k});
    for (int64_t i = 0; i < tokens * spec.top_k; ++i) {
      ids.as<int32_t>()[i] = static_cast<int32_t>((i / spec.top_k + i % spec.top_k) % tokens);
    }
    static_cast<void>(reference_forward(
        context, spec, *source,
        {.hidden = hidden.view(), .topk_ids = ids.view(), .topk_weights = weights.view()}));
  });
}

void expect_value_error(const TinyModel& model, const std::string& tensor,
                        ErrorCode code = ErrorCode::kTensorValue) {
  const auto error = run_error(model);
  ASSERT_TRUE(error) << tensor;
  EXPECT_EQ(error->code(), code) << error->what();
  // A value within a text of a tensor has its path in that, and the tensor beside the file.
  const bool is_named = error->detail().tensor.starts_with(tensor) ||
                        error->detail().file.find(tensor) != std::string::npos;
  EXPECT_TRUE(is_named) << error->what();
  EXPECT_NE(error->detail().file.find(".safetensors"), std::string::npos) << error->what();
}

template <class T>
void set(TinyModel& model, const std::string& name, size_t index, T value) {
  std::memcpy(model.at(name).bytes.data() + index * sizeof(T), &value, sizeof(T));
}

constexpr const char* kQwen = "model.layers.0.mlp.experts.1.up_proj.";
constexpr const char* kMixtral = "model.layers.0.block_sparse_moe.experts.1.w3.";

// Words, bytes, and a number by itself where a matrix has one scale.
TEST(QuarkValues, ZeroPointsOfSymmetricCodes_AreNamed) {
  const auto changed = [](const char* folder, const std::string& module, const auto& value) {
    TinyModel model = golden_folder(folder);
    EXPECT_FALSE(run_error(model)) << folder;
    set(model, module + "weight_zero_point", 0, value);
    expect_value_error(model, module + "weight_zero_point");
  };
  changed("qwen3_moe-quark-int4", kQwen, int32_t{0x100});
  changed("qwen3_moe-quark-channel-int4", kQwen, int32_t{0x100});
  changed("qwen3_moe-quark-int8-token", kQwen, int8_t{-1});
  changed("mixtral-quark-int8-static", kMixtral, int8_t{1});
}

TEST(QuarkValues, ZeroPointsOfAsymmetricCodes_Count) {
  TinyModel model = golden_folder("mixtral-quark-uint8");
  set(model, std::string(kMixtral) + "weight_zero_point", 0, uint8_t{0});
  EXPECT_FALSE(run_error(model));
}

TEST(GptqValues, AsTheyAre_AreRead) {
  const auto error = run_error(golden_folder("qwen3_moe-gptq-int4-order"));
  EXPECT_FALSE(error) << error->what();
}

TEST(GptqValues, GroupsOutOfRange_AreNamed) {
  for (const int32_t group : {-1, 100, 1 << 30}) {
    TinyModel model = golden_folder("qwen3_moe-gptq-int4-order");
    set(model, std::string(kQwen) + "g_idx", 5, group);
    expect_value_error(model, std::string(kQwen) + "g_idx");
  }
}

// Stores an order of columns in 64 bits.
void widen(TinyTensor& order) {
  std::vector<int32_t> groups(order.bytes.size() / sizeof(int32_t));
  std::memcpy(groups.data(), order.bytes.data(), order.bytes.size());
  const std::vector<int64_t> wide(groups.begin(), groups.end());
  order.dtype = DType::kI64;
  order.bytes.resize(wide.size() * sizeof(int64_t));
  std::memcpy(order.bytes.data(), wide.data(), order.bytes.size());
}

TEST(GptqValues, WideGroupsOutOfRange_AreNamed) {
  TinyModel model = golden_folder("qwen3_moe-gptq-int4-order");
  for (TinyTensor& tensor : model.tensors) {
    if (tensor.name.ends_with("g_idx")) widen(tensor);
  }
  const auto error = run_error(model);
  EXPECT_FALSE(error) << error->what();
  for (const int64_t group : {int64_t{1} << 32, -(int64_t{1} << 32)}) {
    set(model, std::string(kQwen) + "g_idx", 5, group);
    expect_value_error(model, std::string(kQwen) + "g_idx");
  }
}

TEST(GptqValues, AnOrderThatTheConfigurationDenies_IsNamed) {
  TinyModel model = golden_folder("qwen3_moe-gptq-int4-group32");
  set(model, std::string(kQwen) + "g_idx", 0, int32_t{1});
  expect_value_error(model, std::string(kQwen) + "g_idx");
}

TEST(GptqValues, ZeroPointsThatTheConfigurationDenies_AreNamed) {
  TinyModel model = golden_folder("qwen3_moe-gptq-int4-group32");
  set(model, std::string(kQwen) + "qzeros", 0, uint32_t{0x77777776});
  expect_value_error(model, std::string(kQwen) + "qzeros");
}

TEST(GptqValues, TheLargestZeroOfTheFirstVersion_WrapsToNought) {
  TinyModel model = golden_folder("qwen3_moe-gptq-int8-asymmetric");
  set(model, std::string(kQwen) + "qzeros", 0, uint32_t{0x000000ff});
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const auto zeros =
      read_matrix(*checkpoint.layer_source(0), weights::kUp.with(WeightPlane::kZero), /*expert=*/1);
  float first = 0;
  std::memcpy(&first, zeros.data(), sizeof(first));
  EXPECT_EQ(first, -128);
}

// Files that are older than quantization_config say the same beside config.json.
TEST(OlderFiles, DescribeTheMethodBesideTheConfiguration) {
  const auto described = [](const std::string& name, const std::string& beside,
                            const nlohmann::json& text) {
    TinyModel model = golden_folder(name);
    model.config.erase("quantization_config");
    const TempDir directory;
    write_single(model, directory.path());
    write_text(directory / beside, text.dump());
    return Checkpoint::open(directory.path()).layer(0).spec;
  };
  const MoeSpec gptq =
      described("qwen3_moe-gptq-int4-group32", "quantize_config.json",
                {{"bits", 4}, {"group_size", 32}, {"desc_act", false}, {"sym", true}});
  EXPECT_EQ(gptq.weight_dtype, DType::kI4);
  EXPECT_EQ(gptq.quant.zeros, WeightZero::kNone);
  const MoeSpec awq =
      described("qwen3_moe-awq-group32", "quant_config.json",
                {{"zero_point", true}, {"q_group_size", 32}, {"w_bit", 4}, {"version", "GEMM"}});
  EXPECT_EQ(awq.weight_dtype, DType::kI4);
  EXPECT_EQ(awq.quant.zeros, WeightZero::kPoint);
}

TEST(AwqValues, ZeroPointsThatTheConfigurationDenies_AreNamed) {
  TinyModel model = golden_folder("mixtral-awq-symmetric");
  set(model, std::string(kMixtral) + "qzeros", 1, uint32_t{0x88888889});
  expect_value_error(model, std::string(kMixtral) + "qzeros");
}

TEST(BitsandbytesValues, AnotherTable_IsNamed) {
  TinyModel model = golden_folder("qwen3_moe-bnb-nf4");
  set(model, std::string(kQwen) + "weight.quant_map", 3, -0.4F);
  expect_value_error(model, std::string(kQwen) + "weight.quant_map");
}

TEST(BitsandbytesValues, StatesThatMeanNothing_AreNamed) {
  const std::string name = std::string(kQwen) + "weight.quant_state.bitsandbytes__nf4";
  const auto with_state = [&](const std::string& text) {
    TinyModel model = golden_folder("qwen3_moe-bnb-nf4");
    model.drop(name);
    TinyTensor& state = model.add(name, DType::kU8, {static_cast<int64_t>(text.size())});
    std::memcpy(state.bytes.data(), text.data(), text.size());
    return model;
  };
  const auto valid = [](const std::string& shape, int64_t block) {
    return R"({"quant_type": "nf4", "blocksize": )" + std::to_string(block) + R"(, "shape": )" +
           shape + "}";
  };
  EXPECT_FALSE(run_error(with_state(valid("[64, 128]", 64))));
  expect_value_error(with_state(valid("[128, 64]", 64)), name, ErrorCode::kTensorShape);
  expect_value_error(with_state(valid("[64, 128]", 96)), name, ErrorCode::kUnsupportedQuantization);
  const std::string scales = std::string(kQwen) + "weight.absmax";
  expect_value_error(with_state(valid("[64, 128]", 128)), scales, ErrorCode::kTensorShape);
  expect_value_error(with_state(valid("[64, 128]", 32)), name, ErrorCode::kUnsupportedQuantization);
  expect_value_error(with_state("{}"), name, ErrorCode::kConfigMissingKey);
  for (const std::string& broken :
       {std::string("{"), std::string(5000, '['), std::string("\xff")}) {
    const auto error = run_error(with_state(broken));
    ASSERT_TRUE(error);
    EXPECT_NE(error->detail().file.find(name), std::string::npos) << error->what();
  }
}

// 33 columns make as many groups of 96 as 32 do.
TEST(GroupsOfColumns, ThatDoNotFillRows_NameTheKey) {
  using Json = nlohmann::json;
  const auto refused = [](const char* folder, const Json::json_pointer& key) {
    SCOPED_TRACE(folder);
    TinyModel model = golden_folder(folder);
    ASSERT_TRUE(model.config.contains(key));
    model.config[key] = 33;
    model.config.erase("quantization");  // MLX has its settings there once more
    const TempDir directory;
    write_single(model, directory.path());
    const auto error = open_error(directory.path());
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kConfigValue) << error->what();
    EXPECT_TRUE(error->detail().file.ends_with("config.json")) << error->what();
    EXPECT_TRUE(error->detail().tensor.ends_with("group_size")) << error->what();
    EXPECT_EQ(error->detail().found, "33");
    EXPECT_TRUE(error->detail().limit.starts_with("a divisor of ")) << error->what();
  };
  const Json::json_pointer flat("/quantization_config/group_size");
  const Json::json_pointer in_group(
      "/quantization_config/config_groups/group_0/weights/group_size");
  refused("qwen3_moe-awq-group32", flat);
  refused("qwen3_moe-awq-gemv", flat);
  refused("qwen3_moe-compressed-int4-group32", in_group);
  refused("qwen3_moe-compressed-mxfp4", in_group);
  refused("qwen3_moe-compressed-mxfp8", in_group);
  refused("qwen3_moe-mlx-4bit", flat);
}

TEST(CompressedTensorsValues, DivisorsThatDivideNothing_AreNamed) {
  const std::string name = "model.layers.0.block_sparse_moe.experts.1.w3.weight_global_scale";
  for (const float bad : {0.0F, -1.0F, std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    TinyModel model = golden_folder("mixtral-compressed-nvfp4");
    set(model, name, 0, bad);
    expect_value_error(model, name);
  }
}

}  // namespace
}  // namespace conclave::testing
