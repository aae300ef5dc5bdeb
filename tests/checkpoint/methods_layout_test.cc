// The tensors that a method is said to have are those of the files that its own package wrote.
#include "checkpoint/golden_folder.h"
#include "checkpoint/tiny_model.h"

#include "conclave/methods.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using Use = MethodTensor::Use;

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator("testdata/quantised")) {
    // Those have a scheme for each module, stacks, an unusual type, or a part of their
    // configuration elsewhere.
    const std::string name = entry.path().filename().string();
    const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
    if (!entry.is_directory() || has("mixed") || has("stacked") || has("fp4-wide") ||
        has("deepseek_v4") || has("bf16-storage")) {
      continue;
    }
    names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::optional<nlohmann::json> quantization_of(const TinyModel& model) {
  for (const char* key : {"quantization_config", "quantization"}) {
    if (model.config.contains(key)) return model.config[key];
  }
  return std::nullopt;
}

// Without axes of one, which scales have or not.
std::vector<int64_t> squeezed(std::vector<int64_t> shape) {
  std::erase(shape, 1);
  return shape;
}

class LayoutOf : public ::testing::TestWithParam<std::string> {};

TEST_P(LayoutOf, Tensors_AreThoseOfTheFile) {
  const TinyModel model = golden_folder(GetParam());
  const auto quantization = quantization_of(model);
  if (!quantization) GTEST_SKIP() << "config.json names no method";
  if (GetParam().find("-blocks") != std::string::npos) {
    GTEST_SKIP() << "the tensors alone tell the size of the blocks";
  }
  const bool mixtral = GetParam().starts_with("mixtral");
  const bool mlx = GetParam().find("mlx") != std::string::npos;
  const bool stack = mlx || GetParam().starts_with("gpt_oss");
  std::string matrix = mixtral ? "block_sparse_moe.experts.1.w2" : "mlp.experts.1.down_proj";
  if (stack) matrix = mlx ? "mlp.switch_mlp.down_proj" : "mlp.experts.down_proj";
  const char* inner_key =
      mixtral || GetParam().starts_with("gpt_oss") ? "intermediate_size" : "moe_intermediate_size";
  const int64_t hidden = model.config["hidden_size"];
  const int64_t inner = model.config[inner_key];
  const auto find = [&](const std::string& name) {
    return std::ranges::find_if(
        model.tensors, [&](const TinyTensor& tensor) { return tensor.name.ends_with("." + name); });
  };
  const std::string name = matrix + (GetParam().starts_with("gpt_oss") ? "" : ".weight");
  const MethodLayout layout = method_layout(quantization->dump(), name, hidden, inner);
  ASSERT_EQ(layout.reason, "");
  std::set<WeightPlane> planes;
  for (const MethodTensor& tensor : layout.tensors) {
    if (tensor.use != Use::kPlane) continue;
    EXPECT_TRUE(planes.insert(tensor.plane).second) << tensor.name;
    const auto stored = find(tensor.name);
    ASSERT_NE(stored, model.tensors.end()) << tensor.name;
    std::vector<int64_t> shape = stored->shape;
    if (stack) shape.erase(shape.begin());
    EXPECT_EQ(squeezed(shape), squeezed(tensor.shape)) << tensor.name;
    EXPECT_TRUE(std::ranges::find(tensor.dtypes, stored->dtype) != tensor.dtypes.end())
        << tensor.name;
  }
  EXPECT_TRUE(planes.contains(WeightPlane::kWeights));
}

INSTANTIATE_TEST_SUITE_P(Golden, LayoutOf, ::testing::ValuesIn(golden_names()),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

TEST(MethodLayout, Axes_AreThoseOfRowsAndColumns) {
  const std::string config =
      R"({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": false, "sym": false})";
  const MethodLayout layout = method_layout(config, "w1.weight", 64, 96);
  EXPECT_EQ(layout.method, "gptq");
  EXPECT_EQ(layout.codes, DType::kI4);
  EXPECT_EQ(layout.code_bits, 4);
  ASSERT_EQ(layout.tensors.size(), 4U);
  const MethodTensor& codes = layout.tensors[0];
  EXPECT_EQ(codes.name, "w1.qweight");
  EXPECT_EQ(codes.shape, (std::vector<int64_t>{12, 64}));
  EXPECT_EQ(codes.rows_axis, 1);
  EXPECT_EQ(codes.cols_axis, 0);
  const MethodTensor& zeros = layout.tensors[1];
  EXPECT_EQ(zeros.name, "w1.qzeros");
  EXPECT_EQ(zeros.shape, (std::vector<int64_t>{3, 8}));
  EXPECT_EQ(zeros.rows_axis, 1);
  EXPECT_EQ(zeros.cols_axis, 0);
  const MethodTensor& order = layout.tensors[3];
  EXPECT_EQ(order.name, "w1.g_idx");
  EXPECT_EQ(order.use, Use::kInput);
  EXPECT_EQ(order.rows_axis, -1);
  EXPECT_EQ(order.cols_axis, 0);
}

// The layout of a configuration, of any matrix.
MethodLayout layout_of(const nlohmann::json& config) {
  return method_layout(config.dump(), "w1.weight", 256, 256);
}

TEST(MethodLayout, Rows_AreThoseOfTheConfiguration) {
  struct Case {
    nlohmann::json config;
    WeightScale weights;
    ActivationScale rows;
  };
  const auto modelopt = [](const char* algorithm) {
    return nlohmann::json{{"quant_method", "modelopt"}, {"quant_algo", algorithm}};
  };
  const std::vector<Case> cases = {
      {{{"quant_method", "fp8"}}, WeightScale::kTensor, ActivationScale::kToken},
      {{{"quant_method", "fp8"}, {"activation_scheme", "static"}},
       WeightScale::kTensor,
       ActivationScale::kTensorStatic},
      {{{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}},
       WeightScale::kBlock,
       ActivationScale::kGroup},
      {modelopt("FP8"), WeightScale::kTensor, ActivationScale::kTensorStatic},
      {modelopt("FP8_PER_CHANNEL_PER_TOKEN"), WeightScale::kChannel, ActivationScale::kToken},
      {modelopt("FP8_PB_WO"), WeightScale::kBlock, ActivationScale::kNone}};
  for (const Case& test : cases) {
    SCOPED_TRACE(test.config.dump());
    const MethodLayout layout = layout_of(test.config);
    EXPECT_EQ(layout.reason, "");
    EXPECT_EQ(layout.codes, DType::kF8E4M3);
    EXPECT_EQ(layout.quant.weights, test.weights);
    EXPECT_EQ(layout.quant.activations, test.rows);
    EXPECT_FALSE(layout.has_module_schemes);
  }
}

TEST(MethodLayout, SchemesOfModules_AreSaid) {
  nlohmann::json config = {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}};
  EXPECT_FALSE(layout_of(config).has_module_schemes);
  config["dynamic"] = {{"+:.*down_proj.*", {{"bits", 8}}}};
  EXPECT_TRUE(layout_of(config).has_module_schemes);
}

// The layout of modules by the rules of a configuration, which hold in this order.
MethodLayout layout_by(const char* rules, const std::vector<std::string>& modules) {
  const std::string config =
      R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": )";
  return method_layout(config + rules + "}", "w1.weight", 256, 256, modules);
}

TEST(MethodLayout, Modules_HaveWhatTheFirstRuleSays) {
  const std::vector<std::string> third = {"model.layers.3.mlp.experts.0.up_proj",
                                          "model.layers.3.mlp.experts.1.down_proj"};
  const auto bits = [&](const char* rules) { return layout_by(rules, third).code_bits; };
  EXPECT_EQ(bits("{}"), 4);
  EXPECT_EQ(bits(R"({"+:.*layers\\.4\\..*": {"bits": 8}})"), 4);
  EXPECT_EQ(bits(R"({".*experts": {"bits": 8}, "+:.*": {"bits": 2}})"), 8);
  EXPECT_EQ(bits(R"({"+:.*experts": {"bits": 8}, "-:.*": {}})"), 8);
  const MethodLayout own = layout_by(R"({".*\\.3\\.": {"group_size": 32, "sym": true}})", third);
  EXPECT_EQ(own.quant.block_cols, 32);
  EXPECT_EQ(own.quant.zeros, WeightZero::kNone);
  EXPECT_FALSE(own.has_module_schemes);
  EXPECT_FALSE(own.leaves_out);
  EXPECT_EQ(own.tensors.front().shape, (std::vector<int64_t>{32, 256}));
}

TEST(MethodLayout, ModulesThatStayAsTheyAre_HaveNoTensors) {
  const std::vector<std::string> modules = {"model.layers.3.mlp.experts.0.up_proj"};
  for (const char* rules : {R"({"-:.*experts": {}})", R"({"-:.*": {}, "+:.*": {"bits": 8}})"}) {
    const MethodLayout layout = layout_by(rules, modules);
    EXPECT_TRUE(layout.leaves_out) << rules;
    EXPECT_EQ(layout.reason, "") << rules;
    EXPECT_TRUE(layout.tensors.empty()) << rules;
  }
  EXPECT_FALSE(layout_by(R"({"-:.*": {}})", {}).leaves_out);
}

// MLX names each of them, more than there may be rules.
TEST(MethodLayout, ModulesOfMlxThatAreFalse_HaveNoTensors) {
  nlohmann::json config = {{"bits", 4}, {"group_size", 64}};
  const auto name = [](int layer) {
    return "model.layers." + std::to_string(layer) + ".mlp.switch_mlp.down_proj";
  };
  for (int layer = 1; layer <= 300; ++layer) config[name(layer)] = layer % 2 == 0;
  const auto layout = [&](int layer) {
    const std::vector<std::string> modules = {name(layer)};
    return method_layout(config.dump(), "down_proj.weight", 256, 256, modules);
  };
  EXPECT_TRUE(layout(299).leaves_out);
  EXPECT_EQ(layout(299).reason, "");
  for (const int layer : {0, 300}) {
    EXPECT_FALSE(layout(layer).leaves_out) << layer;
    EXPECT_EQ(layout(layer).code_bits, 4) << layer << ": " << layout(layer).reason;
  }
}

TEST(MethodLayout, ModulesThatDiffer_AreNamed) {
  const std::string up = "model.layers.3.mlp.experts.0.up_proj";
  const std::string down = "model.layers.3.mlp.experts.0.down_proj";
  for (const char* rules : {R"({".*down_proj": {"bits": 8}})", R"({"-:.*down_proj": {}})",
                            R"({"+:.*up": {"sym": true}})"}) {
    const std::string reason = layout_by(rules, {up, down}).reason;
    EXPECT_NE(reason.find(down), std::string::npos) << rules << ": " << reason;
  }
  EXPECT_EQ(layout_by(R"({".*down_proj": {"damp_percent": 0.1}})", {up, down}).reason, "");
}

TEST(MethodLayout, OrdersOfKernels_AreNamed) {
  const nlohmann::json gptq = {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}};
  const auto order = [](nlohmann::json config, const char* key, const nlohmann::json& value) {
    config[key] = value;
    const MethodLayout layout = layout_of(config);
    EXPECT_NE(layout.reason, "");
    return layout.kernel_order;
  };
  EXPECT_EQ(order(gptq, "checkpoint_format", "exllama"), "exllama");
  EXPECT_EQ(order(gptq, "is_marlin_format", true), "marlin");
  EXPECT_EQ(order(gptq, "is_bitblas_format", true), "bitblas");
  EXPECT_EQ(order(gptq, "quant_method", "gptq_marlin_24"), "marlin's for 2:4 sparse weights");
  EXPECT_EQ(order({{"quant_method", "awq"}}, "version", "GEMV_fast"), "awq of version gemv_fast");
  EXPECT_EQ(order({{"quant_method", "compressed-tensors"}}, "format", "marlin-24"),
            "marlin's for 2:4 sparse weights");
  EXPECT_EQ(order(gptq, "bits", 5), "");
  EXPECT_EQ(order(gptq, "quant_method", "hqq"), "");
}

TEST(KeptModules, KeysOfEveryMethod_Count) {
  using Names = std::vector<std::string>;
  const auto kept = [](const nlohmann::json& config) { return kept_modules(config.dump()); };
  for (const char* key : {"ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules",
                          "exclude", "llm_int8_skip_modules"}) {
    EXPECT_EQ(kept({{"quant_method", "hqq"}, {key, {"lm_head", "re:.*gate"}}}),
              (Names{"lm_head", "re:.*gate"}))
        << key;
    EXPECT_EQ(kept({{key, nullptr}}), Names()) << key;
  }
  EXPECT_EQ(kept({{"quantization", {{"exclude_modules", nlohmann::json::array({"*.gate"})}}}}),
            (Names{"*.gate"}));
  EXPECT_EQ(kept({{"dynamic", {{"-:.*gate", {}}, {"+:.*up", {{"bits", 8}}}, {".*down", {}}}}}),
            (Names{"re:.*gate"}));
  EXPECT_EQ(kept({{"dynamic", true}}), Names());
}

TEST(KeptModules, WhatIsNoListOfNames_IsAnError) {
  for (const char* config : {R"({"ignore": "lm_head"})", R"({"ignore": [1]})", "[]"}) {
    const auto error = error_of([&] { static_cast<void>(kept_modules(config)); });
    ASSERT_TRUE(error) << config;
    EXPECT_EQ(error->code(), ErrorCode::kJsonType) << error->what();
  }
  const auto error = error_of([] { static_cast<void>(kept_modules(R"({"exclude": [1]})")); });
  EXPECT_NE(std::string(error->what()).find("exclude[0]"), std::string::npos) << error->what();
}

TEST(MethodLayout, WhatIsNotRead_HasAReason) {
  EXPECT_NE(method_layout(R"({"quant_method": "hqq"})", "w1.weight", 8, 8).reason, "");
  EXPECT_NE(method_layout(R"({"quant_method": "nonsense"})", "w1.weight", 8, 8).reason, "");
  EXPECT_THROW(method_layout("{", "w1.weight", 8, 8), Error);
}

}  // namespace
}  // namespace conclave::testing
