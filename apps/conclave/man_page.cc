#include "man_page.h"

#include "commands.h"

#include "conclave/version.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>
#include <utility>

namespace conclave::tool {
namespace {

// Backslashes and hyphens have a special meaning, as does a dot or quote at the start of a line.
std::string roff(std::string_view text) {
  std::string result;
  bool line_start = true;
  for (const char c : text) {
    if (line_start && (c == '.' || c == '\'')) result += "\\&";
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else {
      result += c;
    }
    line_start = c == '\n';
  }
  return result;
}

// Lines may break behind each of the words that a value is one of.
std::string breakable(const std::string& words) {
  std::string result;
  for (const char c : words) {
    result += c;
    if (c == '|') result += "\\:";
  }
  return result;
}

std::string sentence(const std::string& text) {
  return roff(text) + (text.ends_with('.') || text.empty() ? "" : ".");
}

std::string option_entry(const OptionOutline& option) {
  std::string flags;
  for (const std::string& flag : option.flags) {
    flags += (flags.empty() ? "" : ", ") + fmt::format("\\fB{}\\fR", roff(flag));
  }
  if (option.positional()) flags = fmt::format("\\fI{}\\fR", roff(option.name));
  if (!option.value.empty()) flags += fmt::format(" \\fI{}\\fR", breakable(roff(option.value)));
  std::string text = fmt::format(".TP\n{}\n{}\n", flags, sentence(option.help));
  if (!option.default_value.empty()) {
    text += fmt::format("Default: {}.\n", roff(option.default_value));
  }
  return text;
}

std::string synopsis(const CommandOutline& command) {
  std::string text = fmt::format("\\fBconclave {}\\fR [\\fIOPTIONS\\fR]", roff(command.name));
  for (const OptionOutline& option : command.options) {
    if (!option.positional()) continue;
    const std::string name = fmt::format("\\fI{}\\fR", roff(option.name));
    text += option.required ? " " + name : " [" + name + "]";
  }
  return text;
}

// The footer is prose, followed by example lines that keep their breaks.
std::string footer_text(const std::string& footer) {
  constexpr std::string_view kExamples = "Examples:\n";
  const size_t at = footer.find(kExamples);
  const std::string prose = footer.substr(0, std::min(at, footer.size()));
  std::string text;
  if (!prose.empty()) {
    text += fmt::format(".PP\n{}\n", roff(prose.substr(0, prose.find_last_not_of('\n') + 1)));
  }
  if (at != std::string::npos) {
    text += fmt::format(".PP\nExamples:\n.PP\n.nf\n{}\n.fi\n",
                        roff(footer.substr(at + kExamples.size())));
  }
  return text;
}

std::string command_section(const CommandOutline& command) {
  std::string text = fmt::format(".SS {}\n{}\n.PP\n{}\n", roff(command.name), synopsis(command),
                                 sentence(command.help));
  for (const OptionOutline& option : command.options) text += option_entry(option);
  return text + footer_text(command.footer);
}

std::string exit_status() {
  std::string text = ".SH EXIT STATUS\n";
  for (const ExitCodeMeaning& entry : kExitCodes) {
    text += fmt::format(".TP\n.B {}\n{}\n", static_cast<int>(entry.code), roff(entry.meaning));
  }
  return text;
}

std::string environment() {
  static constexpr std::pair<const char*, const char*> kEnvironment[] = {
      {"CONCLAVE_NUM_THREADS", "Threads, unless --threads is given."},
      {"OMP_NUM_THREADS", "The same, where CONCLAVE_NUM_THREADS is not set."},
      {"CONCLAVE_ISA", "Instruction set, unless --isa is given."},
      {"CONCLAVE_PIN_THREADS", "1 binds each thread to one CPU."},
      {"NO_COLOR", "If set and not empty, no colour is printed."}};
  std::string text = ".SH ENVIRONMENT\n";
  for (const auto& [name, meaning] : kEnvironment) {
    text += fmt::format(".TP\n.B {}\n{}\n", name, roff(meaning));
  }
  return text;
}

}  // namespace

std::string man_page(const ToolOutline& tool) {
  std::string text = fmt::format(
      ".TH CONCLAVE 1 \"\" \"conclave {}\" \"User Commands\"\n"
      ".ad l\n"  // lists of values have no spaces that could be stretched
      ".SH NAME\n"
      "conclave \\- run, check and measure Mixture\\-of\\-Experts layers\n"
      ".SH SYNOPSIS\n"
      ".B conclave\n"
      ".I COMMAND\n"
      "[\\fIOPTIONS\\fR]\n"
      ".SH DESCRIPTION\n{}\n"
      ".SH OPTIONS\n",
      build_info().version, sentence(tool.tool.help));
  for (const OptionOutline& option : tool.tool.options) text += option_entry(option);
  text += ".SH COMMANDS\n";
  for (const CommandOutline& command : tool.commands) text += command_section(command);
  text += exit_status() + environment();
  return text +
         ".SH FILES\n"
         ".TP\n"
         ".I conclave.manifest.json\n"
         "Checksums of a model's tensors, beside its config.json; see the command manifest.\n";
}

void add_man_page_command(CommandLine& line) {
  Command command = line.add_command("help-man", "Print the man page in roff");
  command.hide();
  command.on_run([&line] {
    fmt::print("{}", man_page(line.outline()));
    return ExitCode::kOk;
  });
}

}  // namespace conclave::tool
