// conclave(1) in roff, generated from the declared command line.
#pragma once

#include "command_line.h"

#include <string>

namespace conclave::tool {

std::string man_page(const ToolOutline& tool);

}  // namespace conclave::tool
