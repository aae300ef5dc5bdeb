// Runs conclave convert with few tokens, as its tests do.
#pragma once

#include "tool_process.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace conclave::testing {

inline ToolResult convert(const std::string& source, const std::filesystem::path& out,
                          const std::string& form, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"convert", source,     out.string(), "--format",
                                        form,      "--tokens", "8"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_tool(arguments);
}

inline nlohmann::json read_json(const std::filesystem::path& path) {
  return nlohmann::json::parse(read_text(path));
}

}  // namespace conclave::testing
