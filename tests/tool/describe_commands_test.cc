// Tests inspect, explain, doctor, completion and man page.
#include "tool_process.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

using Json = nlohmann::json;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(Inspect, Json_HasGeometryAndTotals) {
  const ToolResult result = run_tool({"inspect", bundled("qwen2-moe-tiny"), "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json document = Json::parse(result.out);
  EXPECT_EQ(document["model_type"], "qwen2_moe");
  EXPECT_EQ(document["num_hidden_layers"], 4);
  ASSERT_EQ(document["layers"].size(), 3U);
  const Json& layer = document["layers"][1];
  EXPECT_EQ(layer["layer"], 2);
  EXPECT_EQ(layer["num_experts"], 10);
  EXPECT_EQ(layer["top_k"], 3);
  EXPECT_EQ(layer["hidden_size"], 56);
  EXPECT_EQ(layer["intermediate_size"], 36);
  EXPECT_EQ(layer["shared_mode"], "sigmoid_gate");
  EXPECT_EQ(layer["shared_size"], 44);
  EXPECT_EQ(layer["weight_dtype"], "F32");
  EXPECT_EQ(layer["renormalize"], "none");
  // There are ten experts and a shared one of three matrices, the gate, and the shared expert's
  // gate.
  const int64_t total = 10 * 3 * 56 * 36 + 3 * 56 * 44 + 10 * 56 + 56;
  EXPECT_EQ(layer["parameters"], total);
  EXPECT_EQ(layer["active_parameters"], total - 7 * 3 * 56 * 36);
  EXPECT_EQ(layer["bytes"], 4 * total);
  EXPECT_LT(document["active_parameters"], document["total_parameters"]);
}

TEST(Inspect, Table_ShowsEveryLayer) {
  const ToolResult result = run_tool({"inspect", bundled("mixtral-tiny")});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("type: mixtral; 2 layers, 2 of them MoE"), std::string::npos)
      << result.out;
}

// A model of the goldens whose configuration asks for what no layer runs.
struct CannotRun {
  std::string model;
  std::string entry;  // text in config.json
  std::string changed;
  std::string reason;
};

TEST(Inspect, LayersThatCannotRun_SayWhy) {
  const ScratchDirectory scratch;
  for (const CannotRun& change :
       {CannotRun{.model = "llama4_text",
       .entry = "\"hidden_act\": \"silu\"",
       .changed = "\"hidden_act\": \"softshrink\"",
       .reason = "hidden_act \"softshrink\" is not an activation this version runs"},
        CannotRun{.model = "phimoe",
        .entry = "\"num_experts_per_tok\": 2",
        .changed = "\"num_experts_per_tok\": 3",
        .reason = "num_experts_per_tok does not fit router sparse_mixer: 3 (limit: 2)"}}) {
    SCOPED_TRACE(change.model);
    const std::filesystem::path model = scratch / change.model;
    copy_model("models/" + change.model, model);
    std::string config = read_text(model / "config.json");
    const size_t at = config.find(change.entry);
    ASSERT_NE(at, std::string::npos);
    write_text(model / "config.json", config.replace(at, change.entry.size(), change.changed));

    const ToolResult json = run_tool({"inspect", model.string(), "--json"});
    ASSERT_EQ(json.exit_code, 0) << json.err;
    const Json layers = Json::parse(json.out)["layers"];
    ASSERT_FALSE(layers.empty());
    const ToolResult table = run_tool({"inspect", model.string()});
    ASSERT_EQ(table.exit_code, 0) << table.err;
    const std::vector<std::string> lines = lines_of(table.out);
    for (const Json& layer : layers) {
      EXPECT_EQ(layer["supported"], false);
      EXPECT_EQ(layer["reason"], change.reason);
      const std::string number = std::to_string(layer["layer"].get<int>());
      const std::string wanted = "layer " + number + " cannot run: " + change.reason;
      EXPECT_EQ(std::count(lines.begin(), lines.end(), wanted), 1) << table.out;
      // The column "runs" is the last.
      const bool says_no = std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
        return line.starts_with(std::string(5 - number.size(), ' ') + number + " ") &&
               line.ends_with(" no");
      });
      EXPECT_TRUE(says_no) << table.out;
    }
    const ToolResult run = run_tool({"run", model.string()});
    EXPECT_EQ(run.exit_code, 3);
    EXPECT_NE(run.err.find("cannot run: " + change.reason), std::string::npos) << run.err;
  }
}

TEST(Explain, Model_ShowsEveryKernelWithItsReason) {
  const ToolResult result =
      run_tool({"explain", bundled("mixtral-tiny"), "--layers", "1", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json plans = Json::parse(result.out);
  ASSERT_EQ(plans.size(), 1U);
  int64_t chosen_kernels = 0;
  for (const Json& row : plans[0]["rows"]) {
    EXPECT_FALSE(row["reason"].get<std::string>().empty()) << row;
    if (row["table"] == "kernel" && row["chosen"].get<bool>()) ++chosen_kernels;
  }
  EXPECT_EQ(chosen_kernels, 1);
  EXPECT_GT(plans[0]["workspace_bytes"], 0);
  EXPECT_GT(plans[0]["packed_bytes"], 0);
  EXPECT_EQ(plans[0]["determinism"], "D1 D2 D3");
}

TEST(Explain, ScalarInstructionSet_ChoosesTheReference) {
  const ToolResult result = run_tool({"explain", "-E", "8", "-k", "2", "-H", "64", "-I", "32",
                                      "--isa", "scalar", "--dtype", "f16"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("cpu.reference"), std::string::npos);
  EXPECT_NE(result.out.find("E=8 k=2 H=64 I=32 F16"), std::string::npos);
}

TEST(Explain, Tokens_SayWhatServesEachCall) {
  const std::vector<std::string> arguments = {"explain", "-E", "8",  "-k",       "2",        "-H",
                                              "64",      "-I", "32", "--tokens", "1,64,6000"};
  const ToolResult text = run_tool(arguments);
  ASSERT_EQ(text.exit_code, 0) << text.err;
  for (const char* call : {"\ncall of 1: cpu.", "\ncall of 64: cpu.", "\ncall of 6000: cpu."}) {
    EXPECT_NE(text.out.find(call), std::string::npos) << text.out;
  }
  EXPECT_NE(text.out.find("for 6000 tokens"), std::string::npos) << "planned for the largest";
  std::vector<std::string> bounded = arguments;
  bounded.insert(bounded.end(), {"--max-tokens", "2500", "--json"});
  const ToolResult json = run_tool(bounded);
  ASSERT_EQ(json.exit_code, 0) << json.err;
  const Json calls = Json::parse(json.out)[0]["calls"];
  ASSERT_EQ(calls.size(), 3U);
  EXPECT_EQ(calls[1]["chunks"], 1);
  EXPECT_EQ(calls[2]["chunks"], 3);
  EXPECT_EQ(run_tool({"explain", "-E8", "-k2", "-H64", "-I32", "--tokens", "0"}).exit_code, 2);
}

TEST(Doctor, Quick_ReportsMachineWithoutMeasuring) {
  const ToolResult result = run_tool({"doctor", "--quick", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json document = Json::parse(result.out);
  EXPECT_GT(document["memory_bytes"], 0);
  EXPECT_EQ(document["isas"].back()["name"], "scalar");
  EXPECT_TRUE(document["isas"].back()["usable"]);
  for (const Json& isa : document["isas"]) {
    EXPECT_EQ(isa["usable"].get<bool>(), isa["reason"].get<std::string>().empty()) << isa;
  }
  std::vector<std::string> backends;
  for (const Json& backend : document["backends"]) {
    backends.push_back(backend["name"]);
    EXPECT_TRUE(backend["usable"].get<bool>() || !backend["reason"].get<std::string>().empty());
  }
  EXPECT_EQ(backends, (std::vector<std::string>{"cuda", "mpi", "nccl"}));
  EXPECT_FALSE(document.contains("read_gbps"));
}

TEST(Doctor, Transports_AreListedWithTheirReasons) {
  const Json document = Json::parse(run_tool({"doctor", "--quick", "--json"}).out);
  std::vector<std::string> usable;
  for (const Json& transport : document["transports"]) {
    if (transport["usable"].get<bool>()) usable.push_back(transport["name"]);
    EXPECT_FALSE(transport["reason"].get<std::string>().empty()) << transport;
  }
  EXPECT_NE(std::find(usable.begin(), usable.end(), "local"), usable.end());
  EXPECT_NE(run_tool({"doctor", "--quick"}).out.find("threads of one process"), std::string::npos);
}

TEST(Doctor, Text_ShowsTheEnvironment) {
  const ToolResult result =
      run_tool({"doctor", "--quick"}, {.environment = {"CONCLAVE_NUM_THREADS=1"}});
  EXPECT_NE(result.out.find("CONCLAVE_NUM_THREADS=1"), std::string::npos);
  EXPECT_NE(result.out.find("threads        1 of "), std::string::npos) << result.out;
}

TEST(Doctor, ThreadsOption_BeatsTheEnvironment) {
  const ToolResult result = run_tool({"doctor", "--quick", "--json", "--threads", "2"},
                                     {.environment = {"CONCLAVE_NUM_THREADS=1"}});
  EXPECT_EQ(Json::parse(result.out)["threads"], 2);
}

TEST(Completion, EveryShell_GetsAScript) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const ToolResult result = run_tool({"completion", shell});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_NE(result.out.find("verify"), std::string::npos) << shell;
  }
  EXPECT_EQ(run_tool({"completion", "tcsh"}).exit_code, 2);
}

TEST(ManPage, Roff_NamesEverySubcommand) {
  const ToolResult result = run_tool({"help-man"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out.rfind(".TH CONCLAVE 1", 0), 0U);
  for (const char* command : {"run", "bench", "synth", "convert", "inspect", "verify", "explain",
                              "doctor", "manifest", "completion"}) {
    EXPECT_NE(result.out.find(std::string("\n.SS ") + command + "\n"), std::string::npos)
        << command;
  }
}

}  // namespace
}  // namespace conclave::testing
