#include "ranks/meeting.h"

#include "ranks/process_mark.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <utility>

namespace conclave::tool {
namespace {

using std::chrono_literals::operator""ms;
using Clock = std::chrono::steady_clock;

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

[[noreturn]] void refuse(const std::string& what, const std::string& file,
                         const std::string& found) {
  throw Error(ErrorCode::kFileWrite, {.what = what, .file = file, .found = found});
}

// A rank's words count as long as their writer lives. The first line is the writer's mark.
std::optional<std::string> said_by_living(const std::string& path) {
  const std::string text = text_of(path);
  const size_t line_end = text.find('\n');
  if (line_end == std::string::npos) return std::nullopt;
  const std::string mark = text.substr(0, line_end);
  if (!is_there(mark)) return std::nullopt;
  return text.substr(line_end + 1);
}

}  // namespace

FileMeeting::FileMeeting(std::string folder, int32_t rank, int32_t size,
                         std::chrono::nanoseconds timeout)
    : folder_(std::move(folder)), rank_(rank), size_(size), timeout_(timeout) {
  if (::mkdir(folder_.c_str(), S_IRWXU) != 0 && errno != EEXIST) {
    refuse("cannot make the folder where ranks meet", folder_, std::strerror(errno));
  }
  struct stat info {};
  const bool is_ours = ::lstat(folder_.c_str(), &info) == 0 && S_ISDIR(info.st_mode) &&
                       info.st_uid == ::geteuid() && (info.st_mode & (S_IRWXG | S_IRWXO)) == 0;
  if (!is_ours) refuse("others may write where ranks meet", folder_, "another owner, or access");
}

std::vector<std::string> FileMeeting::exchange(const std::string& mine) {
  const auto until = Clock::now() + timeout_;
  const std::string round = fmt::format("{}/{}.", folder_, round_);
  const std::string own = own_text(round_++);
  {
    std::ofstream file(own + ".new", std::ios::binary);
    file << process_mark(std::to_string(::getpid())) << '\n' << mine;
    if (!file.flush()) refuse("cannot say where this rank is", own, std::strerror(errno));
  }
  // Whole or not at all: others look at any time.
  std::error_code problem;
  std::filesystem::rename(own + ".new", own, problem);
  if (problem) refuse("cannot say where this rank is", own, problem.message());
  std::vector<std::string> texts;
  auto pause = 1ms;
  while (std::ssize(texts) < size_) {
    const auto rank = static_cast<int32_t>(texts.size());
    if (auto text = said_by_living(round + std::to_string(rank))) {
      texts.push_back(std::move(*text));
      continue;
    }
    if (Clock::now() >= until) {
      throw CommError(ErrorCode::kCommTimeout, rank, "connect", "it has not come in time");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, 20ms);
  }
  return texts;
}

FileMeeting::~FileMeeting() {
  for (int32_t round = 0; round < round_; ++round) {
    ::unlink(own_text(round).c_str());
    ::unlink((own_text(round) + ".new").c_str());  // is there where it could not be renamed
  }
  ::rmdir(folder_.c_str());  // unless texts of others are there
}

std::string FileMeeting::own_text(int32_t round) const {
  return fmt::format("{}/{}.{}", folder_, round, rank_);
}

}  // namespace conclave::tool
