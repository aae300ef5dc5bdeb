// Shell completions, generated from the declared command line.
#pragma once

#include "command_line.h"

#include <string>

namespace conclave::tool {

std::string bash_completion(const ToolOutline& tool);
std::string zsh_completion(const ToolOutline& tool);
std::string fish_completion(const ToolOutline& tool);

}  // namespace conclave::tool
