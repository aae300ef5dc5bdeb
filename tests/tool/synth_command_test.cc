// Runs conclave synth, and manifest on its output.
#include "support/case_name.h"
#include "tool_process.h"

#include "conclave/convert.h"
#include "conclave/format.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace conclave::testing {
namespace {

struct Sizes {
  std::string hidden = "48";
  std::string inner = "24";
};

std::vector<std::string> synth_arguments(const std::string& directory,
                                         std::vector<std::string> more = {}, Sizes sizes = {}) {
  std::vector<std::string> arguments = {"synth",      "-E", "4",         "-k", "2", "-H",
                                        sizes.hidden, "-I", sizes.inner, "-n", "2", directory};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class SynthFamily : public ::testing::TestWithParam<const char*> {};

TEST_P(SynthFamily, Checkpoint_IsInspectedAndVerified) {
  const ScratchDirectory scratch;
  const std::string model = (scratch / "model").string();
  std::vector<std::string> more = {"--model-type", GetParam(), "--shard-size", "8kB"};
  if (GetParam() == std::string("qwen2_moe")) more.insert(more.end(), {"--shared", "24"});
  const ToolResult synth = run_tool(synth_arguments(model, more));
  ASSERT_EQ(synth.exit_code, 0) << synth.err;

  const ToolResult inspect = run_tool({"inspect", model, "--json"});
  ASSERT_EQ(inspect.exit_code, 0) << inspect.err;
  const nlohmann::json document = nlohmann::json::parse(inspect.out);
  EXPECT_EQ(document["model_type"], GetParam());
  ASSERT_EQ(document["layers"].size(), 2U);
  EXPECT_EQ(document["layers"][1]["num_experts"], 4);
  EXPECT_TRUE(document["layers"][1]["supported"]);

  const ToolResult verify = run_tool({"verify", model});
  EXPECT_EQ(verify.exit_code, 0) << verify.out << verify.err;
}

INSTANTIATE_TEST_SUITE_P(Synth, SynthFamily,
                         ::testing::Values("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST(Synth, SameSeed_GivesTheSameBytesForAnyThreadsAndShards) {
  const ScratchDirectory scratch;
  const std::string one = (scratch / "one").string();
  const std::string two = (scratch / "two").string();
  ASSERT_EQ(run_tool(synth_arguments(one, {"--seed", "3", "--threads", "1"})).exit_code, 0);
  ASSERT_EQ(run_tool(synth_arguments(two, {"--seed", "3", "--threads", "4"})).exit_code, 0);
  const std::string shard = "model-00001-of-00001.safetensors";
  EXPECT_EQ(read_text(std::filesystem::path(one) / shard),
            read_text(std::filesystem::path(two) / shard));
}

TEST(Synth, FullDirectory_IsRefusedUnlessForced) {
  const ScratchDirectory scratch;
  write_text(scratch / "notes.txt", "mine");
  const std::string directory = scratch.path().string();
  const ToolResult refused = run_tool(synth_arguments(directory));
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_NE(refused.err.find("[kFileWrite]: the directory is not empty"), std::string::npos);
  EXPECT_EQ(run_tool(synth_arguments(directory, {"--force"})).exit_code, 0);
  EXPECT_EQ(read_text(scratch / "notes.txt"), "mine");
}

TEST(Synth, QuantisedModel_OpensAndAgreesWithFloat64) {
  for (const WeightForm& form : weight_forms()) {
    if (form.method.empty()) continue;
    SCOPED_TRACE(form.name);
    const std::string type(form.name);
    // Groups of columns fill rows.
    const bool grouped = form.quant.weights == WeightScale::kBlock && form.quant.block_rows == 1;
    const char* shared = grouped ? "128" : form.packed_in ? "16" : "9";  // words hold eight codes
    const Sizes sizes = grouped ? Sizes{"256", "128"} : Sizes{};
    const ScratchDirectory scratch;
    const std::string model = (scratch / "model").string();
    ASSERT_EQ(
        run_tool(synth_arguments(model,
                                 {"--dtype", type, "--shared", shared, "--model-type", "qwen2_moe"},
                                 sizes))
            .exit_code,
        0);
    const ToolResult inspected = run_tool({"inspect", model});
    EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
    if (inspected.out.find("cannot run") != std::string::npos) {
      EXPECT_NE(inspected.out.find(form.format), std::string::npos) << inspected.out;
      continue;
    }
    EXPECT_NE(inspected.out.find(to_string(form.dtype)), std::string::npos) << inspected.out;
    const ToolResult verified = run_tool({"verify", model});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  }
}

// Every form of the converter, and forms with their options.
std::vector<std::string> coded_forms() {
  std::vector<std::string> forms = random_model_formats();
  for (const char* const more :
       {"gptq-int4:group=32,asym", "gptq-int3:group=64,asym", "gptq-int8:group=row",
        "gptq-int4-act-order:group=32,asym", "awq-int4:group=32", "awq-int4:group=64,gemv",
        "awq-int4:sym", "bnb-nf4:nested", "bnb-fp4:nested", "mlx-int3:group=32"}) {
    forms.emplace_back(more);
  }
  return forms;
}

class SynthForm : public ::testing::TestWithParam<std::string> {};

TEST_P(SynthForm, Model_AgreesWithFloat64AndItsManifest) {
  const ScratchDirectory scratch;
  const std::string model = (scratch / "model").string();
  // Rows of 256 columns have whole blocks of all types, and fill words.
  const ToolResult synth = run_tool(synth_arguments(
      model, {"--dtype", GetParam(), "--shared", "256", "--model-type", "qwen2_moe"},
      {"256", "256"}));
  ASSERT_EQ(synth.exit_code, 0) << synth.err;
  const std::string file = model + "/model.gguf";
  const std::string path = std::filesystem::exists(file) ? file : model;
  EXPECT_EQ(synth.out.find("wrote " + path + ": qwen2_moe, 2 layers"), 0U) << synth.out;

  const ToolResult inspected = run_tool({"inspect", path});
  EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
  EXPECT_EQ(inspected.out.find("cannot run"), std::string::npos) << inspected.out;
  const ToolResult manifest = run_tool({"manifest", path});
  ASSERT_EQ(manifest.exit_code, 0) << manifest.err;
  const ToolResult verified = run_tool({"verify", path, "--check-manifest"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

INSTANTIATE_TEST_SUITE_P(Synth, SynthForm, ::testing::ValuesIn(coded_forms()),
                         [](const auto& test) { return case_name(test.param); });

TEST(Synth, CodedModel_HasTheSameBytesForAnyThreads) {
  const ScratchDirectory scratch;
  for (const char* const form : {"q4_k", "gptq-int4-act-order:group=32"}) {
    std::vector<std::string> texts;
    for (const char* const threads : {"1", "3"}) {
      const std::string model = (scratch / (std::string(form) + threads)).string();
      ASSERT_EQ(
          run_tool(synth_arguments(model, {"--dtype", form, "--seed", "3", "--threads", threads},
                                   {"256", "256"}))
              .exit_code,
          0);
      const std::string file = *form == 'q' ? "/model.gguf" : "/model.safetensors";
      texts.push_back(read_text(model + file));
    }
    EXPECT_EQ(texts[0], texts[1]) << form;
  }
}

TEST(Synth, ContainerSaysWhichOfTwoFormsIsMeant) {
  const ScratchDirectory scratch;
  const std::string directory = (scratch / "directory").string();
  const std::string file = (scratch / "file").string();
  const std::string named = (scratch / "named.gguf").string();
  const Sizes sizes{"64", "32"};
  ASSERT_EQ(run_tool(synth_arguments(directory, {"--dtype", "mxfp4"}, sizes)).exit_code, 0);
  ASSERT_EQ(
      run_tool(synth_arguments(file, {"--dtype", "mxfp4", "--container", "gguf"}, sizes)).exit_code,
      0);
  ASSERT_EQ(run_tool(synth_arguments(named, {}, sizes)).exit_code, 0);
  EXPECT_TRUE(std::filesystem::exists(directory + "/config.json"));
  for (const std::string& model : {file, named}) {
    const ToolResult verified = run_tool({"verify", model + "/model.gguf"});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  }
}

TEST(Synth, SizesThatAFormDoesNotHave_AreRefusedAndLeaveNothing) {
  const ScratchDirectory scratch;
  const std::string model = (scratch / "model").string();
  for (const char* const form : {"q4_k", "gptq-int4", "bnb-nf4", "mlx-int4"}) {
    const ToolResult result = run_tool(synth_arguments(model, {"--dtype", form}));
    EXPECT_EQ(result.exit_code, 3) << form << result.err;
    EXPECT_NE(result.err.find("[kUnsupported]"), std::string::npos) << result.err;
    EXPECT_TRUE(std::filesystem::is_empty(scratch.path())) << form;
  }
  const ToolResult option = run_tool(synth_arguments(model, {"--dtype", "gptq-int4:order"}));
  EXPECT_NE(option.err.find("the form has no such option"), std::string::npos) << option.err;
  const ToolResult family = run_tool(synth_arguments(model, {"--dtype", "gpt-oss-mxfp4"}));
  EXPECT_EQ(family.exit_code, 2) << family.err;
}

TEST(Synth, FormsWithoutACheckpoint_AreNotOffered) {
  const ToolResult help = run_tool({"synth", "--help"});
  for (const WeightForm& form : weight_forms()) {
    const bool is_written = form.quant.weights == WeightScale::kNone || !form.method.empty();
    const std::vector<std::string> coded = random_model_formats();
    const bool is_converted = std::ranges::find(coded, form.name) != coded.end();
    if (is_written || is_converted) continue;
    EXPECT_EQ(help.out.find("|" + std::string(form.name) + "|"), std::string::npos) << form.name;
    const ScratchDirectory scratch;
    const ToolResult result = run_tool(
        synth_arguments((scratch / "model").string(), {"--dtype", std::string(form.name)}));
    EXPECT_EQ(result.exit_code, 2) << form.name;
    EXPECT_NE(result.err.find("--dtype"), std::string::npos) << result.err;
  }
}

TEST(Synth, MissingRoom_IsSaidBeforeAnythingIsWritten) {
  const ScratchDirectory scratch;
  const std::string model = (scratch / "model").string();
  const ToolResult result =
      run_tool({"synth", "-E", "65536", "-k", "1", "-H", "65536", "-I", "65536", model});
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_NE(result.err.find("too little room on the disk"), std::string::npos) << result.err;
  EXPECT_TRUE(std::filesystem::is_empty(model));
}

TEST(Synth, SharedExpertInAFamilyWithout_IsRefused) {
  const ScratchDirectory scratch;
  const ToolResult result = run_tool(
      synth_arguments((scratch / "model").string(), {"--shared", "8", "--model-type", "mixtral"}));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("[kUnsupported]"), std::string::npos);
}

TEST(Manifest, FlippedBit_IsFound) {
  const ScratchDirectory scratch;
  const std::string model = (scratch / "model").string();
  ASSERT_EQ(run_tool(synth_arguments(model)).exit_code, 0);
  const ToolResult manifest = run_tool({"manifest", model});
  ASSERT_EQ(manifest.exit_code, 0) << manifest.err;
  EXPECT_EQ(run_tool({"verify", model, "--check-manifest"}).exit_code, 0);

  const std::filesystem::path shard = scratch / "model" / "model-00001-of-00001.safetensors";
  std::string bytes = read_text(shard);
  bytes[bytes.size() - 2] = static_cast<char>(bytes[bytes.size() - 2] ^ 1);
  write_text(shard, bytes);
  const ToolResult result = run_tool({"verify", model, "--check-manifest"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("[kChecksum]"), std::string::npos) << result.err;
}

TEST(Manifest, FlippedBitOfAGgufFile_IsFoundInItsSlice) {
  const ScratchDirectory scratch;
  const std::string model = (scratch / "model").string();
  ASSERT_EQ(
      run_tool(synth_arguments(model, {"--dtype", "q8_0", "--shard-size", "300kB"}, {"256", "256"}))
          .exit_code,
      0);
  std::vector<std::string> parts;
  for (const auto& entry : std::filesystem::directory_iterator(model)) {
    parts.push_back(entry.path().string());
  }
  std::ranges::sort(parts);
  ASSERT_GT(parts.size(), 2U);
  const std::string& first = parts.front();
  const ToolResult absent = run_tool({"verify", first, "--check-manifest"});
  EXPECT_EQ(absent.exit_code, 3) << absent.err;
  EXPECT_NE(absent.err.find(first + ".conclave.manifest.json"), std::string::npos) << absent.err;
  const ToolResult manifest = run_tool({"manifest", first});
  EXPECT_EQ(manifest.out, "wrote " + first + ".conclave.manifest.json\n") << manifest.err;
  EXPECT_EQ(run_tool({"verify", first, "--check-manifest"}).exit_code, 0);

  // Types and shapes of all parts are listed, and a hash of each expert.
  const auto listed =
      nlohmann::json::parse(read_text(first + ".conclave.manifest.json"))["tensors"];
  const auto& stack = listed.at("blk.1.ffn_down_exps.weight");
  EXPECT_EQ(stack["dtype"], "Q8_0");
  EXPECT_EQ(stack["shape"], (std::vector<int>{4, 256, 256}));
  EXPECT_EQ(stack["hashes"].size(), 4U);

  const std::string& last = parts.back();
  std::string bytes = read_text(last);
  bytes[bytes.size() - 40] = static_cast<char>(bytes[bytes.size() - 40] ^ 1);
  write_text(last, bytes);
  const ToolResult result = run_tool({"verify", first, "--check-manifest"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("[kChecksum]"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find(last), std::string::npos) << result.err;
}

}  // namespace
}  // namespace conclave::testing
