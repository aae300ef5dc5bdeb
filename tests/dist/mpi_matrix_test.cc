// Ranks of MPI meet every fault in every phase: each other rank knows whom to blame, within its
// deadline, and goes on with those that are left to the bits of one rank.
#include "dist/process_case.h"

#include <gtest/gtest.h>

#include <array>

namespace conclave {
namespace {

using testing::Fault;
using testing::FaultCase;
using testing::FaultPhase;
using testing::ProcessCase;

constexpr std::array kFaults = {Fault::kDies,      Fault::kStops,      Fault::kThrows,
                                Fault::kDisagrees, Fault::kNeverCalls, Fault::kIsSlow};

class MpiFaultMatrix : public ::testing::TestWithParam<FaultCase> {};

TEST_P(MpiFaultMatrix, OtherRanks_NameItInTimeAndGoOn) {
  ProcessCase(GetParam(), "mpi").expect_right();
}

INSTANTIATE_TEST_SUITE_P(Cases, MpiFaultMatrix, ::testing::ValuesIn(testing::fault_cases(kFaults)),
                         [](const auto& c) { return testing::name_of(c.param); });

constexpr std::array kEnds = {Fault::kDies, Fault::kStops};

INSTANTIATE_TEST_SUITE_P(Overlapped, MpiFaultMatrix,
                         ::testing::ValuesIn(testing::overlapped_cases(kEnds)),
                         [](const auto& c) { return testing::name_of(c.param); });

// Ranks that share no memory settle over connections of their own who is left.
TEST(MpiFaultsOnHosts, RankThatDiesOrStops_IsLeftOut) {
  ProcessCase dies({.fault = Fault::kDies, .phase = FaultPhase::kAgree, .victim = 0}, "mpi", true);
  ProcessCase stops(
      {.fault = Fault::kStops, .phase = FaultPhase::kDispatch, .victim = 1, .has_replicas = true},
      "mpi", true);
  dies.expect_right();
  stops.expect_right();
  if (dies.had_no_hosts()) GTEST_SKIP() << "this process may not have a host name of its own";
}

}  // namespace
}  // namespace conclave
