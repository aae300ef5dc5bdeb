#include "command_line.h"

#include "nearest_word.h"
#include "output/report_error.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cstdint>
#include <limits>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

constexpr int kHelpColumn = 34;

CLI::Validator within(const Limits& limits) {
  return CLI::Range(limits.lowest, limits.highest).description("");
}

template <class T>
Option add_number(CLI::App& app, const std::string& flags, const char* name, T& value,
                  Limits limits, const std::string& help) {
  return Option(app.add_option(flags, value, help)->type_name(name)->check(within(limits)));
}

// The parser's own message has unexpected arguments in the order in which it gave them up, the last
// one first.
std::string usage_error(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::ExtrasError)) return error.what();
  const std::vector<std::string> extra = app.remaining(/*recurse=*/true);
  return fmt::format(
      "{} not expected: {}",
      extra.size() == 1 ? "The following argument was" : "The following arguments were",
      fmt::join(extra, " "));
}

// The words of a type name such as "a|b|c"; empty if it is not a list of words.
std::vector<std::string> words_of(const std::string& type_name) {
  std::vector<std::string> words;
  if (type_name.find('|') == std::string::npos) return words;
  size_t begin = 0;
  while (begin <= type_name.size()) {
    const size_t bar = std::min(type_name.find('|', begin), type_name.size());
    words.push_back(type_name.substr(begin, bar - begin));
    begin = bar + 1;
  }
  return words;
}

OptionOutline outline_option(const CLI::Option& option) {
  OptionOutline result;
  for (const std::string& name : option.get_snames()) result.flags.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) result.flags.push_back("--" + name);
  result.name = option.get_single_name();
  if (option.get_type_size() > 0) result.value = option.get_type_name();
  result.choices = words_of(result.value);
  result.help = option.get_description();
  result.default_value = option.get_default_str();
  result.required = option.get_required();
  return result;
}

CommandOutline outline_command(const CLI::App& command) {
  CommandOutline result{.name = command.get_name(),
                        .help = command.get_description(),
                        .footer = command.get_footer(),
                        .options = {}};
  for (const CLI::Option* option : command.get_options()) {
    result.options.push_back(outline_option(*option));
  }
  return result;
}

Action finished(ExitCode code) {
  return [code] { return code; };
}

// The first word is the command; the parser itself would call it a surplus argument.
Action refuse_command(const std::string& word, const ToolOutline& outline) {
  std::vector<std::string> names;
  for (const CommandOutline& command : outline.commands) names.push_back(command.name);
  const std::string nearest = nearest_word(word, names);
  const std::string meant =
      nearest.empty() ? "" : fmt::format("did you mean 'conclave {}'? ", nearest);
  report_usage_error(fmt::format("unknown command '{}'", word), meant + "see conclave --help");
  return finished(ExitCode::kUsage);
}

}  // namespace

Option& Option::required() {
  option_->required();
  return *this;
}

Option& Option::with_default() {
  option_->capture_default_str();
  return *this;
}

Option& Option::shown_as(const std::string& values) {
  option_->type_name(values);
  return *this;
}

Option& Option::excludes(const Option& other) {
  option_->excludes(other.option_);
  return *this;
}

Option& Option::needs(const Option& other) {
  option_->needs(other.option_);
  return *this;
}

Option Command::positional(const std::string& name, std::string& value, const std::string& help) {
  return Option(app_.add_option(name, value, help)->type_name(""));
}

Option Command::positional(const std::string& name, std::vector<std::string>& values, int most,
                           const std::string& help) {
  return Option(app_.add_option(name, values, help)->expected(1, most)->type_name(""));
}

Option Command::text(const std::string& flags, const char* name, std::string& value,
                     const std::string& help) {
  return Option(app_.add_option(flags, value, help)->type_name(name));
}

Option Command::texts(const std::string& flags, const char* name, std::vector<std::string>& values,
                      const std::string& help) {
  return Option(app_.add_option(flags, values, help)->type_name(name)->expected(1)->take_all());
}

// The type name lists the words: help, man page and completions take them from there.
Option Command::choice(const std::string& flags, std::string& value,
                       const std::vector<std::string>& choices, const std::string& help) {
  CLI::Option* option = app_.add_option(flags, value, help);
  option->type_name(fmt::format("{}", fmt::join(choices, "|")));
  option->check(CLI::IsMember(choices).description(""));
  if (!value.empty()) option->capture_default_str();
  return Option(option);
}

Option Command::choice_with_options(const std::string& flags, std::string& value,
                                    const std::vector<std::string>& choices,
                                    const std::string& help) {
  CLI::Option* option = app_.add_option(flags, value, help);
  option->type_name(fmt::format("{}", fmt::join(choices, "|")));
  option->check([choices](const std::string& text) {
    CLI::IsMember member(choices);
    std::string word = text.substr(0, text.find(':'));
    return member(word);
  });
  return Option(option);
}

Option Command::number(const std::string& flags, const char* name, int32_t& value, Limits limits,
                       const std::string& help) {
  return add_number(app_, flags, name, value, limits, help);
}

Option Command::number(const std::string& flags, const char* name, int64_t& value, Limits limits,
                       const std::string& help) {
  return add_number(app_, flags, name, value, limits, help);
}

Option Command::number(const std::string& flags, const char* name, std::optional<int64_t>& value,
                       Limits limits, const std::string& help) {
  return add_number(app_, flags, name, value, limits, help);
}

Option Command::seed(uint64_t& value, const std::string& help) {
  // The parser itself takes -1 and numbers beyond 64 bits for the largest one.
  const auto is_number = [](const std::string& text) {
    uint64_t number = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool is_good = problem == std::errc() && end == text.data() + text.size();
    return is_good ? std::string()
                   : fmt::format("Value {} not in range 0 to {}", text,
                                 std::numeric_limits<uint64_t>::max());
  };
  return Option(app_.add_option("--seed", value, help)
                    ->type_name("N")
                    ->capture_default_str()
                    ->check(CLI::Validator(is_number, "")));
}

Option Command::real(const std::string& flags, const char* name, std::optional<double>& value,
                     const std::string& help) {
  return Option(app_.add_option(flags, value, help)->type_name(name));
}

Option Command::flag(const std::string& flags, bool& value, const std::string& help) {
  return Option(app_.add_flag(flags, value, help));
}

void Command::footer(const std::string& text) { app_.footer(text); }

void Command::hide() { app_.group(""); }

void Command::on_run(Action action) {
  app_.callback([action = std::move(action), &chosen = chosen_] { chosen = action; });
}

CommandLine::CommandLine(const std::string& name, const std::string& help,
                         const std::string& version)
    : app_(std::make_unique<CLI::App>(help, name)) {
  app_->set_version_flag("-V,--version", version, "Print version, commit, compiler and features");
  app_->require_subcommand(0, 1);
  app_->get_formatter()->column_width(kHelpColumn);
}

CommandLine::~CommandLine() = default;

Command CommandLine::add_command(const std::string& name, const std::string& help) {
  return Command(*app_->add_subcommand(name, help), chosen_);
}

void CommandLine::footer(const std::string& text) { app_->footer(text); }

ToolOutline CommandLine::outline() const {
  ToolOutline result{.tool = outline_command(*app_), .commands = {}};
  const CLI::App& app = *app_;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!command->get_group().empty()) result.commands.push_back(outline_command(*command));
  }
  return result;
}

Action CommandLine::parse(int argc, const char* const* argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  const CLI::App& app = *app_;
  const bool is_command =
      !app.get_subcommands([&](const CLI::App* command) { return command->get_name() == first; })
           .empty();
  if (!first.empty() && first.front() != '-' && !is_command) {
    return refuse_command(first, outline());
  }
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      app_->exit(error);
      return finished(ExitCode::kOk);
    }
    const auto given = app_->get_subcommands();
    const std::string command = given.empty() ? "" : " " + given.front()->get_name();
    report_usage_error(usage_error(*app_, error), fmt::format("see conclave{} --help", command));
    return finished(ExitCode::kUsage);
  }
  if (chosen_) return chosen_;
  fmt::print("{}", app_->help());
  return finished(ExitCode::kUsage);
}

}  // namespace conclave::tool
