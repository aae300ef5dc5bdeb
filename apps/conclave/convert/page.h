// The report of a conversion as one page that needs nothing else: text, tables and drawings.
#pragma once

#include "conclave/convert.h"

#include <string>

namespace conclave::tool {

std::string conversion_page(const ConversionReport& report);

}  // namespace conclave::tool
