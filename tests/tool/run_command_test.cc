// Runs conclave run and verify on the bundled checkpoints.
#include "tool_process.h"

#include "conclave/safetensors.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace conclave::testing {
namespace {

using Json = nlohmann::json;

std::vector<std::string> run_arguments(const std::string& model,
                                       std::vector<std::string> more = {}) {
  const std::string reference = bundled(model) + "/reference.safetensors";
  std::vector<std::string> arguments = {"run",         bundled(model), "--input",       reference,
                                        "--reference", reference,      "--repetitions", "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class BundledModel : public ::testing::TestWithParam<const char*> {};

TEST_P(BundledModel, Run_IsWithinToleranceOfItsReference) {
  const ToolResult result = run_tool(run_arguments(GetParam(), {"--format", "json"}));
  ASSERT_EQ(result.exit_code, 0) << result.err << result.out;
  const Json document = Json::parse(result.out);
  EXPECT_TRUE(document["total"]["ok"]);
  for (const Json& layer : document["layers"]) {
    EXPECT_LE(layer["worst_error"], layer["tolerance"]);
    EXPECT_EQ(layer["routing_mismatches"], 0);
    EXPECT_EQ(layer["tokens"], layer["tokens_checked"]);
    EXPECT_GE(layer["balance"], 1.0);
    EXPECT_GT(layer["gflops"], 0.0);
  }
}

TEST_P(BundledModel, Verify_PassesEveryStage) {
  const ToolResult result = run_tool({"verify", bundled(GetParam()), "--format", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err << result.out;
  const Json report = Json::parse(result.out);
  for (const Json& layer : report["layers"]) {
    EXPECT_TRUE(layer["ok"]);
    EXPECT_EQ(layer["routing_mismatches"], 0);
  }
}

// PEFT's own results, on the recorded inputs and routing.
TEST(Adapters, Run_GivesTheResultsOfPeft) {
  for (const std::string model : {"mixtral-tiny", "qwen2-moe-tiny"}) {
    const std::string adapter = "testdata/adapters/" + model;
    const auto run = [&](std::vector<std::string> more) {
      std::vector<std::string> arguments = {
          "run",           bundled(model),
          "--input",       bundled(model) + "/reference.safetensors",
          "--routing",     "file",
          "--reference",   adapter + "/reference.safetensors",
          "--repetitions", "1"};
      arguments.insert(arguments.end(), more.begin(), more.end());
      return run_tool(arguments);
    };
    const ToolResult adapted = run({"--adapter", adapter});
    EXPECT_EQ(adapted.exit_code, 0) << adapted.err << adapted.out;
    EXPECT_NE(adapted.out.find("adapter: " + adapter), std::string::npos) << adapted.out;
    EXPECT_NE(run({}).exit_code, 0);
    const ToolResult split = run({"--adapter", adapter, "--ranks", "2"});
    EXPECT_EQ(split.exit_code, 0) << split.err << split.out;
    const ToolResult verified = run_tool({"verify", bundled(model), "--adapter", adapter});
    EXPECT_EQ(verified.exit_code, 0) << verified.err << verified.out;
  }
  const ToolResult other = run_tool(
      {"verify", bundled("qwen2-moe-tiny"), "--adapter", "testdata/adapters/mixtral-tiny"});
  EXPECT_EQ(other.exit_code, 3);
  EXPECT_NE(other.err.find("kLayerNotFound"), std::string::npos) << other.err;
}

// The same codes of rows on both sides: beside plain rows the output would be off by a hundredth.
TEST(Verify, RowsOfInt8_AreComparedWithRowsCodedLikewise) {
  for (const std::string model : {"testdata/quantised/qwen3_moe-compressed-int4-group32",
                                  "testdata/gguf/llama-q4_0/model.gguf"}) {
    const auto worst_error = [&](std::vector<std::string> more) {
      std::vector<std::string> arguments = {"verify", model, "--format", "json"};
      arguments.insert(arguments.end(), more.begin(), more.end());
      const ToolResult result = run_tool(arguments);
      EXPECT_EQ(result.exit_code, 0) << result.err << result.out;
      return Json::parse(result.out)["layers"][0]["worst_error"].get<double>();
    };
    const double coded = worst_error({"--rows", "int8"});
    EXPECT_NE(coded, worst_error({})) << "rows stayed as they are: " << model;
    EXPECT_GT(coded, 0);
    const ToolResult text = run_tool({"verify", model, "--rows", "int8"});
    EXPECT_NE(text.out.find("rows by 32 in I8"), std::string::npos) << text.out;
  }
  const ToolResult plain = run_tool({"verify", bundled("mixtral-tiny"), "--rows", "int8"});
  EXPECT_EQ(plain.exit_code, 2);
  EXPECT_NE(plain.err.find("rows cannot be int8 beside these weights"), std::string::npos)
      << plain.err;
  EXPECT_NE(plain.err.find("--rows int8"), std::string::npos) << plain.err;
}

TEST(Run, Int8RowsBesideAnOrderOfColumns_NameTheOptionAndTheModel) {
  const std::string model = "testdata/quantised/qwen3_moe-gptq-int4-order";
  for (const char* command : {"run", "verify", "explain"}) {
    const ToolResult result = run_tool({command, model, "--rows", "int8"});
    EXPECT_EQ(result.exit_code, 2) << result.out;
    for (const char* part : {"--rows int8", model.c_str(), "has_column_order"}) {
      EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Run, BundledModel,
                         ::testing::Values("mixtral-tiny", "olmoe-tiny", "qwen2-moe-tiny",
                                           "qwen3-moe-tiny"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Run, TightTolerance_FailsWithOneAndNamesTheToken) {
  const ToolResult result = run_tool(run_arguments("mixtral-tiny", {"--tolerance", "1e-9"}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.out.find("FAIL: 2 of 2 layers outside tolerance"), std::string::npos);
  EXPECT_NE(result.out.find("layer 0: token "), std::string::npos);
}

TEST(Run, Layers_SelectAndRangesPassOverDenseLayers) {
  const ToolResult result =
      run_tool(run_arguments("qwen2-moe-tiny", {"--layers", "0-2", "--format", "csv"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 3);
  EXPECT_EQ(result.out.substr(0, 26), "layer,tokens,experts_hit,n");
  EXPECT_NE(result.out.find("\n2,17,"), std::string::npos);
}

TEST(Run, JsonLines_AreOneObjectPerLayer) {
  const ToolResult result = run_tool(run_arguments("olmoe-tiny", {"--format", "jsonl"}));
  ASSERT_EQ(result.exit_code, 0);
  size_t begin = 0;
  int64_t layer = 0;
  for (size_t end; (end = result.out.find('\n', begin)) != std::string::npos; begin = end + 1) {
    EXPECT_EQ(Json::parse(result.out.substr(begin, end - begin))["layer"], layer++);
  }
  EXPECT_EQ(layer, 2);
}

TEST(Run, Markdown_IsATable) {
  const ToolResult result = run_tool(run_arguments("olmoe-tiny", {"--format", "markdown"}));
  EXPECT_NE(result.out.find("\n| layer |"), std::string::npos);
  EXPECT_NE(result.out.find("\n|------:|"), std::string::npos);
}

TEST(Run, NoInput_TakesRandomTokensAndChecksAgainstFloat64) {
  const ToolResult result = run_tool({"run", bundled("qwen3-moe-tiny"), "--random", "33",
                                      "--sample", "5", "--format", "json", "--layers", "1"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json layer = Json::parse(result.out)["layers"].at(0);
  EXPECT_EQ(layer["layer"], 1);
  EXPECT_EQ(layer["tokens"], 33);
  EXPECT_EQ(layer["tokens_checked"], 5);
}

TEST(Run, NoTokens_IsLegal) {
  const ToolResult result =
      run_tool({"run", bundled("mixtral-tiny"), "--random", "0", "--format", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(Json::parse(result.out)["layers"][0]["worst_error"], 0.0);
}

TEST(Run, Seed_ChangesTheInput) {
  const auto errors = [](const char* seed) {
    const ToolResult result = run_tool(
        {"run", bundled("mixtral-tiny"), "--seed", seed, "--format", "json", "--repetitions", "1"});
    return Json::parse(result.out)["layers"][0]["worst_error"].get<double>();
  };
  EXPECT_EQ(errors("1"), errors("1"));
  EXPECT_NE(errors("1"), errors("2"));
}

TEST(Run, EveryUsableInstructionSet_GivesAGoodResult) {
  const Json doctor = Json::parse(run_tool({"doctor", "--quick", "--json"}).out);
  for (const Json& isa : doctor["isas"]) {
    const ToolResult result =
        run_tool(run_arguments("qwen3-moe-tiny", {"--isa", isa["name"].get<std::string>()}));
    EXPECT_EQ(result.exit_code, isa["usable"].get<bool>() ? 0 : 3) << isa << result.err;
  }
}

// Outputs that are written and read back as a reference have no error at all (D1).
TEST(Run, OutputFile_ServesAsReferenceAndHoldsEveryResult) {
  const ScratchDirectory scratch;
  const std::string file = (scratch / "out.safetensors").string();
  ASSERT_EQ(run_tool(run_arguments("qwen3-moe-tiny", {"--output", file})).exit_code, 0);
  const SafetensorsFile written = SafetensorsFile::open(file);
  EXPECT_EQ(written.tensors().size(), 12U);
  for (const char* key : {"output", "topk_ids", "topk_weights", "router_logits"}) {
    EXPECT_NE(written.find(std::string("layers.2.") + key), nullptr) << key;
  }
  const ToolResult again =
      run_tool({"run", bundled("qwen3-moe-tiny"), "--input",
                bundled("qwen3-moe-tiny") + "/reference.safetensors", "--reference", file,
                "--tolerance", "1e-300", "--format", "json", "--threads", "1"});
  EXPECT_EQ(again.exit_code, 0) << again.out << again.err;
  const Json total = Json::parse(again.out)["total"];
  EXPECT_EQ(total["worst_error"], 0.0);
  EXPECT_EQ(total["logit_error"], 0.0);
}

TEST(Run, RoutingFromFile_IsUsed) {
  const ToolResult result =
      run_tool(run_arguments("mixtral-tiny", {"--routing", "file", "--format", "json"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json layer = Json::parse(result.out)["layers"][0];
  EXPECT_EQ(layer["routing_mismatches"], 0);
  EXPECT_EQ(layer["weight_error"], 0.0) << "the file's own weights were taken";
  EXPECT_TRUE(layer["logit_error"].is_null()) << "no gate ran";
}

TEST(Run, BareHiddenStates_FeedEveryLayer) {
  const ScratchDirectory scratch;
  const std::string file = (scratch / "in.safetensors").string();
  Tensor hidden(DType::kF32, {3, 72});
  for (int64_t i = 0; i < 3 * 72; ++i) hidden.as<float>()[i] = static_cast<float>(i % 7) - 3.0F;
  const NamedTensor named{"hidden_states", hidden.const_view()};
  save_safetensors(file, {&named, 1});
  const ToolResult result =
      run_tool({"run", bundled("mixtral-tiny"), "--input", file, "--format", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(Json::parse(result.out)["layers"].size(), 2U);
}

// A reference whose choices were tampered with is reported, not silently passed over.
TEST(Run, WrongReferenceIds_AreReported) {
  const ScratchDirectory scratch;
  const std::string reference = bundled("mixtral-tiny") + "/reference.safetensors";
  const std::string copy = (scratch / "reference.safetensors").string();
  const SafetensorsFile file = SafetensorsFile::open(reference);
  const TensorInfo* ids = file.find("layers.0.topk_ids");
  ASSERT_NE(ids, nullptr);
  std::string bytes = read_text(reference);
  bytes[ids->file_offset] = static_cast<char>((bytes[ids->file_offset] + 1) % 8);
  write_text(copy, bytes);
  const ToolResult result = run_tool(
      {"run", bundled("mixtral-tiny"), "--input", reference, "--reference", copy, "--layers", "0"});
  EXPECT_NE(result.out.find("1 differ"), std::string::npos) << result.out;
}

// The first token's experts in the other order are the same choice, which JSON tells apart.
TEST(Run, ReferenceIdsInAnotherOrder_AreNoMismatch) {
  const ScratchDirectory scratch;
  const std::string reference = bundled("mixtral-tiny") + "/reference.safetensors";
  const std::string copy = (scratch / "reference.safetensors").string();
  const SafetensorsFile file = SafetensorsFile::open(reference);
  std::string bytes = read_text(reference);
  for (const char* const name : {"layers.0.topk_ids", "layers.0.topk_weights"}) {
    const TensorInfo* const info = file.find(name);
    ASSERT_NE(info, nullptr) << name;
    const auto width = static_cast<size_t>(byte_size(info->dtype));
    for (size_t i = 0; i < width; ++i) {
      std::swap(bytes[info->file_offset + i], bytes[info->file_offset + width + i]);
    }
  }
  write_text(copy, bytes);
  const ToolResult result = run_tool({"run", bundled("mixtral-tiny"), "--input", reference,
                                      "--reference", copy, "--layers", "0", "--format", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err << result.out;
  const Json layer = Json::parse(result.out)["layers"][0];
  EXPECT_EQ(layer["routing_mismatches"], 0);
  EXPECT_EQ(layer["order_mismatches"], 1);
}

// Layer 0 of a copy of mixtral-tiny in which two experts have the same gate row, so that token 0
// ties between them for its last slot.
class TiedGate : public ::testing::Test {
 protected:
  void SetUp() override {
    copy_model("mixtral-tiny", model_);
    const SafetensorsFile file = SafetensorsFile::open(model_ / "model.safetensors");
    const SafetensorsFile recorded = SafetensorsFile::open(kReference);
    const TensorInfo* gate = file.find("model.layers.0.block_sparse_moe.gate.weight");
    ASSERT_NE(gate, nullptr);
    const Tensor ids = recorded.load("layers.0.topk_ids");
    chosen_ = ids.as<int32_t>()[1];
    const int32_t first = ids.as<int32_t>()[0];
    twin_ = chosen_ + 1 != first && chosen_ + 1 < 8 ? chosen_ + 1 : (first == 7 ? 6 : 7);
    std::string bytes = read_text(model_ / "model.safetensors");
    const size_t row_bytes = gate->bytes / 8;
    const auto row = [&](int32_t expert) {
      return gate->file_offset + static_cast<size_t>(expert) * row_bytes;
    };
    bytes.replace(row(twin_), row_bytes, bytes.substr(row(chosen_), row_bytes));
    write_text(model_ / "model.safetensors", bytes);
  }

  std::vector<std::string> run(const std::string& input, const std::string& option,
                               const std::string& file) const {
    return {"run", model_.string(), "--layers", "0", "--input", input, option,
            file,  "--repetitions", "1"};
  }

  const std::string kReference = bundled("mixtral-tiny") + "/reference.safetensors";
  const ScratchDirectory scratch_;
  const std::filesystem::path model_ = scratch_ / "model";
  int32_t chosen_ = 0;
  int32_t twin_ = 0;
};

// The layer's result with the other of the two experts stands for an engine that rounds the tie the
// other way.
TEST_F(TiedGate, OtherChoice_IsExplainedAndNamesTheRemedy) {
  const std::string own = (scratch_ / "own.safetensors").string();
  ASSERT_EQ(run_tool(run(kReference, "--output", own)).exit_code, 0);
  const SafetensorsFile results = SafetensorsFile::open(own);
  const Tensor hidden = SafetensorsFile::open(kReference).load("layers.0.hidden_states");
  Tensor ids = results.load("layers.0.topk_ids");
  const Tensor weights = results.load("layers.0.topk_weights");
  const Tensor logits = results.load("layers.0.router_logits");
  int32_t& last = ids.as<int32_t>()[1];
  ASSERT_TRUE(last == chosen_ || last == twin_);
  last = last == chosen_ ? twin_ : chosen_;

  const std::string swapped = (scratch_ / "swapped.safetensors").string();
  const NamedTensor given[] = {{"layers.0.hidden_states", hidden.const_view()},
                               {"layers.0.topk_ids", ids.const_view()},
                               {"layers.0.topk_weights", weights.const_view()}};
  save_safetensors(swapped, given);
  const std::string other = (scratch_ / "other.safetensors").string();
  std::vector<std::string> arguments = run(swapped, "--output", other);
  arguments.insert(arguments.end(), {"--routing", "file"});
  ASSERT_EQ(run_tool(arguments).exit_code, 0);

  const ToolResult gated = run_tool(run(swapped, "--reference", other));
  EXPECT_EQ(gated.exit_code, 1);
  EXPECT_NE(gated.out.find("the gate's rounding explains it: the one token outside tolerance chose "
                           "other experts in a near tie (first at token 0); --routing file takes "
                           "the file's choice"),
            std::string::npos)
      << gated.out;
  EXPECT_NE(gated.out.find("1 differ"), std::string::npos) << gated.out;
  arguments = run(swapped, "--reference", other);
  arguments.insert(arguments.end(), {"--routing", "file"});
  EXPECT_EQ(run_tool(arguments).exit_code, 0);
}

// The three commands agree on what is read in place, and results are those of packed weights.
TEST(WeightsOption, InPlace_IsReadByRunAndToldByExplainAndInspect) {
  const std::string model = bundled("qwen3-moe-tiny");
  const auto document = [&](std::vector<std::string> arguments) {
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return nlohmann::json::parse(result.out);
  };
  const auto run = [&](const char* weights) {
    return document({"run", model, "--random", "3", "--weights", weights, "--format", "json"});
  };
  const nlohmann::json packed = run("packed");
  const nlohmann::json in_place = run("in-place");
  const nlohmann::json bytes = in_place["layers"][0]["in_place_bytes"];
  EXPECT_EQ(bytes, 60 * 3 * 88 * 24 * 2);
  EXPECT_EQ(in_place["layers"][0]["packed_bytes"], 0);
  EXPECT_EQ(packed["layers"][0]["in_place_bytes"], 0);
  EXPECT_GT(packed["layers"][0]["packed_bytes"], bytes);
  EXPECT_EQ(packed["layers"][0]["worst_error"], in_place["layers"][0]["worst_error"]);
  EXPECT_EQ(document({"inspect", model, "--json"})["layers"][0]["in_place_bytes"], bytes);
  const nlohmann::json plan =
      document({"explain", model, "--layers", "0", "--weights", "in-place", "--json"});
  EXPECT_EQ(plan[0]["in_place_bytes"], bytes);
  EXPECT_EQ(plan[0]["packed_bytes"], 0);
}

TEST(WeightsOption, Summary_SaysWhereWeightsLie) {
  const auto summary = [](const char* weights) {
    return run_tool({"run", bundled("qwen3-moe-tiny"), "--random", "3", "--weights", weights}).out;
  };
  EXPECT_NE(summary("in-place").find("weights: 2.28 MB read in place, 0 B packed"),
            std::string::npos)
      << summary("in-place");
  EXPECT_NE(summary("packed").find(" packed\nok: "), std::string::npos) << summary("packed");
  EXPECT_NE(run_tool({"run", bundled("qwen3-moe-tiny"), "--weights", "mapped"}).exit_code, 0);
}

}  // namespace
}  // namespace conclave::testing
