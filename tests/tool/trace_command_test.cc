// Runs conclave run with --trace as a user does.
#include "tool_process.h"

#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave::testing {
namespace {

std::vector<int32_t> ids_of(const SafetensorsFile& file, const std::string& name) {
  const Tensor tensor = file.load(name);
  const auto count = static_cast<size_t>(tensor.shape().num_elements());
  return {tensor.as<int32_t>(), tensor.as<int32_t>() + count};
}

TEST(RunTrace, Choices_AreThoseOfTheOutput) {
  const ScratchDirectory scratch;
  const std::string trace = scratch / "trace.safetensors";
  const std::string output = scratch / "out.safetensors";
  const ToolResult result =
      run_tool({"run", bundled("qwen3-moe-tiny"), "--random", "50", "--repetitions", "1", "--trace",
                trace, "--trace-weights", "--output", output});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const SafetensorsFile traced = SafetensorsFile::open(trace);
  const SafetensorsFile written = SafetensorsFile::open(output);
  EXPECT_EQ(traced.metadata().at("num_experts"), "60");
  EXPECT_EQ(traced.metadata().at("top_k"), "4");
  EXPECT_EQ(traced.metadata().at("num_tokens"), "50");
  EXPECT_EQ(traced.metadata().at("batches"), "0");
  EXPECT_EQ(traced.metadata().at("model_type"), "qwen3_moe");
  EXPECT_EQ(traced.tensors().size(), 6U);
  for (const char* layer : {"0", "1", "2"}) {
    const std::string name = std::string("layers.") + layer + ".topk_ids";
    EXPECT_EQ(ids_of(traced, name), ids_of(written, name));
  }
}

TEST(RunTrace, Ranks_WriteOneFileOfAllTokens) {
  const ScratchDirectory scratch;
  std::vector<std::vector<int32_t>> ids;
  for (const std::vector<std::string>& ranks :
       {std::vector<std::string>{}, {"--ranks", "3"}, {"--ranks", "4", "--tp", "2"}}) {
    const std::string trace = scratch / "trace.safetensors";
    std::vector<std::string> arguments = {"run",           bundled("mixtral-tiny"),
                                          "--random",      "17",
                                          "--repetitions", "1",
                                          "--layers",      "1",
                                          "--trace",       trace};
    arguments.insert(arguments.end(), ranks.begin(), ranks.end());
    const ToolResult result = run_tool(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    ids.push_back(ids_of(SafetensorsFile::open(trace), "layers.1.topk_ids"));
  }
  EXPECT_EQ(ids[0].size(), 34U);
  EXPECT_EQ(ids[0], ids[1]);
  EXPECT_EQ(ids[0], ids[2]);
}

TEST(RunTrace, WrongUses_AreRefused) {
  const ScratchDirectory scratch;
  const std::string file = scratch / "x.safetensors";
  const ToolResult same = run_tool({"run", bundled("mixtral-tiny"), "--trace", file, "--output",
                                    scratch / "." / "x.safetensors"});
  EXPECT_EQ(same.exit_code, 2);
  EXPECT_NE(same.err.find("--trace"), std::string::npos) << same.err;
  const ToolResult nowhere =
      run_tool({"run", bundled("mixtral-tiny"), "--trace", scratch / "none" / "x.safetensors"});
  EXPECT_EQ(nowhere.exit_code, 4) << nowhere.err;
  EXPECT_NE(nowhere.err.find("kFileWrite"), std::string::npos) << nowhere.err;
  EXPECT_EQ(run_tool({"run", bundled("mixtral-tiny"), "--trace-weights"}).exit_code, 2);
}

}  // namespace
}  // namespace conclave::testing
