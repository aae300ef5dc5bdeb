#include "ranks/launch.h"

#include "interrupt.h"
#include "output/report_error.h"
#include "output/terminal.h"
#include "ranks/launchers.h"
#include "ranks/own_command.h"
#include "ranks/process_mark.h"
#include "ranks/report_directory.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <optional>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Clock = std::chrono::steady_clock;

constexpr const char* kReportsVariable = "CONCLAVE_RANK_REPORTS";
// Between a request to end and the end by force, and between the last report and the launcher's
// end.
constexpr auto kGrace = 5s;

constexpr auto kRound = 20ms;  // between two looks at the ranks
constexpr int kRoundsOfStates = 25;

bool has_ended(pid_t pid) {
  return state_of(pid) == "Z" || (::kill(pid, 0) != 0 && errno == ESRCH);
}

// Looks after ranks whose peers cannot: they set no deadline while one loads, and a launcher's may
// not even come together where one has died. Rounds are counted and no time, since the starter may
// have been stopped with its ranks.
class RankWatch {
 public:
  RankWatch(const ReportDirectory& reports, int32_t ranks, std::chrono::seconds patience)
      : reports_(reports), rounds_(static_cast<size_t>(ranks)), patience_(patience) {}

  void look() {
    for (size_t i = 0; i < rounds_.size(); ++i) look_at(static_cast<int32_t>(i), rounds_[i]);
  }
  // Those that were stopped for longer than that, and have been ended.
  const std::vector<int32_t>& stopped() const { return stopped_; }
  // One that has ended without a report, those included.
  std::optional<int32_t> lost() const { return lost_; }

 private:
  void look_at(int32_t rank, int64_t& rounds) {
    const auto pid = reports_.process_of(rank);
    if (!pid) return;
    if (has_ended(*pid)) {
      if (!lost_ && !reports_.code_of(rank)) lost_ = rank;
      return;
    }
    rounds = state_of(*pid) == "T" ? rounds + 1 : 0;
    if (rounds * kRoundsOfStates * kRound < patience_ || !reports_.is_rank(*pid)) return;
    ::kill(*pid, SIGKILL);
    stopped_.push_back(rank);
  }

  const ReportDirectory& reports_;
  std::vector<int64_t> rounds_;  // in which a rank was found stopped, one after the other
  std::chrono::milliseconds patience_;
  std::vector<int32_t> stopped_;
  std::optional<int32_t> lost_;
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
  // Ends those that were stopped for longer than that, however long they run otherwise. As for
  // ranks, rounds are counted.
  void end_stopped(std::chrono::milliseconds patience) {
    for (Child& child : children_) {
      if (!child.running) continue;
      child.rounds_stopped = state_of(child.pid) == "T" ? child.rounds_stopped + 1 : 0;
      if (child.rounds_stopped * kRoundsOfStates * kRound < patience) continue;
      ::kill(child.pid, SIGKILL);
      child.was_stopped = true;
    }
  }
  bool was_stopped() const { return std::ranges::any_of(children_, &Child::was_stopped); }
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
      while (runs() && Clock::now() < until) std::this_thread::sleep_for(kRound);
    }
  }
  // Whether each rank is one of these, and no launcher between.
  bool are_ranks(int32_t ranks) const {
    return ranks > 1 && children_.size() == static_cast<size_t>(ranks);
  }
  // The loss of a rank that is not done, as told by its process where each rank is one of these.
  CommError loss_of(int32_t rank, int32_t ranks) const {
    const Child* const child = are_ranks(ranks) ? &children_[static_cast<size_t>(rank)] : nullptr;
    if (child != nullptr && child->was_stopped) return stopped(rank);
    if (child != nullptr && child->ended_here) {
      return {ErrorCode::kCommTimeout, rank, "run",
              "its process did not come to its end in time, and was ended"};
    }
    std::string ending = "its process ended before it was done";
    if (child != nullptr && WIFSIGNALED(child->status)) {
      ending = fmt::format("its process was ended by signal {} before it was done",
                           WTERMSIG(child->status));
    }
    return {ErrorCode::kCommPeerLost, rank, "run", ending};
  }
  static CommError stopped(int32_t rank) {
    return {ErrorCode::kCommTimeout, rank, "run", "its process was stopped, and was ended"};
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
    int64_t rounds_stopped = 0;  // in which it was found stopped, one after the other
    bool was_stopped = false;
  };
  std::vector<Child> children_;
};

// Waits for the launcher's end, but not for ranks that cannot come to theirs.
void wait_for(Launched& launched, const ReportDirectory& reports, int32_t ranks,
              std::chrono::seconds patience, RankWatch& watch) {
  auto until = Clock::time_point::max();
  int32_t reported = 0;
  bool knows_loss = false;
  const InterruptScope interrupt;
  for (int64_t round = 1; launched.runs() && Clock::now() < until; ++round) {
    std::this_thread::sleep_for(kRound);
    check_interrupt();
    if (round % kRoundsOfStates == 0) {
      watch.look();
      launched.end_stopped(patience + kGrace);
    }
    if (watch.lost() && !std::exchange(knows_loss, true)) {
      until = std::min(until, Clock::now() + patience + kGrace);
    }
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

// A launcher that was ended by force leaves its ranks alone.
void end_orphans(const ReportDirectory& reports, int32_t ranks) {
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const auto pid = reports.process_of(rank);
    if (pid && !has_ended(*pid) && reports.is_rank(*pid)) ::kill(*pid, SIGKILL);
  }
}

// One that was stopped before all of its ranks were done.
void check_launcher(const Launched& launched, const ReportDirectory& reports, int32_t ranks) {
  if (!launched.was_stopped()) return;
  int32_t rank = 0;
  while (rank < ranks && reports.code_of(rank)) ++rank;
  if (rank == ranks) return;
  end_orphans(reports, ranks);
  throw CommError(ErrorCode::kCommTimeout, -1, "run",
                  fmt::format("the launcher's process was stopped, and was ended before rank {} "
                              "was done",
                              rank));
}

// The launcher itself has said on stderr why.
void check_started(const Launched& launched, const ReportDirectory& reports, int32_t ranks) {
  const std::string failure = launched.failure();
  if (failure.empty()) return;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    if (reports.code_of(rank) || reports.process_of(rank)) return;
  }
  throw Error(ErrorCode::kUnsupported,
              {.what = "the launcher has not run the ranks", .found = failure});
}

ExitCode outcome_of(Launched& launched, const ReportDirectory& reports, int32_t ranks,
                    std::chrono::seconds patience) {
  // Whoever waits for a deadline says sooner who is late.
  RankWatch watch(reports, ranks, patience + kGrace);
  wait_for(launched, reports, ranks, patience, watch);
  if (!launched.are_ranks(ranks)) check_launcher(launched, reports, ranks);
  check_started(launched, reports, ranks);
  ExitCode worst = ExitCode::kOk;
  std::optional<int32_t> lost;
  for (int32_t rank = ranks - 1; rank >= 0; --rank) {
    const auto code = reports.code_of(rank);
    if (!code) lost = rank;
    worst = std::max(worst, code.value_or(ExitCode::kRanks));
  }
  if (watch.lost()) lost = watch.lost();
  // Rank 0 has said what it knows, unless it is the one.
  const bool nobody_said_so = lost && reports.code_of(0).value_or(ExitCode::kOk) == ExitCode::kOk;
  if (!nobody_said_so) return worst;
  const bool was_stopped = std::ranges::find(watch.stopped(), *lost) != watch.stopped().end();
  report_error(was_stopped ? Launched::stopped(*lost) : launched.loss_of(*lost, ranks));
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

void announce_to_launcher(int32_t rank) {
  const std::string directory = environment_value(kReportsVariable);
  if (!directory.empty()) report_process(directory, rank);
}

void report_to_launcher(int32_t rank, ExitCode code) {
  const std::string directory = environment_value(kReportsVariable);
  if (!directory.empty()) report_code(directory, rank, code);
}

}  // namespace conclave::tool
