// Tests bad input through the command line: the message, word for word, and the exit code.
#include "tool_process.h"

#include "conclave/safetensors.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fstream>
#include <functional>

namespace conclave::testing {
namespace {

// Returns the message with the scratch directory's own name replaced by DIR.
std::string message(const ToolResult& result, const ScratchDirectory& scratch) {
  std::string text = result.err;
  const std::string name = scratch.path().string();
  for (size_t at; (at = text.find(name)) != std::string::npos;)
    text.replace(at, name.size(), "DIR");
  return text;
}

class DamagedModel : public ::testing::Test {
 protected:
  DamagedModel() : model_(scratch_ / "model") { copy_model("qwen3-moe-tiny", model_); }

  void edit_index(const std::function<void(nlohmann::json&)>& change) {
    const std::filesystem::path path = model_ / "model.safetensors.index.json";
    nlohmann::json index = nlohmann::json::parse(read_text(path));
    change(index["weight_map"]);
    write_text(path, index.dump());
  }

  // Every command that opens a model refuses it in the same way, with nothing on stdout.
  void expect_refused(const std::string& expected) {
    for (const char* command : {"run", "inspect", "verify"}) {
      const ToolResult result = run_tool({command, model_.string()});
      EXPECT_EQ(result.exit_code, 3) << command;
      EXPECT_EQ(result.out, "") << command;
      EXPECT_EQ(message(result, scratch_), expected) << command;
    }
  }

  ScratchDirectory scratch_;
  std::filesystem::path model_;
};

TEST_F(DamagedModel, TruncatedShard_IsNamed) {
  const std::filesystem::path shard = model_ / "model-00002-of-00005.safetensors";
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 100);
  expect_refused(
      "conclave: error [kSafetensorsTruncatedData]: the file ends before the tensor does\n"
      "  file:     DIR/model/model-00002-of-00005.safetensors\n"
      "  tensor:   \"model.layers.1.mlp.experts.9.down_proj.weight\"\n"
      "  expected: 565992 bytes\n"
      "  found:    565892 bytes\n"
      "  hint:     the file is damaged or its download was cut off; fetch it again\n");
}

TEST_F(DamagedModel, ShardPathThatEscapes_IsNotOpened) {
  edit_index([](nlohmann::json& map) { map["lm_head.weight"] = "../../etc/passwd"; });
  expect_refused(
      "conclave: error [kPathEscape]: a file name contains a path\n"
      "  file:     DIR/model/model.safetensors.index.json\n"
      "  tensor:   lm_head.weight\n"
      "  expected: the plain name of a file in the model directory\n"
      "  found:    \"../../etc/passwd\"\n"
      "  hint:     the index is damaged or hostile: nothing outside the directory was opened\n");
}

TEST_F(DamagedModel, IndexNamingAMissingTensor_IsRefused) {
  edit_index([](nlohmann::json& map) {
    map["model.layers.0.mlp.experts.60.up_proj.weight"] = "model-00001-of-00005.safetensors";
  });
  expect_refused(
      "conclave: error [kIndexTensorMissing]: the index lists a tensor that its shard does not "
      "hold\n"
      "  file:     DIR/model/model.safetensors.index.json\n"
      "  tensor:   model.layers.0.mlp.experts.60.up_proj.weight\n"
      "  expected: in model-00001-of-00005.safetensors\n"
      "  found:    123 other tensors there\n"
      "  hint:     index and shards come from different saves: fetch the whole model again\n");
}

TEST_F(DamagedModel, MissingShard_IsNamed) {
  std::filesystem::remove(model_ / "model-00003-of-00005.safetensors");
  const ToolResult result = run_tool({"inspect", model_.string()});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("expected: model-00003-of-00005.safetensors"), std::string::npos)
      << result.err;
}

TEST_F(DamagedModel, BrokenConfig_IsASyntaxError) {
  write_text(model_ / "config.json", "{\"model_type\": ");
  const ToolResult result = run_tool({"inspect", model_.string()});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("error [kJsonSyntax]"), std::string::npos) << result.err;
}

TEST_F(DamagedModel, UnknownFamily_ListsTheKnownOnes) {
  write_text(model_ / "config.json", R"({"model_type": "gpt2_moe", "num_experts": 2})");
  const ToolResult result = run_tool({"inspect", model_.string()});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("error [kUnknownArchitecture]"), std::string::npos) << result.err;
  for (const char* known : {"deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"}) {
    EXPECT_NE(result.err.find(known), std::string::npos) << known;
  }
}

TEST_F(DamagedModel, DenseModel_HasNoMoeLayers) {
  write_text(model_ / "config.json",
             R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8})");
  const ToolResult result = run_tool({"run", model_.string()});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.err.substr(0, result.err.find('\n')),
            "conclave: error [kUnknownArchitecture]: the model has no MoE layers: no key of its "
            "configuration speaks of experts");
  EXPECT_NE(result.err.find("found:    model_type \"llama\""), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find("nearest"), std::string::npos) << result.err;
}

TEST(BadInput, NameOnAHub_HintsAtALocalDirectory) {
  const ToolResult result = run_tool({"run", "Qwen/Qwen3-30B-A3B"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("error [kFileNotFound]: no such directory\n"), std::string::npos)
      << result.err;
  EXPECT_NE(result.err.find("Hugging Face hub: download it"), std::string::npos) << result.err;
  for (const char* path : {"./none", "/none/none", "none", "testdata/none", "none/a/b"}) {
    const std::string err = run_tool({"inspect", path}).err;
    EXPECT_EQ(err.find("hub"), std::string::npos) << err;
  }
}

TEST(BadInput, MissingDirectory_IsNamed) {
  const ToolResult result = run_tool({"run", "testdata/none"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.err,
            "conclave: error [kFileNotFound]: no such file or directory\n"
            "  file:     testdata/none\n");
}

TEST(BadInput, LayerThatDoesNotExist_IsNamedWithTheOnesThatDo) {
  const ToolResult result = run_tool({"run", bundled("mixtral-tiny"), "--layers", "99"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err,
            "conclave: error [kLayerNotFound]: the model has no layer 99\n"
            "  file:     testdata/mixtral-tiny\n"
            "  expected: one of its MoE layers 0 to 1\n"
            "  found:    99\n"
            "  limit:    2 layers, 0 to 1\n");
}

TEST(BadInput, DenseLayer_IsNoMoeLayer) {
  const ToolResult result = run_tool({"run", bundled("qwen2-moe-tiny"), "--layers", "1"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("error [kLayerNotFound]"), std::string::npos) << result.err;
}

TEST(BadInput, InputOfWrongWidth_NamesFileTensorAndShapes) {
  const std::string input = bundled("olmoe-tiny") + "/reference.safetensors";
  const ToolResult result = run_tool({"run", bundled("mixtral-tiny"), "--input", input});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err,
            "conclave: error [kTensorShape]: the tensor's shape does not fit the layer\n"
            "  file:     testdata/olmoe-tiny/reference.safetensors\n"
            "  tensor:   layers.0.hidden_states\n"
            "  expected: [*, 72] (tokens x hidden size)\n"
            "  found:    [13, 64]\n");
}

TEST(BadInput, ReferenceWithOtherTokens_NamesBothCounts) {
  const std::string reference = bundled("mixtral-tiny") + "/reference.safetensors";
  const ToolResult result =
      run_tool({"run", bundled("mixtral-tiny"), "--random", "3", "--reference", reference});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("  expected: [3, 72] (tokens x hidden size)\n"
                            "  found:    [16, 72]\n"),
            std::string::npos)
      << result.err;
}

TEST(BadInput, InputThatIsNoSafetensors_IsRecognised) {
  const ToolResult result = run_tool(
      {"run", bundled("mixtral-tiny"), "--input", bundled("mixtral-tiny") + "/config.json"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("error [kSafetensors"), std::string::npos) << result.err;
}

TEST(BadInput, InputWithoutHiddenStates_SaysWhatItHolds) {
  const ScratchDirectory scratch;
  const std::string file = (scratch / "in.safetensors").string();
  const Tensor tensor(DType::kF32, {2, 72});
  const NamedTensor named{"states", tensor.view()};
  save_safetensors(file, {&named, 1});
  const ToolResult result = run_tool({"run", bundled("mixtral-tiny"), "--input", file});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(message(result, scratch),
            "conclave: error [kTensorMissing]: the file does not hold a tensor that is needed\n"
            "  file:     DIR/in.safetensors\n"
            "  tensor:   layers.0.hidden_states\n"
            "  found:    states\n"
            "  hint:     a tensor named hidden_states feeds every layer\n");
}

TEST(BadInput, InputOfIntegers_IsATypeError) {
  const ScratchDirectory scratch;
  const std::string file = (scratch / "in.safetensors").string();
  const Tensor tensor(DType::kI32, {2, 72});
  const NamedTensor named{"hidden_states", tensor.view()};
  save_safetensors(file, {&named, 1});
  const ToolResult result = run_tool({"run", bundled("mixtral-tiny"), "--input", file});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("  expected: F32 or F16 or BF16\n  found:    I32\n"), std::string::npos)
      << result.err;
}

// The layer checks ids from a file, and names token and slot.
TEST(BadInput, ExpertIdOutOfRange_IsRefused) {
  const ScratchDirectory scratch;
  const std::string file = (scratch / "in.safetensors").string();
  const Tensor hidden(DType::kF32, {2, 72});
  Tensor ids(DType::kI32, {2, 2});
  ids.as<int32_t>()[3] = 8;
  const Tensor weights(DType::kF32, {2, 2});
  const NamedTensor tensors[] = {{"layers.0.hidden_states", hidden.view()},
                                 {"layers.0.topk_ids", ids.const_view()},
                                 {"layers.0.topk_weights", weights.view()}};
  save_safetensors(file, tensors);
  const ToolResult result = run_tool(
      {"run", bundled("mixtral-tiny"), "--layers", "0", "--input", file, "--routing", "file"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("error [kExpertId]"), std::string::npos) << result.err;
}

TEST(BadInput, OutputThatCannotBeWritten_IsAResourceErrorBeforeAnyWork) {
  const ToolResult result =
      run_tool({"run", bundled("mixtral-tiny"), "--output", "testdata/none/out.safetensors"});
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find("error [kFileWrite]"), std::string::npos) << result.err;
}

TEST(BadInput, FailedRun_LeavesNoOutputFile) {
  const ScratchDirectory scratch;
  const std::string file = (scratch / "out.safetensors").string();
  // The second layer's input is missing.
  const std::string input = (scratch / "in.safetensors").string();
  const Tensor hidden(DType::kF32, {2, 72});
  const NamedTensor named{"layers.0.hidden_states", hidden.view()};
  save_safetensors(input, {&named, 1});
  const ToolResult result =
      run_tool({"run", bundled("mixtral-tiny"), "--input", input, "--output", file});
  EXPECT_EQ(result.exit_code, 3);
  std::filesystem::remove(input);
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
}

TEST(BadInput, BadEnvironment_IsAUsageError) {
  const ToolResult result =
      run_tool({"run", bundled("mixtral-tiny")}, {.environment = {"CONCLAVE_NUM_THREADS=many"}});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("CONCLAVE_NUM_THREADS"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace conclave::testing
