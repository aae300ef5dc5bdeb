#include "input/choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace conclave::tool {

CLI::Option* add_choice_option(CLI::App& command, const std::string& flags, std::string& value,
                               const std::vector<std::string>& choices, const std::string& help) {
  CLI::Option* option = command.add_option(flags, value, help)
                            ->type_name(fmt::format("{}", fmt::join(choices, "|")))
                            ->check(CLI::IsMember(choices).description(""));
  if (!value.empty()) option->capture_default_str();
  return option;
}

std::vector<std::string> choices_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  std::vector<std::string> words;
  if (type.find('|') == std::string::npos) return words;
  size_t begin = 0;
  while (begin <= type.size()) {
    const size_t bar = std::min(type.find('|', begin), type.size());
    words.push_back(type.substr(begin, bar - begin));
    begin = bar + 1;
  }
  return words;
}

}  // namespace conclave::tool
