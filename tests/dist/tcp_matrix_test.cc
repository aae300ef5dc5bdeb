// Ranks of tcp meet every fault in every phase, all phases of a fault at once, and both faults that
// are waited for: each other rank knows whom to blame, within its deadline, and goes on with those
// that are left to the bits of one rank.
#include "dist/process_case.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace conclave {
namespace {

using testing::Fault;
using testing::FaultCase;
using testing::ProcessCase;

class TcpFaultMatrix : public ::testing::TestWithParam<std::vector<Fault>> {};

TEST_P(TcpFaultMatrix, OtherRanks_NameItInTimeAndGoOn) {
  std::vector<std::unique_ptr<ProcessCase>> cases;
  for (const FaultCase& fault : testing::fault_cases(GetParam())) {
    cases.push_back(std::make_unique<ProcessCase>(fault, "tcp"));
  }
  for (const auto& one : cases) one->expect_right();
}

INSTANTIATE_TEST_SUITE_P(Faults, TcpFaultMatrix,
                         ::testing::Values(std::vector{Fault::kDies}, std::vector{Fault::kThrows},
                                           std::vector{Fault::kDisagrees},
                                           std::vector{Fault::kIsSlow},
                                           std::vector{Fault::kNeverCalls, Fault::kStops}),
                         [](const auto& c) { return testing::to_string(c.param.front()); });

// As ranks of three hosts do: without shared memory, and without a look into /proc.
TEST(TcpFaultsOnHosts, RankThatDiesOrStops_IsLeftOut) {
  ProcessCase dies({.fault = Fault::kDies, .phase = testing::FaultPhase::kDispatch, .victim = 0},
                   "tcp", true);
  ProcessCase stops({.fault = Fault::kStops,
                     .phase = testing::FaultPhase::kCombine,
                     .victim = 1,
                     .has_replicas = true},
                    "tcp", true);
  dies.expect_right();
  stops.expect_right();
  if (dies.had_no_hosts()) GTEST_SKIP() << "this process may not have a host name of its own";
}

}  // namespace
}  // namespace conclave
