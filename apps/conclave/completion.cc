// conclave completion: scripts for bash, zsh and fish.
#include "completion.h"

#include "commands.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>

namespace conclave::tool {
namespace {

enum class Argument : uint8_t { kNone, kWords, kFile, kDirectory, kModel, kOther };

Argument argument_of(const OptionOutline& option) {
  if (!option.choices.empty()) return Argument::kWords;
  if (option.name == kModelDir) return Argument::kModel;
  if (option.name == kOutputTarget || option.name == kOutputDir) return Argument::kDirectory;
  if (option.value.empty()) return Argument::kNone;
  return option.value == kFileValue ? Argument::kFile : Argument::kOther;
}

std::vector<std::string> all_flags(const CommandOutline& command) {
  std::vector<std::string> flags;
  for (const OptionOutline& option : command.options) {
    flags.insert(flags.end(), option.flags.begin(), option.flags.end());
  }
  return flags;
}

std::vector<std::string> command_names(const ToolOutline& tool) {
  std::vector<std::string> names;
  for (const CommandOutline& command : tool.commands) names.push_back(command.name);
  return names;
}

std::string bash_value(const OptionOutline& option) {
  switch (argument_of(option)) {
    case Argument::kWords:
      return fmt::format("COMPREPLY=($(compgen -W '{}' -- \"$cur\"))",
                         fmt::join(option.choices, " "));
    case Argument::kFile:
      return "COMPREPLY=($(compgen -f -- \"$cur\"))";
    case Argument::kDirectory:
      return "COMPREPLY=($(compgen -d -- \"$cur\"))";
    case Argument::kModel:
      return "COMPREPLY=($(compgen -d -- \"$cur\"; compgen -f -X '!*.gguf' -- \"$cur\"))";
    default:
      return "COMPREPLY=()";
  }
}

// Completes values of the command's options after their flag, then its flags, then positionals.
std::string bash_command(const CommandOutline& command) {
  std::string text = fmt::format("    {})\n      case $prev in\n", command.name);
  for (const OptionOutline& option : command.options) {
    if (option.positional() || argument_of(option) == Argument::kNone) continue;
    text += fmt::format("        {}) {}; return ;;\n", fmt::join(option.flags, "|"),
                        bash_value(option));
  }
  text += "      esac\n";
  std::string positional = "COMPREPLY=()";
  for (const OptionOutline& option : command.options) {
    if (option.positional()) positional = bash_value(option);
  }
  text += fmt::format(
      "      if [[ $cur == -* ]]; then\n"
      "        COMPREPLY=($(compgen -W '{}' -- \"$cur\"))\n"
      "      else\n"
      "        {}\n"
      "      fi\n"
      "      ;;\n",
      fmt::join(all_flags(command), " "), positional);
  return text;
}

// Escapes text for single quotes in zsh's option specs and in fish.
std::string escaped(const std::string& text, const std::string& special) {
  std::string result;
  for (const char c : text) {
    if (c == '\'') {
      result += "'\\''";
      continue;
    }
    if (special.find(c) != std::string::npos) result += '\\';
    result += c;
  }
  return result;
}

std::string zsh_action(const OptionOutline& option) {
  switch (argument_of(option)) {
    case Argument::kWords:
      return fmt::format("({})", fmt::join(option.choices, " "));
    case Argument::kFile:
      return "_files";
    case Argument::kDirectory:
      return "_files -/";
    case Argument::kModel:
      return "_files -g \"*.gguf\"";  // and directories
    default:
      return " ";
  }
}

std::string zsh_command(const CommandOutline& command) {
  std::string text = fmt::format("    {})\n      _arguments -s", command.name);
  for (const OptionOutline& option : command.options) {
    const std::string help = escaped(option.help, "[]:\\");
    if (option.positional()) {
      text += fmt::format(" \\\n        '*:{}:{}'", option.name, zsh_action(option));
      continue;
    }
    for (const std::string& flag : option.flags) {
      text += fmt::format(" \\\n        '{}[{}]", flag, help);
      if (argument_of(option) != Argument::kNone) {
        text += fmt::format(":{}:{}", escaped(option.value, ":\\"), zsh_action(option));
      }
      text += "'";
    }
  }
  return text + "\n      ;;\n";
}

std::string fish_option(const CommandOutline& command, const OptionOutline& option) {
  std::string text =
      fmt::format("complete -c conclave -n '__fish_seen_subcommand_from {}'", command.name);
  for (const std::string& flag : option.flags) {
    text += flag.starts_with("--") ? " -l " + flag.substr(2) : " -s " + flag.substr(1);
  }
  switch (argument_of(option)) {
    case Argument::kNone:
      break;
    case Argument::kWords:
      text += fmt::format(" -x -a '{}'", fmt::join(option.choices, " "));
      break;
    case Argument::kFile:
      text += " -r -F";
      break;
    case Argument::kDirectory:
      text += " -x -a '(__fish_complete_directories)'";
      break;
    case Argument::kModel:
      text += " -x -a '(__fish_complete_suffix .gguf)'";  // and directories
      break;
    case Argument::kOther:
      text += " -x";
      break;
  }
  return text + fmt::format(" -d '{}'\n", escaped(option.help, "\\"));
}

}  // namespace

std::string bash_completion(const ToolOutline& tool) {
  const std::vector<std::string> names = command_names(tool);
  std::string text = fmt::format(
      "# bash completion for conclave: source it, or install it as\n"
      "# share/bash-completion/completions/conclave\n"
      "_conclave() {{\n"
      "  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command= word\n"
      "  for word in \"${{COMP_WORDS[@]:1:COMP_CWORD-1}}\"; do\n"
      "    case $word in {}) command=$word; break ;; esac\n"
      "  done\n"
      "  case $command in\n",
      fmt::join(names, "|"));
  for (const CommandOutline& command : tool.commands) text += bash_command(command);
  text += fmt::format(
      "    *) COMPREPLY=($(compgen -W '{} {}' -- \"$cur\")) ;;\n"
      "  esac\n"
      "}}\n"
      "complete -F _conclave conclave\n",
      fmt::join(names, " "), fmt::join(all_flags(tool.tool), " "));
  return text;
}

std::string zsh_completion(const ToolOutline& tool) {
  std::string text =
      "#compdef conclave\n"
      "# zsh completion for conclave: install it as _conclave in a directory of $fpath\n"
      "_conclave() {\n"
      "  local -a commands=(\n";
  for (const CommandOutline& command : tool.commands) {
    text += fmt::format("    '{}:{}'\n", command.name, escaped(command.help, ":\\"));
  }
  text +=
      "  )\n"
      "  if (( CURRENT == 2 )); then\n"
      "    _describe command commands\n"
      "    return\n"
      "  fi\n"
      "  local command=$words[2]\n"
      "  words=(\"$words[1]\" \"${words[@]:2}\")\n"
      "  (( CURRENT-- ))\n"
      "  case $command in\n";
  for (const CommandOutline& command : tool.commands) text += zsh_command(command);
  return text +
         "  esac\n"
         "}\n"
         "_conclave \"$@\"\n";
}

std::string fish_completion(const ToolOutline& tool) {
  std::string text =
      "# fish completion for conclave: install it as\n"
      "# share/fish/vendor_completions.d/conclave.fish\n";
  for (const CommandOutline& command : tool.commands) {
    text += fmt::format("complete -c conclave -n __fish_use_subcommand -f -a {} -d '{}'\n",
                        command.name, escaped(command.help, "\\"));
  }
  for (const CommandOutline& command : tool.commands) {
    for (const OptionOutline& option : command.options) {
      if (!option.positional()) text += fish_option(command, option);
    }
  }
  return text;
}

void add_completion_command(CommandLine& line) {
  Command command = line.add_command("completion", "Print a completion script for a shell");
  auto shell = std::make_shared<std::string>();
  command.choice("SHELL", *shell, {"bash", "zsh", "fish"}, "The shell").required();
  command.footer(
      "Examples:\n"
      "  source <(conclave completion bash)\n"
      "  conclave completion zsh > ~/.zsh/completions/_conclave\n"
      "  conclave completion fish > ~/.config/fish/completions/conclave.fish");
  command.on_run([shell, &line] {
    const ToolOutline tool = line.outline();
    const std::string text = *shell == "bash"  ? bash_completion(tool)
                             : *shell == "zsh" ? zsh_completion(tool)
                                               : fish_completion(tool);
    fmt::print("{}", text);
    return ExitCode::kOk;
  });
}

}  // namespace conclave::tool
