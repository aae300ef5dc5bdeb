#include "command_line.h"

#include "commands.h"
#include "completion.h"
#include "man_page.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace conclave::tool {
namespace {

class OutlineTest : public ::testing::Test {
 protected:
  OutlineTest() : line_("conclave", "Help.", "0.0.0") {
    add_all_commands(line_);
    tool_ = line_.outline();
  }

  CommandLine line_;
  ToolOutline tool_;
};

TEST_F(OutlineTest, VisibleCommands_AreAllThere) {
  std::vector<std::string> names;
  for (const CommandOutline& command : tool_.commands) names.push_back(command.name);
  EXPECT_EQ(names, (std::vector<std::string>{"run", "bench", "synth", "convert", "inspect",
                                             "verify", "compare", "explain", "plan", "doctor",
                                             "manifest", "completion"}));
}

TEST_F(OutlineTest, EveryCommand_HasHelpAndAnExample) {
  for (const CommandOutline& command : tool_.commands) {
    EXPECT_FALSE(command.help.empty()) << command.name;
    EXPECT_NE(command.footer.find("Examples:\n  "), std::string::npos) << command.name;
    EXPECT_NE(command.footer.find("conclave " + command.name), std::string::npos) << command.name;
  }
}

TEST_F(OutlineTest, EveryOption_HasHelp) {
  for (const CommandOutline& command : tool_.commands) {
    for (const OptionOutline& option : command.options) {
      EXPECT_FALSE(option.help.empty()) << command.name << " " << option.name;
    }
  }
}

TEST_F(OutlineTest, Choices_ComeFromTheParser) {
  const auto run =
      std::find_if(tool_.commands.begin(), tool_.commands.end(),
                   [](const CommandOutline& command) { return command.name == "run"; });
  const auto format =
      std::find_if(run->options.begin(), run->options.end(), [](const OptionOutline& option) {
        return !option.flags.empty() && option.flags.back() == "--format";
      });
  ASSERT_NE(format, run->options.end());
  EXPECT_EQ(format->choices,
            (std::vector<std::string>{"table", "markdown", "md", "csv", "json", "jsonl"}));
  EXPECT_EQ(format->default_value, "table");
}

TEST_F(OutlineTest, Completions_NameEveryCommandAndOption) {
  for (const std::string& script :
       {bash_completion(tool_), zsh_completion(tool_), fish_completion(tool_)}) {
    for (const CommandOutline& command : tool_.commands) {
      EXPECT_NE(script.find(command.name), std::string::npos) << command.name;
      for (const OptionOutline& option : command.options) {
        for (const std::string& flag : option.flags) {
          const std::string bare = flag.substr(flag.find_first_not_of('-'));
          EXPECT_NE(script.find(bare), std::string::npos) << command.name << " " << flag;
        }
      }
    }
  }
}

TEST_F(OutlineTest, Completions_OfModelsOfferDirectoriesAndGgufFiles) {
  EXPECT_NE(bash_completion(tool_).find(
                "COMPREPLY=($(compgen -d -- \"$cur\"; compgen -f -X '!*.gguf' -- \"$cur\"))"),
            std::string::npos);
  EXPECT_NE(zsh_completion(tool_).find("'*:MODEL_DIR:_files -g \"*.gguf\"'"), std::string::npos);
}

TEST_F(OutlineTest, ManPage_HasEverySectionAndCommand) {
  const std::string page = man_page(tool_);
  for (const char* section : {".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION", ".SH COMMANDS",
                              ".SH EXIT STATUS", ".SH ENVIRONMENT", ".SH FILES"}) {
    EXPECT_NE(page.find(section), std::string::npos) << section;
  }
  for (const CommandOutline& command : tool_.commands) {
    EXPECT_NE(page.find(".SS " + command.name), std::string::npos) << command.name;
  }
}

struct Parsed {
  ExitCode code = ExitCode::kInternal;
  int64_t count = 0;
  std::string word;
};

// Parses one command "do" with a number from 1 to 9 and one of two words.
Parsed parse(std::vector<const char*> arguments) {
  Parsed parsed;
  parsed.word = "a";
  CommandLine line("t", "Help.", "0.0.0");
  Command command = line.add_command("do", "Does it.");
  command.number("-n,--count", "N", parsed.count, {1, 9}, "A number");
  command.choice("--word", parsed.word, {"a", "b"}, "A word");
  command.on_run([] { return ExitCode::kOk; });
  arguments.insert(arguments.begin(), "t");
  parsed.code = line.parse(static_cast<int>(arguments.size()), arguments.data())();
  return parsed;
}

TEST(CommandLine, GoodArguments_SetValuesAndRun) {
  const Parsed parsed = parse({"do", "-n", "9", "--word=b"});
  EXPECT_EQ(parsed.code, ExitCode::kOk);
  EXPECT_EQ(parsed.count, 9);
  EXPECT_EQ(parsed.word, "b");
}

TEST(CommandLine, WrongArguments_AreUsageErrors) {
  const std::vector<std::vector<const char*>> lines = {{},
                                                       {"undo"},
                                                       {"do", "-n", "0"},
                                                       {"do", "-n", "10"},
                                                       {"do", "-n", "x"},
                                                       {"do", "-n"},
                                                       {"do", "--word", "c"},
                                                       {"do", "more"},
                                                       {"do", "--unknown"}};
  for (const std::vector<const char*>& line : lines) {
    EXPECT_EQ(parse(line).code, ExitCode::kUsage) << (line.empty() ? "(nothing)" : line.back());
  }
}

}  // namespace
}  // namespace conclave::tool
