// Drawings of a conversion's errors and sizes, as SVG for a page whose style sheet gives colours.
#pragma once

#include "conclave/convert.h"

#include <string>

namespace conclave::tool {

// "0.42 %", with so many digits, but for those before the point.
std::string percent(double share, int digits = 2);

// Bars of the model before and after: converted matrices, and all else.
std::string size_chart(const ConversionReport& report);
// For each layer its tokens, their median and the worst, on a logarithmic axis.
std::string output_chart(const ConversionReport& report);
// A field for each kind of matrix and layer, darker for larger errors.
std::string matrix_chart(const ConversionReport& report);

}  // namespace conclave::tool
