// Runs conclave over ranks with a GPU each, connected by NCCL: where there are two.
#include "tool_process.h"

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/error.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

class RanksOnGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const TransportInfo& info : transports()) {
      if (info.name == "nccl" && !info.usable) GTEST_SKIP() << info.reason;
    }
    try {
      const Context second({.device = "cuda:1", .num_threads = 1});
    } catch (const Error& error) {
      GTEST_SKIP() << "needs two GPUs: " << error.what();
    }
  }

  // The GPUs and NCCL are found as this process finds them.
  static ToolResult run(Words words, const Words& more) {
    words.insert(words.end(), {"--ranks", "2", "--transport", "nccl"});
    words.insert(words.end(), more.begin(), more.end());
    Words environment = {"LSAN_OPTIONS=detect_leaks=0", "NCCL_NVLS_ENABLE=0"};
    for (const char* name : {"LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "PATH"}) {
      if (const char* value = std::getenv(name)) {
        environment.push_back(std::string(name) + "=" + value);
      }
    }
    return run_tool(words, {.environment = environment});
  }
};

TEST_F(RanksOnGpus, Verify_PassesWithExpertsAndWithSlices) {
  for (const char* tp : {"1", "2"}) {
    const ToolResult result =
        run({"verify", bundled("qwen2-moe-tiny"), "--format", "json"}, {"--tp", tp});
    ASSERT_EQ(result.exit_code, 0) << result.err << result.out;
    const Json report = Json::parse(result.out);
    EXPECT_EQ(report["transport"], "nccl");
    EXPECT_EQ(report["tp_size"], std::stoi(tp));
    EXPECT_EQ(report["ranks"], 2);
    EXPECT_TRUE(report["total"]["ok"]);
  }
}

// One token leaves a rank without any.
TEST_F(RanksOnGpus, Run_TakesRanksWithoutTokens) {
  for (const char* tokens : {"1", "7"}) {
    const ToolResult result =
        run({"run", bundled("qwen3-moe-tiny"), "--random", tokens, "--format", "json"}, {});
    EXPECT_EQ(result.exit_code, 0) << result.err << result.out;
  }
}

TEST_F(RanksOnGpus, Bench_CountsTheTokensOfAllRanks) {
  const ToolResult result = run({"bench", "-E", "8", "-k", "2", "-H", "256", "-I", "128", "-r", "2",
                                 "--tokens", "16", "--format", "json"},
                                {});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json report = Json::parse(result.out);
  const Json& row = report["results"].at(0);
  EXPECT_EQ(report["ranks"], 2);
  EXPECT_NEAR(row["tokens_per_s"].get<double>() * row["us_mean"].get<double>() / 1e6, 32, 1);
}

TEST_F(RanksOnGpus, MoreRanksThanGpus_AreRefused) {
  const ToolResult result =
      run_tool({"run", bundled("olmoe-tiny"), "--ranks", "999", "--transport", "nccl"});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_NE(result.err.find("fewer GPUs than ranks"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace conclave::testing
