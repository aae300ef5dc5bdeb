// Reads the small text files of sysfs and procfs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::inline v0::cpu {

// The file's text without trailing white space; empty if it cannot be read.
std::string read_text(const std::filesystem::path& path);
// Parses a whole decimal number after leading spaces; `rest` receives what follows it.
std::optional<int64_t> parse_integer(std::string_view text, std::string_view* rest = nullptr);
// The number in a line "key   123 ..." or "key: 123 ..." of `text`.
std::optional<int64_t> find_value(std::string_view text, std::string_view key);

}  // namespace conclave::inline v0::cpu
