// An option that takes one of a few words. Its type name is "a|b|c": the help, the man page and the
// completions all show or offer the words from there.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace conclave::tool {

CLI::Option* add_choice_option(CLI::App& command, const std::string& flags, std::string& value,
                               const std::vector<std::string>& choices, const std::string& help);
// The words of a type name; empty if it is not a list of words.
std::vector<std::string> choices_of(const CLI::Option& option);

}  // namespace conclave::tool
