// Errors as the user sees them, on stderr:
//   conclave: error [kTensorShape]: the tensor has the wrong shape
//     file:     model.safetensors
//     tensor:   ...
#pragma once

#include "conclave/error.h"

#include <string>
#include <string_view>

namespace conclave::tool {

// The lines of an error, without colour, each ending in a newline.
std::string describe_error(const Error& error);
void report_error(const Error& error);
// `hint` may be empty.
void report_usage_error(std::string_view what, std::string_view hint);
void report_warning(std::string_view message);

}  // namespace conclave::tool
