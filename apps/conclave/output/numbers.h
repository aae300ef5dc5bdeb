// Numbers as people read them.
#pragma once

#include <cstdint>
#include <string>

namespace conclave::tool {

// "1.50 GB", "384 B": decimal units, three significant digits.
std::string bytes_text(uint64_t bytes);
// "48 KiB", "23.6 GiB": binary units, for caches and memory.
std::string binary_bytes_text(uint64_t bytes);
// "30.5 B" parameters, "1.24 M", "512".
std::string count_text(uint64_t count);
// Three or more significant digits, never an exponent: "0.0123", "1.234", "123.4".
std::string ms_text(double ms);
// "3.1e-03"; "inf" and "nan" as such.
std::string error_text(double error);
// "87 %".
std::string percent_text(double share);

}  // namespace conclave::tool
