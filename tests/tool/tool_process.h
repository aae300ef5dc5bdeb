// Runs the built tool as a user does: a process with arguments, an environment, maybe a terminal.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace conclave::testing {

struct ToolResult {
  int exit_code = -1;  // 128 + signal if one ended it
  std::string out;
  std::string err;  // empty on a terminal, which joins both
};

struct ToolOptions {
  std::vector<std::string> environment = {};  // "NAME=value", in an otherwise empty one
  bool terminal = false;                      // stdout and stderr are a pseudo terminal
};
ToolResult run_tool(const std::vector<std::string>& arguments, const ToolOptions& options = {});

// A new empty directory that is removed with everything in it.
class ScratchDirectory {
 public:
  ScratchDirectory();
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// A checkpoint bundled with the sources, by folder name.
std::string bundled(const std::string& model);
// Copies it, so that a test can damage it.
void copy_model(const std::string& model, const std::filesystem::path& to);

std::string read_text(const std::filesystem::path& path);
void write_text(const std::filesystem::path& path, const std::string& text);

}  // namespace conclave::testing
