// Ranks that are processes meet every fault in every phase: each other rank knows whom to blame,
// within its deadline, and goes on with those that are left to the bits of one rank.
//
// CONCLAVE_FAULT_TABLE names a file for the times of all cases.
#include "dist/launch.h"
#include "support/rank_fault.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::Fault;
using testing::FaultCase;
using testing::FaultPhase;
using testing::Launch;

constexpr int32_t kRanks = 3;
constexpr int64_t kDeadlineMs = 2000;  // FaultCase::deadline
// Beyond a deadline, on a machine that other programs keep busy.
constexpr int64_t kSlackMs = 1000;

struct RankLine {
  std::string code;
  int32_t peer = -1;
  std::string phase;
  std::string went_on;
  std::string results;
  int64_t begin_ns = 0;
  int64_t error_ns = 0;
  int64_t correct_ns = 0;
};

RankLine parse(const std::string& line) {
  std::istringstream text(line);
  RankLine rank;
  text >> rank.code >> rank.peer >> rank.phase >> rank.went_on >> rank.results >> rank.begin_ns >>
      rank.error_ns >> rank.correct_ns;
  return rank;
}

std::vector<FaultCase> all_cases() {
  std::vector<FaultCase> cases;
  for (const Fault fault : {Fault::kDies, Fault::kStops, Fault::kThrows, Fault::kDisagrees,
                            Fault::kNeverCalls, Fault::kIsSlow}) {
    for (const FaultPhase phase :
         {FaultPhase::kCreate, FaultPhase::kAgree, FaultPhase::kDispatch, FaultPhase::kProducts,
          FaultPhase::kCombine, FaultPhase::kSurvivors}) {
      if (!testing::is_possible(fault, phase)) continue;
      const auto number = static_cast<int32_t>(cases.size());
      cases.push_back({.fault = fault,
                       .phase = phase,
                       .victim = number % kRanks,
                       .has_replicas = number % 2 == 0});
    }
  }
  return cases;
}

std::string all_but(int32_t victim) {
  std::string text;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    if (rank != victim) text += (text.empty() ? "" : ".") + std::to_string(rank);
  }
  return text;
}

std::string expected_code(const FaultCase& c, const RankLine& rank) {
  switch (c.fault) {
    case Fault::kDies:
      return "kCommPeerLost";
    case Fault::kStops:
    case Fault::kNeverCalls:
      return "kCommTimeout";
    case Fault::kDisagrees:
      return "kCommMismatch";
    case Fault::kIsSlow:
      return "nothing";
    case Fault::kThrows:
      // Its layer says so where it has begun; otherwise its communicator is destroyed.
      return rank.code == "kCommAborted" ? rank.code : "kCommPeerLost";
  }
  return "";
}

void add_to_table(const FaultCase& c, int64_t error_ms, int64_t correct_ms, const RankLine& rank) {
  const char* const path = std::getenv("CONCLAVE_FAULT_TABLE");
  if (path == nullptr) return;
  std::ofstream(path, std::ios::app)
      << "| " << testing::to_string(c.fault) << " | " << testing::to_string(c.phase) << " | "
      << c.victim << " | " << (c.has_replicas ? "replicas" : "read again") << " | " << rank.code
      << " | " << rank.phase << " | " << error_ms << " | " << rank.went_on << " | " << correct_ms
      << " |\n";
}

class MpiFaultMatrix : public ::testing::TestWithParam<FaultCase> {};

TEST_P(MpiFaultMatrix, OtherRanks_NameItInTimeAndGoOn) {
  const FaultCase& c = GetParam();
  Launch launch(kRanks,
                {CONCLAVE_MATRIX_RANK, testing::to_string(c.fault), testing::to_string(c.phase),
                 std::to_string(c.victim), c.has_replicas ? "yes" : "no"});
  const bool names_it = c.phase != FaultPhase::kSurvivors && c.fault != Fault::kIsSlow;
  const bool goes_on = c.fault != Fault::kIsSlow || c.phase == FaultPhase::kSurvivors;
  const bool all_go_on = c.fault == Fault::kDisagrees || c.fault == Fault::kIsSlow;
  for (int32_t number = 0; number < kRanks; ++number) {
    if (number == c.victim) continue;
    SCOPED_TRACE("rank " + std::to_string(number));
    const auto line = launch.line_of(number, 60s);
    ASSERT_TRUE(line.has_value()) << "hangs\n" << launch.log();
    const RankLine rank = parse(*line);
    EXPECT_EQ(rank.results, "right") << *line << "\n" << launch.log();
    const int64_t struck = launch.number_of("struck");
    const int64_t since = struck != 0 ? struck : rank.begin_ns;
    const int64_t error_ms = (rank.error_ns - since) / 1'000'000;
    const int64_t correct_ms = (rank.correct_ns - since) / 1'000'000;
    if (names_it) {
      EXPECT_EQ(rank.code, expected_code(c, rank)) << *line;
      EXPECT_EQ(rank.peer, c.victim) << *line;
      EXPECT_NE(rank.phase, "-") << *line;
      EXPECT_LE(error_ms, kDeadlineMs + kSlackMs) << *line;
    }
    if (!goes_on) continue;
    EXPECT_EQ(rank.went_on, all_but(all_go_on ? -1 : c.victim)) << *line;
    // A rank that is silent is waited for once to be heard of, and once in the roll call.
    const bool is_silent = c.fault == Fault::kStops || c.fault == Fault::kNeverCalls;
    EXPECT_LE(correct_ms, is_silent ? 2 * kDeadlineMs + 2 * kSlackMs : kDeadlineMs) << *line;
    if (number == (c.victim + 1) % kRanks) add_to_table(c, error_ms, correct_ms, rank);
  }
  if (c.fault == Fault::kNeverCalls) {
    const auto line = launch.line_of(c.victim, 60s);
    ASSERT_TRUE(line.has_value()) << "hangs\n" << launch.log();
    EXPECT_EQ(parse(*line).went_on, "kCommExcluded") << *line;
  }
  if (c.fault == Fault::kStops) launch.kill_rank(c.victim);
  EXPECT_TRUE(launch.ends_within(20s)) << launch.log();
}

INSTANTIATE_TEST_SUITE_P(Cases, MpiFaultMatrix, ::testing::ValuesIn(all_cases()),
                         [](const auto& c) {
                           return testing::to_string(c.param.fault) + "_" +
                                  testing::to_string(c.param.phase);
                         });

}  // namespace
}  // namespace conclave
