// The command line, declared once: parsing, help, man page and completions all come from it. A thin
// layer over the parser, so that commands do not each compile it.
#pragma once

#include "exit_code.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace conclave::tool {

using Action = std::function<ExitCode()>;

// The values that a number may have, both ends included.
struct Limits {
  int64_t lowest = 0;
  int64_t highest = std::numeric_limits<int64_t>::max();
};

// A handle on one declared option, to specify more about it.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}
  Option& required();
  // Makes the current value the default, and shows it as such.
  Option& with_default();
  // The help shows this in place of the values that it takes.
  Option& shown_as(const std::string& values);
  Option& excludes(const Option& other);
  Option& needs(const Option& other);

 private:
  CLI::Option* option_;
};

// Values must outlive the parse. `flags` is "-t,--threads"; `name` describes the value: "N".
class Command {
 public:
  Command(CLI::App& app, Action& chosen) : app_(app), chosen_(chosen) {}

  Option positional(const std::string& name, std::string& value, const std::string& help);
  // Takes one or more words.
  Option positional(const std::string& name, std::vector<std::string>& values, int most,
                    const std::string& help);
  Option text(const std::string& flags, const char* name, std::string& value,
              const std::string& help);
  // May be repeated, each time with one value.
  Option texts(const std::string& flags, const char* name, std::vector<std::string>& values,
               const std::string& help);
  Option choice(const std::string& flags, std::string& value,
                const std::vector<std::string>& choices, const std::string& help);
  // The same for words that a colon and options may follow.
  Option choice_with_options(const std::string& flags, std::string& value,
                             const std::vector<std::string>& choices, const std::string& help);
  Option number(const std::string& flags, const char* name, int32_t& value, Limits limits,
                const std::string& help);
  Option number(const std::string& flags, const char* name, int64_t& value, Limits limits,
                const std::string& help);
  Option number(const std::string& flags, const char* name, std::optional<int64_t>& value,
                Limits limits, const std::string& help);
  Option seed(uint64_t& value, const std::string& help);
  // Accepts any float, including NaN: the command judges it.
  Option real(const std::string& flags, const char* name, std::optional<double>& value,
              const std::string& help);
  Option flag(const std::string& flags, bool& value, const std::string& help);

  // Prose, then "Examples:" and indented lines.
  void footer(const std::string& text);
  // Leaves the command out of help, man page and completions.
  void hide();
  // Sets what runs when the command is chosen.
  void on_run(Action action);

 private:
  CLI::App& app_;
  Action& chosen_;
};

// A positional MODEL_DIR is a directory or a GGUF file, a TARGET a directory; values named FILE are
// files.
inline constexpr const char* kModelDir = "MODEL_DIR";
inline constexpr const char* kOutputTarget = "TARGET";
inline constexpr const char* kOutputDir = "OUT_DIR";
inline constexpr const char* kFileValue = "FILE";

struct OptionOutline {
  std::vector<std::string> flags;    // "-t", "--threads"; empty for a positional
  std::string name;                  // for a positional: "MODEL_DIR"
  std::string value;                 // its value: "N", "FILE"; empty for a flag
  std::vector<std::string> choices;  // the words it accepts, if only a few
  std::string help;
  std::string default_value;
  bool required = false;

  bool positional() const { return flags.empty(); }
};
struct CommandOutline {
  std::string name;
  std::string help;
  std::string footer;
  std::vector<OptionOutline> options;
};
// The declared command line as plain data.
struct ToolOutline {
  CommandOutline tool;
  std::vector<CommandOutline> commands;  // without hidden ones
};

class CommandLine {
 public:
  CommandLine(const std::string& name, const std::string& help, const std::string& version);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Command add_command(const std::string& name, const std::string& help);
  void footer(const std::string& text);
  ToolOutline outline() const;

  // Returns the chosen command's action. It has already finished for --help, --version and wrong
  // usage, which has been reported.
  Action parse(int argc, const char* const* argv);

 private:
  Action chosen_;
  std::unique_ptr<CLI::App> app_;
};

}  // namespace conclave::tool
