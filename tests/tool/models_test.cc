// Runs inspect, run and verify on every golden checkpoint of testdata/models.
#include "support/case_name.h"
#include "tool_process.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>

namespace conclave::testing {
namespace {

using Json = nlohmann::json;

std::vector<std::string> model_directories() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("testdata/models")) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class GoldenModel : public ::testing::TestWithParam<std::string> {
 protected:
  static std::string directory() { return "testdata/models/" + GetParam(); }
  static std::string experts() { return GetParam().ends_with("-vision") ? "vision" : "text"; }
};

TEST_P(GoldenModel, Inspect_NamesItsLayers) {
  const ToolResult result =
      run_tool({"inspect", directory(), "--experts", experts(), "--format", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_FALSE(Json::parse(result.out)["layers"].empty());
}

TEST_P(GoldenModel, Run_IsWithinToleranceOfFloat64) {
  const std::string golden = directory() + "/golden.safetensors";
  const ToolResult result = run_tool({"run", directory(), "--input", golden, "--reference", golden,
                                      "--record", "bf16", "--routing", "file", "--experts",
                                      experts(), "--repetitions", "1", "--format", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err << result.out;
  EXPECT_TRUE(Json::parse(result.out)["total"]["ok"]);
}

TEST_P(GoldenModel, Verify_PassesEveryStage) {
  const ToolResult result = run_tool(
      {"verify", directory(), "--experts", experts(), "--tokens", "16", "--format", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err << result.out;
  const Json report = Json::parse(result.out);
  for (const Json& layer : report["layers"]) EXPECT_TRUE(layer["ok"]) << layer;
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenModel, ::testing::ValuesIn(model_directories()),
                         [](const auto& instance) { return case_name(instance.param); });

}  // namespace
}  // namespace conclave::testing
