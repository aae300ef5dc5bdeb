// Ranks tell each other how NCCL connects them: who is lost, silent or too late is named.
// Needs neither a GPU nor NCCL.
#include "comm/nccl/join_words.h"

#include "support/thread_groups.h"
#include "support/thread_ranks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using comm::JoinWord;
using comm::JoinWords;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::RankOutcome;
using testing::run_ranks;

void expect_error(const RankOutcome& outcome, ErrorCode code, int32_t peer) {
  ASSERT_TRUE(outcome.code.has_value()) << "no error";
  EXPECT_EQ(to_string(*outcome.code), to_string(code)) << outcome.message;
  EXPECT_EQ(outcome.peer, peer) << outcome.message;
  EXPECT_EQ(outcome.phase, "connect");
}

TEST(JoinWords, WhereAllAreThrough_NobodyHasAnError) {
  for (const int32_t ranks : {1, 2, 4}) {
    const auto outcomes = run_ranks(testing::make_tcp_group({.num_ranks = ranks, .timeout = 20s}),
                                    [](int32_t, Communicator& host) {
                                      JoinWords words(host);
                                      words.look();
                                      words.meet(JoinWord::kIsThrough, 20s);
                                      host.barrier("the host's messages are in order");
                                    });
    EXPECT_EQ(testing::first_failure(outcomes), "") << ranks;
  }
}

TEST(JoinWords, ARankThatIsLostMeanwhile_IsSeenByTheOthers) {
  const auto outcomes = run_ranks(testing::make_tcp_group({.num_ranks = 4, .timeout = 20s}),
                                  [](int32_t rank, Communicator& host) {
                                    JoinWords words(host);
                                    if (rank == 2) return;
                                    while (true) {
                                      words.look();
                                      std::this_thread::sleep_for(1ms);
                                    }
                                  });
  for (const int32_t rank : {0, 1, 3}) {
    expect_error(outcomes[static_cast<size_t>(rank)], ErrorCode::kCommPeerLost, 2);
  }
}

TEST(JoinWords, ARankThatIsSilent_IsNamedByThoseThatAreTooLate) {
  std::atomic<int> over = 0;
  const auto outcomes = run_ranks(testing::make_tcp_group({.num_ranks = 4, .timeout = 20s}),
                                  [&](int32_t rank, Communicator& host) {
                                    JoinWords words(host);
                                    host.barrier("nobody is late from the start");
                                    if (rank != 1) {
                                      try {
                                        words.meet(JoinWord::kHasGivenUp, 2s);
                                      } catch (const CommError&) {
                                        ++over;
                                        throw;
                                      }
                                    }
                                    while (over < 3) std::this_thread::sleep_for(1ms);
                                  });
  for (const int32_t rank : {0, 2, 3}) {
    expect_error(outcomes[static_cast<size_t>(rank)], ErrorCode::kCommTimeout, 1);
  }
}

TEST(JoinWords, ARankThatHasGivenUp_IsNamedByThoseThatAreThrough) {
  std::atomic<int> over = 0;
  // Nobody is gone before the others have heard it.
  const auto stay = [&] {
    for (++over; over < 3;) std::this_thread::sleep_for(1ms);
  };
  const auto outcomes =
      run_ranks(testing::make_tcp_group({.num_ranks = 3, .timeout = 20s}),
                [&](int32_t rank, Communicator& host) {
                  JoinWords words(host);
                  try {
                    words.meet(rank == 0 ? JoinWord::kHasGivenUp : JoinWord::kIsThrough, 20s);
                  } catch (const CommError&) {
                    stay();
                    throw;
                  }
                  stay();
                });
  EXPECT_FALSE(outcomes[0].code.has_value()) << outcomes[0].message;
  for (const size_t rank : {size_t{1}, size_t{2}})
    expect_error(outcomes[rank], ErrorCode::kCommTimeout, 0);
}

}  // namespace
}  // namespace conclave
