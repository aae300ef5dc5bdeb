// Runs conclave run with limits, --record-routing and --replay, and conclave compare, as a user
// does.
#include "tool_process.h"

#include "conclave/routing_record.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace conclave::testing {
namespace {

ToolResult run_mixtral(std::vector<std::string> more) {
  std::vector<std::string> arguments = {"run", bundled("mixtral-tiny"), "--repetitions", "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_tool(arguments);
}

TEST(RunRecord, AReplay_HasWhatWasRecorded) {
  const ScratchDirectory scratch;
  const std::string first = scratch / "first.safetensors";
  const std::string second = scratch / "second.safetensors";
  ASSERT_EQ(run_mixtral({"--record-routing", first, "--ranks", "3"}).exit_code, 0);
  ASSERT_EQ(run_mixtral({"--replay", first, "--record-routing", second}).exit_code, 0);
  const ToolResult same = run_tool({"compare", first, second});
  EXPECT_EQ(same.exit_code, 0) << same.out << same.err;
  const RoutingRecord record = RoutingRecord::open(first);
  EXPECT_EQ(record.model_type, "mixtral");
  EXPECT_EQ(record.layers.at(0).num_tokens(), 16);
  EXPECT_NE(record.layers.at(0).layer.spec_hash, 0U);

  const std::string few = scratch / "few.safetensors";
  ASSERT_EQ(run_mixtral({"--top-k", "1", "--record-routing", few}).exit_code, 0);
  const ToolResult differs = run_tool({"compare", first, few, "--format", "json"});
  EXPECT_EQ(differs.exit_code, 1);
  const auto json = nlohmann::json::parse(differs.out);
  EXPECT_EQ(json["layers"][0]["other_experts"], 16);
  EXPECT_GT(json["layers"][0]["worst_weight_difference"], 0.0);
  EXPECT_EQ(run_tool({"compare", first, few, "--tolerance", "9"}).exit_code, 1)
      << "other experts are no matter of weights";
}

TEST(RunRecord, Limits_AreObeyedByRunAndCheck) {
  const ScratchDirectory scratch;
  const std::string file = scratch / "x.safetensors";
  const ToolResult result =
      run_mixtral({"--top-k", "1", "--ban-experts", "0,2-3", "--record-routing", file});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  for (const RecordedRows& rows : RoutingRecord::open(file).layers) {
    for (size_t at = 0; at < rows.topk_ids.size(); at += 2) {
      EXPECT_TRUE(rows.topk_ids[at] == 1 || rows.topk_ids[at] > 3) << rows.topk_ids[at];
      EXPECT_EQ(rows.topk_ids[at + 1], -1);
    }
  }
  EXPECT_EQ(run_mixtral({"--expert-budget", "3"}).exit_code, 0);
}

TEST(RunRecord, RecordsOfOtherModels_AreNamed) {
  const ScratchDirectory scratch;
  const std::string file = scratch / "other.safetensors";
  const auto replay = [&](const char* model) {
    return run_tool({"run", bundled(model), "--repetitions", "1", "--replay", file});
  };
  ASSERT_EQ(run_mixtral({"--record-routing", file}).exit_code, 0);
  const ToolResult slots = replay("qwen3-moe-tiny");
  EXPECT_EQ(slots.exit_code, 3);
  for (const std::string text :
       {"the record is of another model", file.c_str(), "layer 0", "4 of 60 experts a token",
        "2 of 8 experts a token, of a mixtral"}) {
    EXPECT_NE(slots.err.find(text), std::string::npos) << text << "\n" << slots.err;
  }
  EXPECT_EQ(slots.out.find("worst error"), std::string::npos) << "layers ran for nothing";

  // As many choices, from more experts than the model has.
  RoutingRecord record = RoutingRecord::open(file);
  for (RecordedRows& rows : record.layers) rows.layer.num_ids += 1;
  record.write(file);
  const ToolResult experts = run_mixtral({"--replay", file});
  EXPECT_EQ(experts.exit_code, 3);
  EXPECT_NE(experts.err.find("2 of 9 experts a token"), std::string::npos) << experts.err;

  for (RecordedRows& rows : record.layers) rows.layer.num_ids -= 1;
  record.layers.erase(record.layers.begin());
  record.write(file);
  const ToolResult layers = run_mixtral({"--replay", file});
  EXPECT_EQ(layers.exit_code, 3);
  EXPECT_NE(layers.err.find("the record lacks a layer"), std::string::npos) << layers.err;
  EXPECT_NE(layers.err.find(file), std::string::npos) << layers.err;
}

// A record by hooks of another program knows no hash, and may count fewer ids.
TEST(RunRecord, ARecordWithoutHashes_IsReplayed) {
  const ScratchDirectory scratch;
  const std::string file = scratch / "hooks.safetensors";
  ASSERT_EQ(run_mixtral({"--record-routing", file}).exit_code, 0);
  RoutingRecord record = RoutingRecord::open(file);
  for (RecordedRows& rows : record.layers) rows.layer.spec_hash = 0;
  record.write(file);
  EXPECT_EQ(run_mixtral({"--replay", file}).exit_code, 0);
}

TEST(RunRecord, WrongUses_AreRefused) {
  const ScratchDirectory scratch;
  const std::string file = scratch / "x.safetensors";
  EXPECT_EQ(run_mixtral({"--top-k", "3"}).exit_code, 2);
  EXPECT_EQ(run_mixtral({"--ban-experts", "99"}).exit_code, 2);
  EXPECT_EQ(run_mixtral({"--expert-budget", "99"}).exit_code, 2);
  EXPECT_EQ(run_mixtral({"--record-routing", file, "--output", file}).exit_code, 2);
  EXPECT_EQ(run_mixtral({"--replay", file}).exit_code, 3) << "there is no such file";
  const ToolResult nowhere = run_mixtral({"--record-routing", scratch / "no/x.safetensors"});
  EXPECT_EQ(nowhere.exit_code, 4);
  EXPECT_NE(nowhere.err.find("kFileWrite"), std::string::npos) << nowhere.err;
  EXPECT_EQ(nowhere.out.find("worst error"), std::string::npos) << "layers ran for nothing";
  ASSERT_EQ(run_mixtral({"--random", "4", "--record-routing", file}).exit_code, 0);
  const ToolResult more = run_mixtral({"--random", "5", "--replay", file});
  EXPECT_EQ(more.exit_code, 2);
  EXPECT_NE(more.err.find("position 4"), std::string::npos) << more.err;
  EXPECT_EQ(run_mixtral({"--replay", file, "--routing", "file"}).exit_code, 2);
  const ToolResult other = run_tool(
      {"run", bundled("qwen3-moe-tiny"), "--repetitions", "1", "--replay", file, "--random", "4"});
  EXPECT_NE(other.exit_code, 0);
  EXPECT_NE(other.err.find("of another model"), std::string::npos) << other.err;
  EXPECT_NE(other.err.find("4 of 60 experts"), std::string::npos) << other.err;
  EXPECT_EQ(run_tool({"compare", file}).exit_code, 2);
  EXPECT_EQ(run_tool({"compare", file, file, "--tolerance", "-1"}).exit_code, 2);
}

}  // namespace
}  // namespace conclave::testing
