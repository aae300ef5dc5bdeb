// Tests help, version and wrong usage, which a user meets before any work is done.
#include "tool_process.h"

#include <gtest/gtest.h>

namespace conclave::testing {
namespace {

const std::vector<std::string> kCommands = {"run",     "bench",    "synth",     "convert",
                                            "inspect", "verify",   "explain",   "plan",
                                            "doctor",  "manifest", "completion"};

TEST(Usage, Help_ListsEveryCommandAndExitCode) {
  const ToolResult result = run_tool({"--help"});
  EXPECT_EQ(result.exit_code, 0);
  for (const std::string& command : kCommands) {
    EXPECT_NE(result.out.find("\n  " + command + " "), std::string::npos) << command;
  }
  EXPECT_NE(result.out.find("Exit status:\n  0  "), std::string::npos);
  EXPECT_EQ(result.out.find("help-man"), std::string::npos) << "the hidden command shows";
}

TEST(Usage, CommandHelp_HasExamples) {
  for (const std::string& command : kCommands) {
    const ToolResult result = run_tool({command, "--help"});
    EXPECT_EQ(result.exit_code, 0) << command;
    EXPECT_NE(result.out.find("Examples:\n"), std::string::npos) << command;
    EXPECT_EQ(result.err, "") << command;
  }
}

TEST(Usage, Version_NamesCommitAndCompiler) {
  const ToolResult result = run_tool({"--version"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out.rfind("conclave 0.", 0), 0U) << result.out;
  EXPECT_NE(result.out.find("\ncommit "), std::string::npos);
  EXPECT_NE(result.out.find("\nfeatures: cpu"), std::string::npos);
}

TEST(Usage, NoCommand_PrintsHelpAndFails) {
  const ToolResult result = run_tool({});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.out.find("Subcommands:"), std::string::npos);
}

TEST(Usage, MistypedCommand_NamesTheNearest) {
  const std::pair<const char*, const char*> meant[] = {
      {"rum", "run"}, {"inspekt", "inspect"}, {"bnech", "bench"}, {"verfiy", "verify"}};
  for (const auto& [given, nearest] : meant) {
    const ToolResult result = run_tool({given, "testdata/mixtral-tiny"});
    EXPECT_NE(result.err.find("did you mean 'conclave " + std::string(nearest) + "'?"),
              std::string::npos)
        << result.err;
  }
}

TEST(Usage, CommandLikeNone_SuggestsNothing) {
  for (const char* given : {"frob", "x", "help-me-please"}) {
    const ToolResult result = run_tool({given});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.err.find("did you mean"), std::string::npos) << result.err;
    EXPECT_NE(result.err.find("see conclave --help"), std::string::npos) << result.err;
  }
}

struct WrongUsage {
  const char* name;
  std::vector<std::string> arguments;
  const char* message;  // the first line of the message
};

class WrongUsageTest : public ::testing::TestWithParam<WrongUsage> {};

TEST_P(WrongUsageTest, Run_SaysWhatAndExitsWithTwo) {
  const ToolResult result = run_tool(GetParam().arguments);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.substr(0, result.err.find('\n')), GetParam().message);
}

const std::string kModel = "testdata/mixtral-tiny";

INSTANTIATE_TEST_SUITE_P(
    Usage, WrongUsageTest,
    ::testing::Values(
        WrongUsage{"UnknownCommand",
                   {"frob"},
                   "conclave: error [kInvalidArgument]: unknown command 'frob'"},
        WrongUsage{"MistypedCommand",
                   {"rum"},
                   "conclave: error [kInvalidArgument]: unknown command 'rum'"},
        WrongUsage{"UnknownOption",
                   {"run", kModel, "--bogus"},
                   "conclave: error [kInvalidArgument]: The following argument was not expected: "
                   "--bogus"},
        WrongUsage{"UnknownOptions",
                   {"run", kModel, "other", "--bogus", "7"},
                   "conclave: error [kInvalidArgument]: The following arguments were not expected: "
                   "other --bogus 7"},
        WrongUsage{
            "MissingModel", {"run"}, "conclave: error [kInvalidArgument]: MODEL_DIR is required"},
        WrongUsage{"NoThreads",
                   {"run", kModel, "--threads", "0"},
                   "conclave: error [kInvalidArgument]: --threads: Value 0 not in range 1 to 4096"},
        WrongUsage{"Format",
                   {"run", kModel, "--format", "xml"},
                   "conclave: error [kInvalidArgument]: --format: xml not in "
                   "{table,markdown,md,csv,json,jsonl}"},
        WrongUsage{"NanTolerance",
                   {"run", kModel, "--tolerance", "nan"},
                   "conclave: error [kInvalidArgument]: the tolerance is not a positive number"},
        WrongUsage{"InfiniteTolerance",
                   {"run", kModel, "--tolerance", "inf"},
                   "conclave: error [kInvalidArgument]: the tolerance is not a positive number"},
        WrongUsage{"NegativeTolerance",
                   {"run", kModel, "--tolerance=-1"},
                   "conclave: error [kInvalidArgument]: the tolerance is not a positive number"},
        WrongUsage{"BackwardLayers",
                   {"run", kModel, "--layers", "3-1"},
                   "conclave: error [kInvalidArgument]: the range runs backwards"},
        WrongUsage{"BadTokens",
                   {"bench", "--tokens", "1-9+0"},
                   "conclave: error [kInvalidArgument]: the range's step is too small"},
        WrongUsage{"NoTokens",
                   {"bench", "--tokens", "0"},
                   "conclave: error [kInvalidArgument]: a number is out of range"},
        WrongUsage{"UnknownPreset",
                   {"bench", "--model", "nope"},
                   "conclave: error [kUnknownName]: no preset of this name"},
        WrongUsage{"PresetAndSizes",
                   {"bench", "--model", "olmoe", "-E", "4"},
                   "conclave: error [kInvalidArgument]: a preset and sizes exclude each other"},
        WrongUsage{"MissingSize",
                   {"bench", "-E", "4"},
                   "conclave: error [kInvalidArgument]: -k is missing"},
        WrongUsage{"UnknownRouting",
                   {"bench", "--routing", "zipf:x"},
                   "conclave: error [kInvalidArgument]: unknown routing pattern"},
        WrongUsage{"UnknownIsa",
                   {"run", kModel, "--isa", "sse9"},
                   "conclave: error [kUnknownName]: no instruction set of this name"},
        WrongUsage{"UnknownArithmetic",
                   {"run", kModel, "--arithmetic", "f8"},
                   "conclave: error [kUnknownName]: no arithmetic of this name"},
        WrongUsage{"NothingToExplain",
                   {"explain"},
                   "conclave: error [kInvalidArgument]: nothing to explain"},
        WrongUsage{"RoutingWithoutFile",
                   {"run", kModel, "--routing", "file"},
                   "conclave: error [kInvalidArgument]: there is no file to take the routing from"},
        WrongUsage{"ShardSize",
                   {"synth", "-E4", "-k2", "-H8", "-I8", "--shard-size", "x", "d"},
                   "conclave: error [kInvalidArgument]: not a size in bytes"},
        WrongUsage{"NegativeSeed",
                   {"run", kModel, "--seed", "-1"},
                   "conclave: error [kInvalidArgument]: --seed: Value -1 not in range 0 to "
                   "18446744073709551615"},
        WrongUsage{"SeedBeyond64Bits",
                   {"bench", "--seed", "18446744073709551616"},
                   "conclave: error [kInvalidArgument]: --seed: Value 18446744073709551616 not in "
                   "range 0 to 18446744073709551615"},
        WrongUsage{"RecordWithoutFile",
                   {"run", kModel, "--record", "bf16"},
                   "conclave: error [kInvalidArgument]: there is no file to take a record from"},
        WrongUsage{"ResultOverSource",
                   {"run", kModel, "-i", "a/../in.safetensors", "-o", "./in.safetensors"},
                   "conclave: error [kInvalidArgument]: two results, or a result and its source, "
                   "cannot be one file"},
        WrongUsage{"ResultOverResult",
                   {"run", kModel, "--trace", "x", "-o", "x"},
                   "conclave: error [kInvalidArgument]: two results, or a result and its source, "
                   "cannot be one file"},
        WrongUsage{"PlanOverTrace",
                   {"plan", kModel, "-c", "8", "--trace", "x", "--json", "x"},
                   "conclave: error [kInvalidArgument]: two results, or a result and its source, "
                   "cannot be one file"},
        WrongUsage{"PlanOfModelAndType",
                   {"plan", kModel, "-c", "8", "--dtype", "fp8-block"},
                   "conclave: error [kInvalidArgument]: the model's own layers say this"},
        WrongUsage{"ExplainOfModelAndSizes",
                   {"explain", kModel, "-E", "8"},
                   "conclave: error [kInvalidArgument]: the model's own layers say this"},
        WrongUsage{"ExplainOfModelAndPreset",
                   {"explain", kModel, "--model", "olmoe"},
                   "conclave: error [kInvalidArgument]: the model's own layers say this"}),
    [](const auto& instance) { return std::string(instance.param.name); });

}  // namespace
}  // namespace conclave::testing
