// conclave(1) in roff, generated from the command line's outline.
#pragma once

#include "outline.h"

#include <string>

namespace conclave::tool {

std::string man_page(const ToolOutline& tool);

}  // namespace conclave::tool
