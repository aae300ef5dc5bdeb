// The command line as plain data, read from the parser: what completions and the man page print.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace conclave::tool {

struct OptionOutline {
  std::vector<std::string> flags;    // "-t", "--threads"; empty for a positional
  std::string name;                  // of a positional: "MODEL_DIR"
  std::string value;                 // what it takes: "N", "FILE"; empty for a flag
  std::vector<std::string> choices;  // if it takes one of a few words
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

struct ToolOutline {
  CommandOutline tool;
  std::vector<CommandOutline> commands;  // visible ones
};
ToolOutline outline(const CLI::App& tool);

}  // namespace conclave::tool
