#include "ranks/process_mark.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sys/utsname.h>
#include <system_error>

namespace conclave::tool {
namespace {

// The text behind the name in parentheses, which may hold anything: "S 1 4711 ...".
std::string fields_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat", std::ios::binary);
  const std::string stat{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = stat.rfind(") ");
  return name_end == std::string::npos ? "" : stat.substr(name_end + 2);
}

}  // namespace

std::string process_mark(const std::string& pid) {
  const std::string fields = fields_of(pid);
  if (fields.empty() || fields[0] == 'Z' || fields[0] == 'X') return {};
  size_t at = 0;
  constexpr int kFieldsBeforeStart = 19;
  for (int i = 0; i < kFieldsBeforeStart && at != std::string::npos; ++i) {
    at = fields.find(' ', at + 1);
  }
  if (at == std::string::npos) return {};
  return pid + " " + fields.substr(at + 1, fields.find(' ', at + 1) - at - 1);
}

bool is_there(const std::string& mark) {
  return !mark.empty() && process_mark(mark.substr(0, mark.find(' '))) == mark;
}

std::string place_of_marks() {
  utsname machine{};
  ::uname(&machine);
  std::error_code ignored;
  const std::filesystem::path space = std::filesystem::read_symlink("/proc/self/ns/pid", ignored);
  return std::string(machine.nodename) + " " + space.string();
}

std::string state_of(pid_t pid) { return fields_of(std::to_string(pid)).substr(0, 1); }

}  // namespace conclave::tool
