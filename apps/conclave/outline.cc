#include "outline.h"

#include "input/choice.h"

namespace conclave::tool {
namespace {

OptionOutline outline_option(const CLI::Option& option) {
  OptionOutline result;
  for (const std::string& name : option.get_snames()) result.flags.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) result.flags.push_back("--" + name);
  result.name = option.get_single_name();
  if (option.get_type_size() > 0) result.value = option.get_type_name();
  result.choices = choices_of(option);
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

}  // namespace

ToolOutline outline(const CLI::App& tool) {
  ToolOutline result{.tool = outline_command(tool), .commands = {}};
  for (const CLI::App* command : tool.get_subcommands([](const CLI::App*) { return true; })) {
    // A command without a group is hidden.
    if (!command->get_group().empty()) result.commands.push_back(outline_command(*command));
  }
  return result;
}

}  // namespace conclave::tool
