// Ranks of threads meet every fault in every phase: each other rank knows whom to blame, in time,
// and goes on to the bits of one rank.
#include "support/rank_fault.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::Fault;
using testing::FaultCase;
using testing::FaultPhase;
using testing::FaultReport;

constexpr int32_t kRanks = 3;
constexpr auto kDeadline = 2s;

std::vector<FaultCase> all_cases() {
  std::vector<FaultCase> cases;
  for (const Fault fault :
       {Fault::kThrows, Fault::kDisagrees, Fault::kNeverCalls, Fault::kIsSlow}) {
    for (const FaultPhase phase :
         {FaultPhase::kCreate, FaultPhase::kAgree, FaultPhase::kDispatch, FaultPhase::kProducts,
          FaultPhase::kCombine, FaultPhase::kSurvivors}) {
      if (!testing::is_possible(fault, phase)) continue;
      const auto number = static_cast<int32_t>(cases.size());
      cases.push_back({.fault = fault,
                       .phase = phase,
                       .victim = number % kRanks,
                       .has_replicas = number % 2 == 0,
                       .deadline = kDeadline});
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

void expect_error(const FaultCase& c, const FaultReport& report) {
  if (c.phase == FaultPhase::kSurvivors) return;  // planted
  if (c.fault == Fault::kIsSlow) {
    EXPECT_EQ(report.code, "nothing");
    return;
  }
  EXPECT_EQ(report.peer, c.victim);
  EXPECT_NE(report.phase, "");
  if (c.fault == Fault::kThrows) {
    EXPECT_TRUE(report.code == "kCommAborted" || report.code == "kCommPeerLost") << report.code;
  } else {
    EXPECT_EQ(report.code, c.fault == Fault::kNeverCalls ? "kCommTimeout" : "kCommMismatch");
  }
  // A second more for threads of a machine that is busy.
  EXPECT_LT(std::chrono::nanoseconds(report.error_ns - report.begin_ns), kDeadline + 1s);
}

class FaultMatrix : public ::testing::TestWithParam<FaultCase> {};

TEST_P(FaultMatrix, OtherRanks_NameItInTimeAndGoOn) {
  const FaultCase& c = GetParam();
  std::vector<FaultReport> reports(kRanks);
  auto group = make_local_group({.num_ranks = kRanks, .timeout = kDeadline});
  std::vector<std::thread> threads;
  std::vector<std::string> thrown(kRanks);
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    threads.emplace_back([&, rank, comm = std::move(group[rank])]() mutable {
      try {
        reports[rank] = testing::run_fault(std::move(comm), c);
      } catch (const std::exception& error) {
        thrown[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const bool all_go_on = c.fault == Fault::kDisagrees ||
                         (c.fault == Fault::kIsSlow && c.phase == FaultPhase::kSurvivors);
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    const FaultReport& report = reports[static_cast<size_t>(rank)];
    const std::string& error = thrown[static_cast<size_t>(rank)];
    const bool is_victim = rank == c.victim;
    if (is_victim && c.fault == Fault::kThrows) {
      EXPECT_EQ(error, "planted");
    } else if (is_victim && c.fault == Fault::kNeverCalls) {
      EXPECT_EQ(error, "");
      EXPECT_EQ(report.went_on, "kCommExcluded");
    } else {
      EXPECT_EQ(error, "");
      EXPECT_TRUE(report.is_right);
      if (!is_victim) expect_error(c, report);
      if (all_go_on) {
        EXPECT_EQ(report.went_on, all_but(-1));
      } else if (c.fault != Fault::kIsSlow) {
        EXPECT_EQ(report.went_on, all_but(c.victim));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, FaultMatrix, ::testing::ValuesIn(all_cases()), [](const auto& c) {
  return testing::to_string(c.param.fault) + "_" + testing::to_string(c.param.phase);
});

}  // namespace
}  // namespace conclave
