#include "ranks/own_command.h"

#include "conclave/error.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

namespace conclave::tool {

std::vector<std::string> own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\0', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  std::error_code ignored;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  if (words.empty() || program.empty()) {
    throw Error(ErrorCode::kUnsupported, {.what = "this program cannot start itself again",
                                          .found = "no /proc",
                                          .hint = "start the ranks by mpirun"});
  }
  words.front() = program.string();
  return words;
}

std::vector<char*> argument_pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace conclave::tool
