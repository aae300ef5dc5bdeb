// Ranks of threads meet every fault in every phase: each other rank knows whom to blame, in time,
// and goes on to the bits of one rank.
#include "support/fault_cases.h"
#include "support/rank_fault.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::Fault;
using testing::FaultCase;
using testing::FaultPhase;
using testing::FaultReport;

constexpr int32_t kRanks = testing::kFaultRanks;
constexpr std::array kFaults = {Fault::kThrows, Fault::kDisagrees, Fault::kNeverCalls,
                                Fault::kIsSlow};

void expect_error(const FaultCase& c, const FaultReport& report) {
  if (c.phase == FaultPhase::kSurvivors) return;  // planted
  EXPECT_TRUE(testing::is_code_of(c, report.code)) << report.code;
  if (!testing::names_victim(c)) return;
  EXPECT_EQ(report.peer, c.victim);
  EXPECT_NE(report.phase, "");
  EXPECT_LT(std::chrono::nanoseconds(report.error_ns - report.begin_ns),
            c.deadline + testing::kFaultSlack);
}

class FaultMatrix : public ::testing::TestWithParam<FaultCase> {};

TEST_P(FaultMatrix, OtherRanks_NameItInTimeAndGoOn) {
  const FaultCase& c = GetParam();
  std::vector<FaultReport> reports(kRanks);
  auto group = make_local_group({.num_ranks = kRanks, .timeout = c.deadline});
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
      if (testing::ranks_go_on(c)) {
        EXPECT_EQ(report.went_on, testing::group_after(c));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, FaultMatrix, ::testing::ValuesIn(testing::fault_cases(kFaults)),
                         [](const auto& c) { return testing::name_of(c.param); });

constexpr std::array kOverlappedFaults = {Fault::kThrows, Fault::kNeverCalls};

INSTANTIATE_TEST_SUITE_P(Overlapped, FaultMatrix,
                         ::testing::ValuesIn(testing::overlapped_cases(kOverlappedFaults)),
                         [](const auto& c) { return testing::name_of(c.param); });

}  // namespace
}  // namespace conclave
