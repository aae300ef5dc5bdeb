// Ranks with a GPU each, as processes over NCCL, meet every fault in every phase: each other rank
// knows whom to blame, within its deadline, and goes on with those that are left, also alone.
#include "comm/nccl/nccl_ranks.h"
#include "dist/process_case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace conclave {
namespace {

using testing::Fault;
using testing::FaultCase;
using testing::kNcclRanks;
using testing::ProcessCase;

class CudaRankProcesses : public testing::NcclTest,
                          public ::testing::WithParamInterface<std::tuple<int32_t, Fault>> {};

TEST_P(CudaRankProcesses, OtherRanks_NameItInTimeAndGoOn) {
  const auto& [ranks, fault] = GetParam();
  const std::vector<FaultCase> all = testing::fault_cases(std::vector{fault});
  // Processes that share a GPU take turns there, so that fewer of them meet their deadlines.
  const size_t together = ranks > kNcclRanks ? 2 : 3;
  for (size_t begin = 0; begin < all.size(); begin += together) {
    std::vector<std::unique_ptr<ProcessCase>> cases;
    for (size_t i = begin; i < std::min(begin + together, all.size()); ++i) {
      FaultCase it = all[i];
      it.ranks = ranks;
      it.victim %= ranks;
      cases.push_back(std::make_unique<ProcessCase>(it, "nccl"));
    }
    for (const auto& one : cases) one->expect_right();
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<int32_t, Fault>>& info) {
  const auto& [ranks, fault] = info.param;
  return testing::to_string(fault) + "_" + std::to_string(ranks) + "_ranks";
}

INSTANTIATE_TEST_SUITE_P(OneIsLeft, CudaRankProcesses,
                         ::testing::Combine(::testing::Values(2),
                                            ::testing::Values(Fault::kDies, Fault::kThrows,
                                                              Fault::kDisagrees, Fault::kNeverCalls,
                                                              Fault::kStops)),
                         name_of);
// Three ranks share two GPUs where there are no more.
INSTANTIATE_TEST_SUITE_P(TwoAreLeft, CudaRankProcesses,
                         ::testing::Combine(::testing::Values(3),
                                            ::testing::Values(Fault::kDies, Fault::kStops)),
                         name_of);

// Ranks that are left may be lost while NCCL connects them, or when they serve on.
class CudaRankLosses : public testing::NcclTest {};

TEST_F(CudaRankLosses, ARankThatDiesWhileTheOthersGoOn_IsLeftOutAsWell) {
  constexpr int32_t kVictim = 1;
  // Before and in the roll call, while they connect, and when they serve.
  for (const std::vector<int>& delays : {std::vector{5, 150, 500}, std::vector{50, 300, 900}}) {
    std::vector<std::unique_ptr<testing::Launch>> launches;
    for (const int delay : delays) {
      launches.push_back(std::make_unique<testing::Launch>(
          "nccl", testing::kFaultRanks,
          std::vector<std::string>{testing::rank_program(), "nccl", std::to_string(delay), "dies",
                                   "survivors", std::to_string(kVictim),
                                   delay == delays.front() ? "yes" : "no", "no"}));
    }
    for (size_t i = 0; i < delays.size(); ++i) {
      SCOPED_TRACE(std::to_string(delays[i]) + " ms");
      for (const int32_t rank : {0, 2}) {
        const auto line = launches[i]->line_of(rank, std::chrono::seconds(60));
        ASSERT_TRUE(line.has_value()) << "hangs\n" << launches[i]->log();
        const testing::RankLine found = testing::parse_rank_line(*line);
        EXPECT_EQ(found.results, "right") << *line << "\n" << launches[i]->log();
        // It may have died when all was over.
        EXPECT_TRUE(found.went_on == "0.2" || found.went_on == "0.1.2") << *line;
        EXPECT_NE(found.correct_ns, 0) << *line;
      }
      EXPECT_TRUE(launches[i]->ends_within(std::chrono::seconds(20))) << launches[i]->log();
    }
  }
}

}  // namespace
}  // namespace conclave
