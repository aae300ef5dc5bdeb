// The files that a command reads and writes, told apart before anything is written.
#pragma once

#include <span>
#include <string>

namespace conclave::tool {

struct FileRole {
  const char* option;       // "--output"
  const std::string& path;  // empty: the option was not given
  bool is_result;
};

// Throws Error(kInvalidArgument) naming an option whose file would be written over another result,
// or over a source. Links and "." do not hide that two paths are one file.
void require_distinct(std::span<const FileRole> files);

}  // namespace conclave::tool
