#include "tool_process.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <fcntl.h>
#include <fstream>
#include <poll.h>
#include <pty.h>
#include <sstream>
#include <sys/wait.h>
#include <unistd.h>

namespace conclave::testing {
namespace {

// The tool must get the sanitizers' own options, or it would report differently.
constexpr const char* kInherited[] = {"ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS",
                                      "LLVM_PROFILE_FILE"};

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> list;
  for (std::string& text : strings) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

std::vector<std::string> child_environment(const ToolOptions& options) {
  std::vector<std::string> environment = options.environment;
  for (const char* name : kInherited) {
    if (const char* value = std::getenv(name))
      environment.push_back(std::string(name) + "=" + value);
  }
  return environment;
}

// A tool with a planted fault may stand in for the built one: tools/plant_bugs.py.
const char* tool_path() {
  const char* const planted = std::getenv("CONCLAVE_TEST_TOOL");
  return planted != nullptr ? planted : CONCLAVE_TOOL_PATH;
}

[[noreturn]] void become_tool(std::vector<std::string>& arguments,
                              std::vector<std::string>& environment) {
  ::execve(tool_path(), pointers(arguments).data(), pointers(environment).data());
  ::_exit(126);
}

// Reads both ends until the writers are gone, which a pseudo terminal reports with EIO.
void drain(std::array<pollfd, 2> ends, std::array<std::string*, 2> texts) {
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    if (::poll(ends.data(), ends.size(), -1) < 0) continue;
    for (size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].fd < 0 || ends[i].revents == 0) continue;
      std::array<char, 4096> buffer;
      const ssize_t count = ::read(ends[i].fd, buffer.data(), buffer.size());
      if (count > 0) {
        texts[i]->append(buffer.data(), static_cast<size_t>(count));
      } else {
        ::close(ends[i].fd);
        ends[i].fd = -1;
      }
    }
  }
}

int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

ToolResult run_on_terminal(std::vector<std::string> arguments,
                           std::vector<std::string> environment) {
  ToolResult result;
  int terminal = -1;
  winsize size{.ws_row = 24, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, &size);
  if (child == 0) become_tool(arguments, environment);
  std::string unused;
  drain({pollfd{terminal, POLLIN, 0}, pollfd{-1, 0, 0}}, {&result.out, &unused});
  result.exit_code = wait_for(child);
  return result;
}

ToolResult run_on_pipes(std::vector<std::string> arguments, std::vector<std::string> environment) {
  ToolResult result;
  std::array<int, 2> out{};
  std::array<int, 2> err{};
  if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0) return result;
  const pid_t child = ::fork();
  if (child == 0) {
    const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::dup2(null, STDIN_FILENO);
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    become_tool(arguments, environment);
  }
  ::close(out[1]);
  ::close(err[1]);
  drain({pollfd{out[0], POLLIN, 0}, pollfd{err[0], POLLIN, 0}}, {&result.out, &result.err});
  result.exit_code = wait_for(child);
  return result;
}

}  // namespace

ToolResult run_tool(const std::vector<std::string>& arguments, const ToolOptions& options) {
  std::vector<std::string> command = {"conclave"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return options.terminal ? run_on_terminal(std::move(command), child_environment(options))
                          : run_on_pipes(std::move(command), child_environment(options));
}

ScratchDirectory::ScratchDirectory() {
  std::string name = (std::filesystem::temp_directory_path() / "conclave-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = name;
}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  std::filesystem::permissions(path_, std::filesystem::perms::owner_all, ignored);
  std::filesystem::remove_all(path_, ignored);
}

std::string bundled(const std::string& model) { return "testdata/" + model; }

void copy_model(const std::string& model, const std::filesystem::path& to) {
  std::filesystem::copy(bundled(model), to);
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
}

}  // namespace conclave::testing
