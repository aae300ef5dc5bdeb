// Runs conclave bench on shapes that are small enough for any machine.
#include "tool_process.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

using Json = nlohmann::json;

std::vector<std::string> bench_arguments(std::vector<std::string> more) {
  std::vector<std::string> arguments = {"bench", "-E", "8",  "-k", "2", "-H",
                                        "64",    "-I", "32", "-r", "2", "--no-ceilings"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(Bench, JsonLines_HaveTheFieldsThatScriptsRead) {
  const ToolResult result =
      run_tool(bench_arguments({"--tokens", "1-4*4", "--threads", "1,2", "--format", "jsonl"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::vector<std::pair<int64_t, int64_t>> rows;
  size_t begin = 0;
  for (size_t end; (end = result.out.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const Json row = Json::parse(result.out.substr(begin, end - begin));
    for (const char* key : {"ms_mean", "ms_std", "ms_min", "ms_median", "gflops", "gbps"}) {
      EXPECT_TRUE(row[key].is_number()) << key;
    }
    EXPECT_FALSE(row.contains("adapter_ratio"));
    for (const char* key : {"model", "isa", "arithmetic", "commit", "cpu"}) {
      EXPECT_TRUE(row[key].is_string()) << key;
    }
    EXPECT_TRUE(row["read_ceiling_gbps"].is_null());
    EXPECT_TRUE(row["fma_ceiling_gflops"].is_null());
    EXPECT_GT(row["ms_min"], 0.0);
    EXPECT_LE(row["ms_min"], row["ms_mean"]);
    rows.emplace_back(row["threads"], row["tokens"]);
  }
  EXPECT_EQ(rows, (std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {1, 4}, {2, 1}, {2, 4}}));
}

TEST(Bench, ExpertsHit_FollowTheRouting) {
  const auto hit = [](const char* routing) {
    const ToolResult result =
        run_tool(bench_arguments({"--tokens", "64", "--routing", routing, "--format", "json"}));
    return Json::parse(result.out)["results"].at(0)["experts_hit"].get<double>();
  };
  EXPECT_EQ(hit("one"), 2.0);
  EXPECT_GT(hit("uniform"), 7.5);
  EXPECT_GT(hit("gate"), 2.0);
}

Json bench_rows(std::vector<std::string> more) {
  more.insert(more.end(), {"--format", "json"});
  const ToolResult result = run_tool(bench_arguments(std::move(more)));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return Json::parse(result.out)["results"];
}

TEST(Bench, Adapters_AreTimedBesideLayersWithoutThem) {
  const Json row = bench_rows({"--tokens", "5", "--adapter-rank", "4", "--adapters", "3"}).at(0);
  EXPECT_EQ(row["adapter_rank"], 4);
  EXPECT_EQ(row["adapters"], 3);
  EXPECT_EQ(row["adapted_tokens"], "all, in turn");
  EXPECT_GE(row["adapter_ms_mean"], row["adapter_ms_min"]);
  EXPECT_GT(row["adapter_ms_min"], 0.0);
  EXPECT_LE(row["adapter_ms_min"], row["adapter_ms_median"]);
  EXPECT_GT(row["adapter_ratio"], 0.0);
  EXPECT_GT(row["ms_min"], 0.0);
}

// Factors of rank 128 are many times what these weights are: their products cannot be for nothing.
TEST(Bench, WideAdapters_TakeLongerThanTheLayer) {
  const Json row = bench_rows({"--tokens", "8", "--adapter-rank", "128", "--warmup", "0"}).at(0);
  EXPECT_EQ(row["adapted_tokens"], "all");
  EXPECT_GT(row["adapter_ratio"], 1.5);
  EXPECT_GT(row["adapter_ms_min"], row["ms_min"]);
}

TEST(Bench, AdaptersWithoutARank_AreRefused) {
  const ToolResult alone = run_tool(bench_arguments({"--tokens", "1", "--adapters", "2"}));
  EXPECT_NE(alone.exit_code, 0);
  EXPECT_NE(alone.err.find("--adapters"), std::string::npos) << alone.err;
  EXPECT_NE(alone.err.find("--adapter-rank"), std::string::npos) << alone.err;
  const ToolResult wide = run_tool(bench_arguments({"--tokens", "1", "--adapter-rank", "513"}));
  EXPECT_NE(wide.exit_code, 0);
  EXPECT_NE(wide.err.find("512"), std::string::npos) << wide.err;
}

TEST(Bench, Markdown_IsATableWithMeanAndSpread) {
  const ToolResult result = run_tool(bench_arguments({"--tokens", "1", "--format", "md"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("| model "), std::string::npos);
  EXPECT_NE(result.out.find(" ± "), std::string::npos);
}

TEST(Bench, ShapeBeyondMemory_IsRefusedBeforeItIsMade) {
  const ToolResult result =
      run_tool({"bench", "-E", "65536", "-k", "1", "-H", "65536", "-I", "65536", "--no-ceilings"});
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_NE(result.err.find("[kOutOfMemory]: too little memory"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace conclave::testing
