#include "ranks/report_directory.h"

#include "ranks/process_mark.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <vector>

namespace conclave::tool {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "conclave-ranks-";

std::string report_file(const std::string& directory, int32_t rank) {
  return fmt::format("{}/rank.{}", directory, rank);
}
std::string process_file(const std::string& directory, int32_t rank) {
  return fmt::format("{}/process.{}", directory, rank);
}
fs::path starter_file(const fs::path& directory) { return directory / "starter"; }

std::string contents_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Whole or not at all: others look at any time.
void say(const std::string& path, std::string_view text) {
  {
    std::ofstream file(path + ".new");
    file << text << "\n";
  }
  std::error_code ignored;
  fs::rename(path + ".new", path, ignored);
}

// This user made it, and it is no link to something else.
bool is_ours(const fs::path& directory) {
  struct stat info {};
  return ::lstat(directory.c_str(), &info) == 0 && S_ISDIR(info.st_mode) &&
         info.st_uid == ::geteuid();
}

bool has_dead_starter(const fs::path& directory) {
  const std::string text = contents_of(starter_file(directory));
  const size_t line_end = text.find('\n');
  if (line_end == std::string::npos || text.back() != '\n') return false;
  if (text.substr(0, line_end) != place_of_marks()) return false;
  return !is_there(text.substr(line_end + 1, text.size() - line_end - 2));
}

void remove_dead(const fs::path& folder) {
  std::error_code ignored;
  std::vector<fs::path> dead;
  for (fs::directory_iterator entry(folder, ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    const fs::path& path = entry->path();
    if (!path.filename().string().starts_with(kPrefix)) continue;
    if (is_ours(path) && has_dead_starter(path)) dead.push_back(path);
  }
  for (const fs::path& path : dead) fs::remove_all(path, ignored);
}

}  // namespace

ReportDirectory::ReportDirectory() {
  const fs::path folder = fs::temp_directory_path();
  remove_dead(folder);
  std::string name = (folder / (std::string(kPrefix) + "XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr) {
    throw Error(ErrorCode::kFileWrite, {.what = "cannot make a directory for the ranks' reports",
                                        .file = name,
                                        .found = std::strerror(errno)});
  }
  path_ = name;
  say(starter_file(path_).string(),
      place_of_marks() + "\n" + process_mark(std::to_string(::getpid())));
}

ReportDirectory::~ReportDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::optional<ExitCode> ReportDirectory::code_of(int32_t rank) const {
  std::ifstream file(report_file(path_, rank));
  int code = 0;
  if (!(file >> code)) return std::nullopt;
  return static_cast<ExitCode>(code);
}

std::optional<pid_t> ReportDirectory::process_of(int32_t rank) const {
  pid_t pid = 0;
  std::ifstream file(process_file(path_, rank));
  if (!(file >> pid) || pid <= 0) return std::nullopt;
  return pid;
}

bool ReportDirectory::is_rank(pid_t pid) const {
  return contents_of(fmt::format("/proc/{}/environ", pid)).find(path_) != std::string::npos;
}

void report_code(const std::string& directory, int32_t rank, ExitCode code) {
  say(report_file(directory, rank), std::to_string(static_cast<int>(code)));
}

void report_process(const std::string& directory, int32_t rank) {
  say(process_file(directory, rank), std::to_string(::getpid()));
}

}  // namespace conclave::tool
