// Colours and progress bars appear on a terminal only, and never against the user's wish.
#include "tool_process.h"

#include <gtest/gtest.h>

namespace conclave::testing {
namespace {

const std::vector<std::string> kArguments = {"run", "testdata/mixtral-tiny", "--repetitions", "1"};

bool has_escape_code(const ToolResult& result) {
  return (result.out + result.err).find('\x1b') != std::string::npos;
}

TEST(Terminal, Colours_AreUsed) {
  const ToolResult result = run_tool(kArguments, {.environment = {"TERM=xterm"}, .terminal = true});
  EXPECT_EQ(result.exit_code, 0) << result.out;
  EXPECT_TRUE(has_escape_code(result)) << result.out;
}

TEST(Terminal, NoColor_IsObeyed) {
  const ToolResult result =
      run_tool(kArguments, {.environment = {"TERM=xterm", "NO_COLOR=1"}, .terminal = true});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_FALSE(has_escape_code(result)) << result.out;
}

TEST(Terminal, EmptyNoColor_DoesNotCount) {
  EXPECT_TRUE(has_escape_code(
      run_tool(kArguments, {.environment = {"TERM=xterm", "NO_COLOR="}, .terminal = true})));
}

TEST(Terminal, DumbTerminal_GetsPlainText) {
  EXPECT_FALSE(
      has_escape_code(run_tool(kArguments, {.environment = {"TERM=dumb"}, .terminal = true})));
}

TEST(Terminal, Pipe_GetsPlainTextAndNoProgress) {
  const ToolResult result = run_tool(kArguments, {.environment = {"TERM=xterm"}});
  EXPECT_FALSE(has_escape_code(result));
  EXPECT_EQ(result.out.find('\r'), std::string::npos);
  EXPECT_EQ(result.err, "");
}

TEST(Terminal, Error_IsRedOnATerminalOnly) {
  const std::vector<std::string> arguments = {"run", "testdata/none"};
  EXPECT_TRUE(
      has_escape_code(run_tool(arguments, {.environment = {"TERM=xterm"}, .terminal = true})));
  EXPECT_FALSE(has_escape_code(run_tool(arguments, {.environment = {"TERM=xterm"}})));
}

}  // namespace
}  // namespace conclave::testing
