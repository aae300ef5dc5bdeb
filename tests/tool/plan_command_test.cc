// Runs conclave plan as a user does.
#include "tool_process.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

using Json = nlohmann::json;

TEST(Plan, RecordedTrace_IsPlannedFor) {
  const ScratchDirectory scratch;
  const std::string trace = scratch / "trace.safetensors";
  ASSERT_EQ(run_tool({"run", bundled("qwen3-moe-tiny"), "--random", "3000", "--repetitions", "1",
                      "--trace", trace})
                .exit_code,
            0);
  const std::string json = scratch / "plan.json";
  const std::string html = scratch / "plan.html";
  const ToolResult result = run_tool({"plan", bundled("qwen3-moe-tiny"), "--cluster", "2x2:h200",
                                      "--trace", trace, "--json", json, "--html", html});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("3000 tokens"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("have not been measured"), std::string::npos) << result.out;
  const Json plan = Json::parse(read_text(json));
  EXPECT_EQ(plan["schema"], "conclave.cluster_plan");
  EXPECT_EQ(plan["version"], 1);
  EXPECT_EQ(plan["trace"]["layers"].size(), 3U);
  EXPECT_EQ(plan["expert_loads"].size(), 3U);
  EXPECT_EQ(plan["expert_loads"][0].size(), 60U);
  EXPECT_EQ(plan["cluster"]["nodes"], 2);
  std::set<std::string> strategies;
  for (const Json& row : plan["strategies"]) {
    strategies.insert(row["strategy"].get<std::string>());
    EXPECT_GT(row["layer_us"]["mean"], 0.0);
    EXPECT_LE(row["balance"]["worst"], row["balance"]["mean"]);
    EXPECT_GE(row["layer_us"]["worst"], row["layer_us"]["p50"]);
  }
  for (const char* name : {"EP 4 linear", "EP 4 round_robin", "EP 4 global +4", "EP 2 linear"}) {
    EXPECT_TRUE(strategies.contains(name)) << name;
  }
  const std::string page = read_text(html);
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0U);
  EXPECT_NE(page.find("Load of experts"), std::string::npos);
  // The page needs nothing from elsewhere and runs nothing.
  for (const char* outside : {"http", "<script", "@import", "url(", "src="}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
}

TEST(Plan, Presets_AreDrawnAndRepeatable) {
  const std::vector<std::string> arguments = {"plan",       "--model",        "qwen3-30b-a3b",
                                              "--cluster",  "8:h200",         "--routing",
                                              "hot:16:0.5", "--trace-tokens", "4096"};
  const ToolResult first = run_tool(arguments);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(first.out, run_tool(arguments).out);
  EXPECT_NE(first.out.find("this model has a hot set"), std::string::npos) << first.out;
  EXPECT_NE(first.out.find("48 MoE layers"), std::string::npos) << first.out;
  const ToolResult even =
      run_tool({"plan", "--model", "qwen3-30b-a3b", "--cluster", "8:h200", "--tokens", "64"});
  EXPECT_NE(even.out.find("this model has no hot set"), std::string::npos) << even.out;
}

TEST(Plan, WrittenTraces_GiveTheSamePlan) {
  const ScratchDirectory scratch;
  const std::string trace = scratch / "trace.safetensors";
  const std::vector<std::string> model = {"plan",     "--model", "olmoe", "--cluster", "4:h200",
                                          "--format", "jsonl",   "--top", "1000"};
  std::vector<std::string> drawn = model;
  drawn.insert(drawn.end(), {"--routing", "zipf:1", "--correlation", "0.3", "--trace-tokens",
                             "2000", "--write-trace", trace});
  std::vector<std::string> read = model;
  read.insert(read.end(), {"--trace", trace});
  const ToolResult first = run_tool(drawn);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  const ToolResult second = run_tool(read);
  ASSERT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(first.out, second.out);
  EXPECT_GT(std::ranges::count(first.out, '\n'), 20);
}

TEST(Plan, ShapesOfAllFormats_ArePlanned) {
  for (const char* type : {"bf16", "f32", "fp8-block", "int4-group128", "mxfp4"}) {
    const ToolResult result = run_tool(
        {"plan", "-E",        "32",       "-k",       "4",       "-H",       "2048",
         "-I",   "1024",      "--shared", "1024",     "--dtype", type,       "--moe-layers",
         "3",    "--cluster", "1:h100",   "--tokens", "16",      "--format", "json"});
    ASSERT_EQ(result.exit_code, 0) << type << result.err;
    const Json plan = Json::parse(result.out);
    EXPECT_EQ(plan["model"]["num_layers"], 3);
    EXPECT_EQ(plan["strategies"][0]["strategy"], "1 GPU");
    EXPECT_EQ(plan["dispatch_rows"], std::string(type) == "fp8-block" ? "e4m3" : "bf16");
  }
}

TEST(Plan, BatchesOfTheTrace_ArePlanned) {
  const ToolResult result = run_tool({"plan", "--model", "olmoe", "--cluster", "4:h200", "--tokens",
                                      "trace,64", "--trace-tokens", "8000", "--format", "jsonl"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find(R"("tokens":"trace")"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find(R"("tokens":64)"), std::string::npos) << result.out;
}

struct WrongPlan {
  std::vector<std::string> arguments;
  int exit_code;
  std::string text;
};

TEST(Plan, WrongUses_AreRefused) {
  const ScratchDirectory scratch;
  const std::string text = scratch / "text.safetensors";
  write_text(text, "no trace");
  const WrongPlan cases[] = {
      {{"--model", "olmoe"}, 2, "--cluster"},
      {{"--cluster", "8:h200"}, 2, "no model to plan for"},
      {{"--model", "olmoe,qwen3-30b-a3b", "--cluster", "8:h200"}, 2, "one preset"},
      {{"--model", "olmoe", "--cluster", "8:x"}, 2, "unknown kind of GPU"},
      {{"--model", "olmoe", "--cluster", "8:h200", "--routing", "gate"}, 2, "--routing"},
      {{"--model", "olmoe", "--cluster", "8:h200", "--correlation", "2"}, 2, "--correlation"},
      {{"--model", "olmoe", "--cluster", "8:h200", "--tokens", "0"}, 2, "--tokens"},
      {{"--model", "olmoe", "--cluster", "8:h200", "--tokens", "trace,"}, 2, "--tokens"},
      {{"--model", "olmoe", "--cluster", "8:h200", "--tokens", "traces"}, 2, "--tokens"},
      {{"--model", "olmoe", "--cluster", "8:h200", "--reserve", "much"}, 2, "--reserve"},
      {{"--model", "olmoe", "--cluster", "8:h200", "--trace", "none.safetensors"},
       3,
       "kFileNotFound"},
      {{"--model", "olmoe", "--cluster", "8:h200", "--trace", text}, 3, "text.safetensors"},
      {{"--model", "olmoe", "--cluster", "8:h200", "--trace", text, "--routing", "one"},
       2,
       "--routing"},
      {{"--model", "olmoe", "--cluster", "8:h200", "--json", scratch / "no" / "x.json"},
       4,
       "kFileWrite"},
      {{"--model", "olmoe", "--cluster", scratch / "none.json"}, 3, "kFileNotFound"}};
  for (const WrongPlan& wrong : cases) {
    std::vector<std::string> arguments = {"plan"};
    arguments.insert(arguments.end(), wrong.arguments.begin(), wrong.arguments.end());
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.exit_code, wrong.exit_code) << wrong.text << ": " << result.err;
    EXPECT_NE(result.err.find(wrong.text), std::string::npos) << result.err;
    EXPECT_EQ(result.out, "") << wrong.text;
  }
}

}  // namespace
}  // namespace conclave::testing
