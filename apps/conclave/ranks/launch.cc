#include "ranks/launch.h"

#include "output/report_error.h"
#include "output/terminal.h"
#include "ranks/launchers.h"
#include "ranks/own_command.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace conclave::tool {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Clock = std::chrono::steady_clock;

constexpr const char* kReportsVariable = "CONCLAVE_RANK_REPORTS";
// Between a request to end and the end by force, and between the last report and the launcher's
// end.
constexpr auto kGrace = 5s;

std::string report_file(const std::string& directory, int32_t rank) {
  return fmt::format("{}/rank.{}", directory, rank);
}

class ReportDirectory {
 public:
  ReportDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "conclave-ranks-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw Error(ErrorCode::kFileWrite, {.what = "cannot make a directory for the ranks' reports",
                                          .file = name,
                                          .found = std::strerror(errno)});
    }
    path_ = name;
  }
  ReportDirectory(const ReportDirectory&) = delete;
  ReportDirectory& operator=(const ReportDirectory&) = delete;
  ~ReportDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::optional<ExitCode> code_of(int32_t rank) const {
    std::ifstream file(report_file(path_, rank));
    int code = 0;
    if (!(file >> code)) return std::nullopt;
    return static_cast<ExitCode>(code);
  }

 private:
  std::string path_;
};

pid_t start(const std::vector<char*>& arguments) {
  const pid_t child = ::fork();
  if (child < 0) {
    throw Error(ErrorCode::kOutOfMemory,
                {.what = "cannot start the ranks", .found = std::strerror(errno)});
  }
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::dup2(null, STDIN_FILENO);
    ::execv(arguments.front(), arguments.data());
    ::_exit(127);
  }
  return child;
}

// The environment tells started processes where they belong while this lives.
class Told {
 public:
  explicit Told(const ReportDirectory& reports) {
    say(kReportsVariable, reports.path());
    // A launcher may give ranks a terminal of their own, whatever this process has.
    if (!shows_color(stdout)) ::setenv("NO_COLOR", "1", 0);
  }
  Told(const Told&) = delete;
  Told& operator=(const Told&) = delete;
  ~Told() {
    for (const char* const name : {kReportsVariable, kRankVariable, kRanksVariable}) {
      ::unsetenv(name);
    }
  }

  static void say(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); }
};

// A launcher and, through it, its ranks; or the ranks themselves.
class Launched {
 public:
  Launched() = default;
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;
  ~Launched() { end(); }

  void add(pid_t child) { children_.push_back({.pid = child}); }
  bool runs() {
    for (Child& child : children_) {
      if (child.running && ::waitpid(child.pid, &child.status, WNOHANG) != 0) child.running = false;
    }
    return std::ranges::any_of(children_, &Child::running);
  }
  void end() {
    for (const int signal : {SIGTERM, SIGKILL}) {
      if (!runs()) return;
      for (Child& child : children_) {
        if (!child.running) continue;
        ::kill(child.pid, signal);
        child.ended_here = true;
      }
      const auto until = Clock::now() + kGrace;
      while (runs() && Clock::now() < until) std::this_thread::sleep_for(20ms);
    }
  }
  // How the process of a rank ended before it was done, where each rank is one of these.
  std::string ending_of(int32_t rank, int32_t ranks) const {
    const bool is_rank = ranks > 1 && children_.size() == static_cast<size_t>(ranks);
    const Child* const child = is_rank ? &children_[static_cast<size_t>(rank)] : nullptr;
    if (child == nullptr || child->ended_here || !WIFSIGNALED(child->status)) {
      return "its process ended before it was done";
    }
    return fmt::format("its process was ended by signal {} before it was done",
                       WTERMSIG(child->status));
  }
  // How the first one that failed has ended; empty if none has.
  std::string failure() const {
    for (const Child& child : children_) {
      if (WIFSIGNALED(child.status)) {
        return fmt::format("ended by signal {}", WTERMSIG(child.status));
      }
      if (WEXITSTATUS(child.status) != 0) {
        return fmt::format("exit status {}", WEXITSTATUS(child.status));
      }
    }
    return {};
  }

 private:
  struct Child {
    pid_t pid = 0;
    int status = 0;
    bool running = true;
    bool ended_here = false;
  };
  std::vector<Child> children_;
};

// Waits for the launcher's end, but not for ranks that cannot come to theirs.
void wait_for(Launched& launched, const ReportDirectory& reports, int32_t ranks,
              std::chrono::seconds patience) {
  auto until = Clock::time_point::max();
  int32_t reported = 0;
  while (launched.runs() && Clock::now() < until) {
    std::this_thread::sleep_for(20ms);
    int32_t now_reported = 0;
    bool failed = false;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const auto code = reports.code_of(rank);
      now_reported += code ? 1 : 0;
      failed = failed || (code && *code >= ExitCode::kUsage);
    }
    if (now_reported == reported) continue;
    reported = now_reported;
    if (reported == ranks) until = Clock::now() + kGrace;
    if (failed && reported < ranks) until = Clock::now() + patience + kGrace;
  }
  launched.end();
}

// The launcher itself has said on stderr why.
void check_started(const Launched& launched, const ReportDirectory& reports, int32_t ranks) {
  const std::string failure = launched.failure();
  if (failure.empty()) return;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    if (reports.code_of(rank)) return;
  }
  throw Error(ErrorCode::kUnsupported,
              {.what = "the launcher has not run the ranks", .found = failure});
}

void report_lost(int32_t rank, const std::string& ending) {
  report_error(CommError(ErrorCode::kCommPeerLost, rank, "run", ending));
}

ExitCode outcome_of(Launched& launched, const ReportDirectory& reports, int32_t ranks,
                    std::chrono::seconds patience) {
  wait_for(launched, reports, ranks, patience);
  check_started(launched, reports, ranks);
  ExitCode worst = ExitCode::kOk;
  std::optional<int32_t> lost;
  for (int32_t rank = ranks - 1; rank >= 0; --rank) {
    const auto code = reports.code_of(rank);
    if (!code) lost = rank;
    worst = std::max(worst, code.value_or(ExitCode::kRanks));
  }
  // Rank 0 has said what it knows, unless it is the one.
  const bool nobody_said_so = lost && reports.code_of(0).value_or(ExitCode::kOk) == ExitCode::kOk;
  if (nobody_said_so) report_lost(*lost, launched.ending_of(*lost, ranks));
  return worst;
}

}  // namespace

ExitCode launch_ranks(const std::vector<std::string>& launcher, int32_t ranks,
                      std::chrono::seconds patience) {
  std::vector<std::string> words = launcher;
  for (std::string& word : own_command()) words.push_back(std::move(word));
  const ReportDirectory reports;
  Launched launched;
  {
    const Told told(reports);
    launched.add(start(argument_pointers(words)));
  }
  return outcome_of(launched, reports, ranks, patience);
}

ExitCode start_ranks(int32_t ranks, std::chrono::seconds patience) {
  std::vector<std::string> words = own_command();
  const ReportDirectory reports;
  Launched launched;
  {
    const Told told(reports);
    Told::say(kRanksVariable, std::to_string(ranks));
    for (int32_t rank = 0; rank < ranks; ++rank) {
      Told::say(kRankVariable, std::to_string(rank));
      launched.add(start(argument_pointers(words)));
    }
  }
  return outcome_of(launched, reports, ranks, patience);
}

std::string meeting_of_reports() { return environment_value(kReportsVariable) + "/meeting"; }

bool was_launched_here() { return !environment_value(kReportsVariable).empty(); }

void report_to_launcher(int32_t rank, ExitCode code) {
  const std::string directory = environment_value(kReportsVariable);
  if (directory.empty()) return;
  const std::string path = report_file(directory, rank);
  {
    std::ofstream file(path + ".new");
    file << static_cast<int>(code) << "\n";
  }
  // Whole or not at all: the starter looks at any time.
  std::error_code ignored;
  std::filesystem::rename(path + ".new", path, ignored);
}

}  // namespace conclave::tool
