// One place that turns errno of a failed open into an Error.
#pragma once

#include <string>

namespace conclave::inline v0::io {

// Throws Error(kFileNotFound, kPathEscape, kFileNotRegular or kFileAccess) by `error_number`.
[[noreturn]] void throw_open_error(int error_number, std::string file);

}  // namespace conclave::inline v0::io
