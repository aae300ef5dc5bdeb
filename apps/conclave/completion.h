// Shell completions, generated from the command line's outline.
#pragma once

#include "outline.h"

#include <string>

namespace conclave::tool {

std::string bash_completion(const ToolOutline& tool);
std::string zsh_completion(const ToolOutline& tool);
std::string fish_completion(const ToolOutline& tool);

}  // namespace conclave::tool
