// Formats numbers for people to read.
#pragma once

#include <cstdint>
#include <string>

namespace conclave::tool {

// Returns "1.50 GB", "384 B": decimal units, three significant digits.
std::string bytes_text(uint64_t bytes);
// Returns "48 KiB", "23.6 GiB": binary units, for caches and memory.
std::string binary_bytes_text(uint64_t bytes);
// Returns "30.5 B" parameters, "1.24 M", "512".
std::string count_text(uint64_t count);
// Uses three or more significant digits, never an exponent: "0.0123", "1.234", "123.4".
std::string ms_text(double ms);
// Returns "3.1e-03"; "inf" and "nan" unchanged.
std::string error_text(double error);
// Returns "87 %".
std::string percent_text(double share);

}  // namespace conclave::tool
