// A rank that dies, stops, leaves or never comes: every other rank, a process of its own, has a
// typed error that names it, in time, and ends by itself.
#include "dist/launch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::Launch;

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

std::optional<RankReport> report_of(const Launch& launch, int32_t rank) {
  const auto line = launch.line_of(rank, 40s);
  if (!line) return std::nullopt;
  std::istringstream text(*line);
  RankReport report;
  text >> report.code >> report.peer >> report.phase >> report.detected_ms >> report.left_ms;
  return report;
}

Launch launch_fault(const std::string& scenario, int32_t victim) {
  return Launch(kRanks, {CONCLAVE_FAULT_RANK, scenario, std::to_string(victim)});
}

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
    Launch launch = launch_fault(c.scenario, victim);
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      const auto report = report_of(launch, rank);
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

bool finalises(const Launch& launch, int32_t rank) {
  return std::filesystem::exists(launch.directory() / ("finalises." + std::to_string(rank)));
}

// Where others go on without it they never call MPI_Finalize, which a rank that ends earlier would
// wait in; where nobody does, all call it.
TEST(MpiFaultsFinalize, RankThatEndsFirst_HearsWhetherTheOthersGoOn) {
  for (const int32_t victim : {0, 2}) {
    Launch going_on = launch_fault("ends_before_the_others_go_on", victim);
    EXPECT_TRUE(going_on.ends_within(20s)) << going_on.log();
    Launch ending = launch_fault("throws", victim);
    EXPECT_TRUE(ending.ends_within(20s)) << ending.log();
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(report_of(going_on, rank).value_or(RankReport{}).code, "nothing") << rank << "\n"
                                                                                  << going_on.log();
      EXPECT_FALSE(finalises(going_on, rank)) << rank;
      EXPECT_TRUE(finalises(ending, rank)) << rank;
    }
  }
}

// A late rank has no result of its own either: its peers have given up.
TEST(MpiFaultsLate, RankThatComesTooLate_HearsThatThePeersGaveUp) {
  Launch launch = launch_fault("never_calls", 1);
  const auto report = report_of(launch, 1);
  ASSERT_TRUE(report.has_value()) << launch.log();
  EXPECT_EQ(report->code, "kCommTimeout");
}

// Nobody knows which rank is missing where they have not met.
TEST(MpiFaultsConnect, RankThatNeverConnects_IsATimeout) {
  Launch launch = launch_fault("never_connects", 1);
  for (const int32_t rank : {0, 2}) {
    const auto report = report_of(launch, rank);
    ASSERT_TRUE(report.has_value()) << "rank " << rank << " hangs\n" << launch.log();
    EXPECT_EQ(report->code, "kCommTimeout");
    EXPECT_LE(report->detected_ms, kDeadlineMs + kSlackMs);
  }
  EXPECT_TRUE(launch.ends_within(20s)) << launch.log();
}

// The example that is killed: the others have the bits of one rank before and after.
TEST(MpiFaultsExample, ServeOn_GoesOnWithoutTheRankThatDied) {
  const std::string program = CONCLAVE_SERVE_ON;
  if (program.empty()) GTEST_SKIP() << "examples are not built";
  for (const char* const victim : {"0", "1", "2"}) {
    SCOPED_TRACE(std::string("victim ") + victim);
    Launch launch(kRanks, {program, "6", victim});
    ASSERT_TRUE(launch.ends_within(60s)) << launch.log();
    const std::string log = launch.log();
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      const std::string name = "rank " + std::to_string(rank);
      const bool is_victim = std::to_string(rank) == victim;
      EXPECT_EQ(log.find(name + ": serves on with 2 ranks") == std::string::npos, is_victim) << log;
      EXPECT_EQ(log.find(name + ": 6 rounds with the bits of one rank") == std::string::npos,
                is_victim)
          << log;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, MpiFaults, ::testing::ValuesIn(kCases),
                         [](const auto& c) { return std::string(c.param.scenario); });

}  // namespace
}  // namespace conclave
