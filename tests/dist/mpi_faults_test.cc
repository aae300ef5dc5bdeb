// A rank that dies, stops, leaves or never comes: every other rank, a process of its own, has a
// typed error that names it, in time, and ends by itself.
#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Clock = std::chrono::steady_clock;

constexpr int32_t kRanks = 3;
constexpr int64_t kDeadlineMs = 1500;  // as in mpi_fault_rank.cc
// Detection is allowed a second beyond the deadline, on a machine that other tests keep busy.
constexpr int64_t kSlackMs = 1000;

struct RankReport {
  std::string code;
  int32_t peer = -1;
  std::string phase;
  int64_t detected_ms = 0;
  int64_t left_ms = 0;  // until its communicator was destroyed
};

// One group of ranks under the launcher, which is ended with them.
class Launch {
 public:
  Launch(const std::string& scenario, int32_t victim) {
    std::string name = (std::filesystem::temp_directory_path() / "conclave-mpi-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    directory_ = name;
    std::vector<std::string> words = launch_command("mpi", kRanks);
    for (const std::string& word : {std::string(CONCLAVE_FAULT_RANK), scenario,
                                    std::to_string(victim), directory_.string()}) {
      words.push_back(word);
    }
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    child_ = ::fork();
    if (child_ != 0) return;
    const int log = ::open((directory_ / "log").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    ::dup2(log, STDOUT_FILENO);
    ::dup2(log, STDERR_FILENO);
    ::execv(arguments[0], arguments.data());
    ::_exit(126);
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch() {
    if (!ended_) {
      ::kill(child_, SIGKILL);
      ::waitpid(child_, nullptr, 0);
    }
    std::filesystem::remove_all(directory_);
  }

  std::optional<RankReport> report_of(int32_t rank, Clock::duration patience) const {
    const auto until = Clock::now() + patience;
    while (Clock::now() < until) {
      std::ifstream file(directory_ / ("rank." + std::to_string(rank)));
      RankReport report;
      if (file >> report.code >> report.peer >> report.phase >> report.detected_ms >>
          report.left_ms) {
        return report;
      }
      std::this_thread::sleep_for(10ms);
    }
    return std::nullopt;
  }

  void kill_rank(int32_t rank) const {
    pid_t pid = 0;
    std::ifstream(directory_ / ("pid." + std::to_string(rank))) >> pid;
    if (pid > 0) ::kill(pid, SIGKILL);
  }

  bool ends_within(Clock::duration patience) {
    const auto until = Clock::now() + patience;
    while (!ended_ && Clock::now() < until) {
      ended_ = ::waitpid(child_, nullptr, WNOHANG) == child_;
      std::this_thread::sleep_for(10ms);
    }
    return ended_;
  }

  std::string log() const {
    std::ifstream file(directory_ / "log");
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::filesystem::path directory_;
  pid_t child_ = -1;
  bool ended_ = false;
};

struct FaultCase {
  const char* scenario;
  const char* code;
  bool victim_is_killed_later = false;  // it cannot end by itself
  std::vector<int32_t> victims = {1};
};

const FaultCase kCases[] = {
    {"killed_before_begin", "kCommPeerLost", false, {0, 1, 2}},
    {"killed_before_long_reduction", "kCommPeerLost"},
    {"killed_after_begin", "kCommPeerLost", false, {2}},
    {"killed_while_messages_are_open", "kCommPeerLost"},
    {"layer_killed_after_3ms", "kCommPeerLost"},
    {"layer_killed_after_17ms", "kCommPeerLost", false, {0, 2}},
    {"layer_killed_after_61ms", "kCommPeerLost"},
    {"update_killed_after_7ms", "kCommPeerLost", false, {0, 2}},
    {"update_killed_after_29ms", "kCommPeerLost"},
    {"update_stopped_after_19ms", "kCommTimeout", true},
    {"migration_killed_after_7ms", "kCommPeerLost", false, {0, 2}},
    {"migration_killed_after_31ms", "kCommPeerLost"},
    {"migration_stopped_after_19ms", "kCommTimeout", true},
    {"leaves", "kCommPeerLost", false, {0}},
    {"never_calls", "kCommTimeout", false, {0, 2}},
    {"stopped", "kCommTimeout", true},
    {"layer_stopped_after_23ms", "kCommTimeout", true},
    {"throws", "kCommAborted"},
    {"slow", "nothing"},
};

class MpiFaults : public ::testing::TestWithParam<FaultCase> {};

TEST_P(MpiFaults, EveryOtherRank_NamesTheRankInTime) {
  const FaultCase& c = GetParam();
  for (const int32_t victim : c.victims) {
    SCOPED_TRACE("victim " + std::to_string(victim));
    Launch launch(c.scenario, victim);
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      const auto report = launch.report_of(rank, 40s);
      ASSERT_TRUE(report.has_value()) << "rank " << rank << " hangs\n" << launch.log();
      EXPECT_EQ(report->code, c.code) << "rank " << rank << "\n" << launch.log();
      if (std::string(c.code) == "nothing") continue;
      EXPECT_EQ(report->peer, victim) << "rank " << rank;
      EXPECT_EQ(report->phase, "named");
      EXPECT_LE(report->detected_ms, kDeadlineMs + kSlackMs) << "rank " << rank;
      EXPECT_LE(report->left_ms, kDeadlineMs + kSlackMs + 3000) << "rank " << rank;
    }
    if (c.victim_is_killed_later) launch.kill_rank(victim);
    EXPECT_TRUE(launch.ends_within(20s)) << launch.log();
  }
}

// A late rank has no result of its own either: its peers have given up.
TEST(MpiFaultsLate, RankThatComesTooLate_HearsThatThePeersGaveUp) {
  Launch launch("never_calls", 1);
  const auto report = launch.report_of(1, 40s);
  ASSERT_TRUE(report.has_value()) << launch.log();
  EXPECT_EQ(report->code, "kCommTimeout");
}

// Nobody knows which rank is missing where they have not met.
TEST(MpiFaultsConnect, RankThatNeverConnects_IsATimeout) {
  Launch launch("never_connects", 1);
  for (const int32_t rank : {0, 2}) {
    const auto report = launch.report_of(rank, 40s);
    ASSERT_TRUE(report.has_value()) << "rank " << rank << " hangs\n" << launch.log();
    EXPECT_EQ(report->code, "kCommTimeout");
    EXPECT_LE(report->detected_ms, kDeadlineMs + kSlackMs);
  }
  EXPECT_TRUE(launch.ends_within(20s)) << launch.log();
}

INSTANTIATE_TEST_SUITE_P(Scenarios, MpiFaults, ::testing::ValuesIn(kCases),
                         [](const auto& c) { return std::string(c.param.scenario); });

}  // namespace
}  // namespace conclave
