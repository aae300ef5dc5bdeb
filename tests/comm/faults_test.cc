// If a rank is missing, late, lost, disagreeing or aborting, every survivor gets a typed error
// naming peer and phase in bounded time.
#include "support/thread_groups.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::RankOutcome;

using Step = std::function<void(Communicator&)>;

struct NamedStep {
  std::string name;
  Step step;
};

// Runs each collective once, on buffers of 8 bytes per rank.
std::vector<NamedStep> collectives() {
  const auto buffers = [](const Communicator& comm) {
    return std::vector<std::byte>(static_cast<size_t>(comm.size()) * 8);
  };
  return {
      {"barrier", [](Communicator& comm) { comm.barrier("step"); }},
      {"all_gather",
       [=](Communicator& comm) {
         const std::vector<std::byte> send(8);
         auto recv = buffers(comm);
         comm.all_gather(send, recv, "step");
       }},
      {"all_reduce",
       [](Communicator& comm) {
         const std::vector<std::byte> send(8);
         std::vector<std::byte> recv(8);
         comm.all_reduce(send, recv, DType::kF32, ReduceOp::kSum, "step");
       }},
      {"reduce_scatter",
       [=](Communicator& comm) {
         const auto send = buffers(comm);
         std::vector<std::byte> recv(8);
         comm.reduce_scatter(send, recv, DType::kI64, ReduceOp::kMax, "step");
       }},
      {"all_to_all_v",
       [=](Communicator& comm) {
         const auto send = buffers(comm);
         auto recv = buffers(comm);
         const std::vector<int64_t> bytes(static_cast<size_t>(comm.size()), 8);
         std::vector<int64_t> offsets(bytes.size());
         for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<int64_t>(i) * 8;
         comm.all_to_all_v({send.data(), bytes, offsets, recv.data(), bytes, offsets}, "step");
       }},
  };
}

void expect_outcome(const RankOutcome& outcome, ErrorCode code, int32_t peer) {
  ASSERT_TRUE(outcome.code.has_value()) << "no error";
  EXPECT_EQ(to_string(*outcome.code), to_string(code)) << outcome.message;
  EXPECT_EQ(outcome.peer, peer) << outcome.message;
  EXPECT_EQ(outcome.phase, "step");
}

class Stopwatch {
 public:
  std::chrono::milliseconds elapsed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                                 start_);
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

class Faults : public ::testing::TestWithParam<testing::ThreadGroups> {
 protected:
  static std::vector<std::unique_ptr<Communicator>> make_group(const LocalGroupOptions& options) {
    return GetParam().make(options);
  }
};

INSTANTIATE_TEST_SUITE_P(Threads, Faults, ::testing::ValuesIn(testing::kThreadGroups),
                         [](const auto& group) { return std::string(group.param.name); });

TEST_P(Faults, RankThatNeverCalls_IsATimeoutNamingIt) {
  for (const auto& [name, step] : collectives()) {
    SCOPED_TRACE(name);
    const Stopwatch watch;
    std::atomic<int> waiting{3};
    const auto outcomes = testing::run_ranks(
        make_group({.num_ranks = 4, .timeout = 300ms}), [&](int32_t rank, Communicator& comm) {
          if (rank == 2) {
            while (waiting.load() > 0) std::this_thread::sleep_for(1ms);  // alive, but absent
            return;
          }
          try {
            step(comm);
          } catch (...) {
            --waiting;
            throw;
          }
        });
    for (const size_t rank : {0U, 1U, 3U})
      expect_outcome(outcomes[rank], ErrorCode::kCommTimeout, 2);
    EXPECT_LT(watch.elapsed(), 300ms + 2s);
  }
}

TEST_P(Faults, DestroyedRank_IsLostAtOnce) {
  for (const auto& [name, step] : collectives()) {
    SCOPED_TRACE(name);
    const Stopwatch watch;
    const auto outcomes = testing::run_ranks(make_group({.num_ranks = 3, .timeout = 60s}),
                                             [&](int32_t rank, Communicator& comm) {
                                               if (rank == 1)
                                                 return;  // destroys its communicator too
                                               step(comm);
                                             });
    expect_outcome(outcomes[0], ErrorCode::kCommPeerLost, 1);
    expect_outcome(outcomes[2], ErrorCode::kCommPeerLost, 1);
    EXPECT_LT(watch.elapsed(), 5s);
  }
}

// A message that was sent arrives; what local ranks have begun is read where it lies.
TEST(LocalFaults, RankDestroyedBetweenBeginAndWait_IsLostAndNotRead) {
  std::atomic<bool> begun = false;
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = 2, .timeout = 60s}), [&](int32_t rank, Communicator& comm) {
        std::vector<std::byte> recv(16);
        if (rank == 1) {
          const auto send = std::make_unique<std::vector<std::byte>>(8);
          comm.begin_all_gather(*send, recv);
          begun = true;
          begun.notify_all();
          return;
        }
        const std::vector<std::byte> send(8);
        begun.wait(false);
        std::this_thread::sleep_for(100ms);  // until the rank has left
        comm.all_gather(send, recv, "step");
      });
  expect_outcome(outcomes[0], ErrorCode::kCommPeerLost, 1);
}

TEST_P(Faults, DifferentOperations_AreAMismatchOnEveryRank) {
  const auto steps = collectives();
  for (size_t a = 0; a < steps.size(); ++a) {
    for (size_t b = 0; b < steps.size(); ++b) {
      if (a == b) continue;
      SCOPED_TRACE(steps[a].name + " against " + steps[b].name);
      const auto outcomes = testing::run_ranks(
          make_group({.num_ranks = 3, .timeout = 60s}),
          [&](int32_t rank, Communicator& comm) { (rank == 1 ? steps[b] : steps[a]).step(comm); });
      for (const RankOutcome& outcome : outcomes) {
        ASSERT_TRUE(outcome.code.has_value());
        EXPECT_EQ(*outcome.code, ErrorCode::kCommMismatch) << outcome.message;
      }
      const std::string all = outcomes[0].message + outcomes[1].message + outcomes[2].message;
      EXPECT_NE(all.find(steps[a].name), std::string::npos) << all;
      EXPECT_NE(all.find(steps[b].name), std::string::npos) << all;
    }
  }
}

TEST_P(Faults, DifferentSizes_NameBoth) {
  const auto outcomes = testing::run_ranks(make_group({.num_ranks = 2, .timeout = 60s}),
                                           [](int32_t rank, Communicator& comm) {
                                             const std::vector<std::byte> send(rank == 0 ? 8 : 24);
                                             std::vector<std::byte> recv(send.size() * 2);
                                             comm.all_gather(send, recv, "step");
                                           });
  for (const RankOutcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.code.has_value());
    EXPECT_EQ(*outcome.code, ErrorCode::kCommMismatch) << outcome.message;
  }
  const std::string all = outcomes[0].message + outcomes[1].message;
  EXPECT_NE(all.find(" 24"), std::string::npos) << all;
  EXPECT_NE(all.find(" 8"), std::string::npos) << all;
}

TEST_P(Faults, DifferentTypesOrRules_AreAMismatch) {
  for (const bool differ_in_type : {true, false}) {
    const auto outcomes = testing::run_ranks(
        make_group({.num_ranks = 2, .timeout = 60s}), [&](int32_t rank, Communicator& comm) {
          const std::vector<std::byte> send(8);
          std::vector<std::byte> recv(8);
          comm.all_reduce(send, recv, rank == 1 && differ_in_type ? DType::kI32 : DType::kF32,
                          rank == 1 && !differ_in_type ? ReduceOp::kMax : ReduceOp::kSum, "step");
        });
    expect_outcome(outcomes[0], ErrorCode::kCommMismatch, 1);
    expect_outcome(outcomes[1], ErrorCode::kCommMismatch, 0);
  }
}

TEST_P(Faults, MessageOfAnotherSize_IsAMismatchOnBothSides) {
  for (const size_t expected : {0U, 7U, 9U, 16U}) {
    SCOPED_TRACE(expected);
    const auto outcomes = testing::run_ranks(
        make_group({.num_ranks = 2, .timeout = 60s}), [&](int32_t rank, Communicator& comm) {
          std::vector<std::byte> data(16);
          if (rank == 0) {
            comm.send(1, std::span(data).first(8), "step");
          } else {
            comm.recv(0, std::span(data).first(expected), "step");
          }
        });
    expect_outcome(outcomes[0], ErrorCode::kCommMismatch, 1);
    expect_outcome(outcomes[1], ErrorCode::kCommMismatch, 0);
  }
}

TEST_P(Faults, CountOfAnotherSizeInAnAllToAll_IsAMismatchOnBothSides) {
  for (const int64_t offered : {0, 7, 9, 16}) {
    SCOPED_TRACE(offered);
    // Rank 1 expects 8 bytes from everyone and has room for 16: only the counts reveal the
    // difference.
    const auto outcomes = testing::run_ranks(
        make_group({.num_ranks = 2, .timeout = 60s}), [&](int32_t rank, Communicator& comm) {
          const std::vector<std::byte> send(32);
          std::vector<std::byte> recv(32);
          const std::vector<int64_t> expected = {8, 8};
          const std::vector<int64_t> bytes = {8, rank == 0 ? offered : 8};
          const std::vector<int64_t> offsets = {0, 16};
          comm.all_to_all_v({send.data(), bytes, offsets, recv.data(), expected, offsets}, "step");
        });
    expect_outcome(outcomes[0], ErrorCode::kCommMismatch, 1);
    expect_outcome(outcomes[1], ErrorCode::kCommMismatch, 0);
    EXPECT_NE(outcomes[1].message.find("offers " + std::to_string(offered) + " bytes"),
              std::string::npos)
        << outcomes[1].message;
  }
}

TEST_P(Faults, UnansweredMessages_TimeOut) {
  const Stopwatch watch;
  const auto outcomes = testing::run_ranks(
      make_group({.num_ranks = 2, .timeout = 60s}), [](int32_t rank, Communicator& comm) {
        std::vector<std::byte> data(8);
        const CommHandle handle = rank == 0 ? comm.begin_send(1, data) : comm.begin_send(0, data);
        comm.wait(handle, 50ms, "step");
      });
  for (const RankOutcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.code.has_value());
    EXPECT_EQ(*outcome.code, ErrorCode::kCommTimeout) << outcome.message;
  }
  EXPECT_LT(watch.elapsed(), 5s);
}

TEST_P(Faults, Abort_WakesEveryWaiterWithTheReason) {
  const Stopwatch watch;
  const auto outcomes = testing::run_ranks(make_group({.num_ranks = 4, .timeout = 60s}),
                                           [](int32_t rank, Communicator& comm) {
                                             if (rank == 3) {
                                               std::this_thread::sleep_for(20ms);
                                               comm.abort("the operator asked for it");
                                             }
                                             comm.barrier("step");
                                           });
  for (const RankOutcome& outcome : outcomes) {
    expect_outcome(outcome, ErrorCode::kCommAborted, 3);
    EXPECT_NE(outcome.message.find("the operator asked for it"), std::string::npos);
  }
  EXPECT_LT(watch.elapsed(), 5s);
}

TEST_P(Faults, AbortFromAnotherThread_EndsLaterCallsToo) {
  auto group = make_group({.num_ranks = 2, .timeout = 60s});
  std::thread([&] { group[1]->abort(std::string(5000, 'x')); }).join();
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      group[0]->barrier("later");
      ADD_FAILURE() << "the barrier of an aborted group returned";
    } catch (const CommError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCommAborted);
    }
  }
}

TEST_P(Faults, SecondAbort_LeavesTheRankAndTheReasonOfTheFirst) {
  auto group = make_group({.num_ranks = 3, .timeout = 60s});
  group[1]->abort("the first reason");
  group[2]->abort("the second reason");
  for (const auto& communicator : group) {
    try {
      communicator->barrier("later");
      ADD_FAILURE() << "the barrier of an aborted group returned";
    } catch (const CommError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCommAborted);
      EXPECT_EQ(error.peer(), 1);
      EXPECT_NE(std::string(error.what()).find("the first reason"), std::string::npos)
          << error.what();
    }
  }
}

TEST_P(Faults, FailedCommunicator_StaysUnusable) {
  auto group = make_group({.num_ranks = 2, .timeout = 500ms});
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      group[0]->barrier("alone");
      ADD_FAILURE() << "a barrier without the peer returned";
    } catch (const CommError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCommTimeout);
      EXPECT_EQ(error.peer(), 1);
    }
  }
  // The late rank learns that its peer has given up, without waiting for its own deadline.
  const Stopwatch watch;
  try {
    const CommHandle handle = group[1]->begin_barrier();
    group[1]->wait(handle, 60s, "late");
    ADD_FAILURE() << "a barrier with a failed peer returned";
  } catch (const CommError& error) {
    EXPECT_EQ(error.peer(), 0);
  }
  EXPECT_LT(watch.elapsed(), 5s);
}

TEST_P(Faults, LateRankWithinTheDeadline_IsNoFault) {
  const auto outcomes = testing::run_ranks(make_group({.num_ranks = 3, .timeout = 20s}),
                                           [](int32_t rank, Communicator& comm) {
                                             for (int round = 0; round < 3; ++round) {
                                               if (rank == round) std::this_thread::sleep_for(50ms);
                                               comm.barrier("step");
                                             }
                                           });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

TEST_P(Faults, FinishedRanks_MayLeaveBeforeTheirPeers) {
  // A rank that returned from its last collective has no duties left: peers must not see it as
  // lost.
  for (int round = 0; round < 50; ++round) {
    for (const auto& [name, step] : collectives()) {
      const auto outcomes = testing::run_ranks(make_group({.num_ranks = 4, .timeout = 20s}),
                                               [&](int32_t, Communicator& comm) { step(comm); });
      ASSERT_EQ(testing::first_failure(outcomes), "") << name;
    }
  }
}

}  // namespace
}  // namespace conclave
