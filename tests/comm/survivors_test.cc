// Ranks of threads, over every transport that can have them, that go on without those that died,
// stopped or came too late.
#include "support/thread_groups.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::RankOutcome;
using Clock = std::chrono::steady_clock;

// Each rank says who it was; all must hear the same.
std::vector<int32_t> hear_all(Communicator& comm, int32_t was) {
  std::vector<int32_t> heard(static_cast<size_t>(comm.size()));
  comm.all_gather(std::as_bytes(std::span(&was, 1)), std::as_writable_bytes(std::span(heard)),
                  "after");
  return heard;
}

std::vector<int32_t> all_but(int32_t ranks, int32_t left_out) {
  std::vector<int32_t> rest;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    if (rank != left_out) rest.push_back(rank);
  }
  return rest;
}

// The group that the rank goes on in after `comm` has failed.
Survivors go_on(Communicator& comm, std::chrono::nanoseconds deadline = {}) {
  try {
    comm.barrier("step");
  } catch (const CommError&) {
    return survivors(comm, {.deadline = deadline});
  }
  throw Error(ErrorCode::kInternal, "the barrier came through without a rank");
}

class ThreadSurvivors : public ::testing::TestWithParam<testing::ThreadGroups> {};

TEST_P(ThreadSurvivors, RankThatThrows_LeavesTheOthersInTheirOrder) {
  for (int32_t ranks = 2; ranks <= 5; ++ranks) {
    for (int32_t victim = 0; victim < ranks; ++victim) {
      SCOPED_TRACE(std::to_string(victim) + " of " + std::to_string(ranks));
      const auto begin = Clock::now();
      const auto outcomes = testing::run_ranks(
          GetParam().make({.num_ranks = ranks, .timeout = 20s}), [&](int32_t rank, auto& comm) {
            if (rank == victim) throw Error(ErrorCode::kOutOfMemory, "planted");
            const Survivors left = go_on(comm);
            EXPECT_EQ(left.old_ranks, all_but(ranks, victim));
            EXPECT_EQ(left.old_ranks[static_cast<size_t>(left.communicator->rank())], rank);
            EXPECT_EQ(hear_all(*left.communicator, rank), left.old_ranks);
            EXPECT_EQ(left.communicator->timeout(), comm.timeout());
          });
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const RankOutcome& outcome = outcomes[static_cast<size_t>(rank)];
        EXPECT_EQ(outcome.code.has_value(), rank == victim) << outcome.message;
      }
      EXPECT_LT(Clock::now() - begin, 10s) << "who has left is not waited for";
    }
  }
}

TEST_P(ThreadSurvivors, RankThatNeverComes_IsLeftOutAtTheDeadlineAndToldSo) {
  constexpr int32_t kVictim = 1;
  std::atomic<int> gone_on{0};
  const auto outcomes = testing::run_ranks(
      GetParam().make({.num_ranks = 3, .timeout = 300ms}), [&](int32_t rank, auto& comm) {
        if (rank == kVictim) {
          while (gone_on < 2) std::this_thread::sleep_for(1ms);
        } else {
          const auto begin = Clock::now();
          const Survivors left = go_on(comm);
          EXPECT_LT(Clock::now() - begin, 3s);
          EXPECT_EQ(left.old_ranks, all_but(3, kVictim));
          EXPECT_EQ(hear_all(*left.communicator, rank), left.old_ranks);
          ++gone_on;
          return;
        }
        EXPECT_THROW(comm.barrier("step"), CommError);
        survivors(comm);
      });
  EXPECT_FALSE(outcomes[0].code) << outcomes[0].message;
  EXPECT_FALSE(outcomes[2].code) << outcomes[2].message;
  ASSERT_TRUE(outcomes[kVictim].code);
  EXPECT_EQ(*outcomes[kVictim].code, ErrorCode::kCommExcluded) << outcomes[kVictim].message;
  EXPECT_EQ(outcomes[kVictim].peer, kVictim);
  EXPECT_EQ(outcomes[kVictim].phase, "survivors");
}

TEST_P(ThreadSurvivors, RanksThatDieOneAfterTheOther_LeaveOneThatGoesOnAlone) {
  constexpr int32_t kRanks = 5;
  const auto outcomes = testing::run_ranks(
      GetParam().make({.num_ranks = kRanks, .timeout = 20s}), [&](int32_t rank, auto& comm) {
        Communicator* current = &comm;
        Survivors left;
        for (int32_t next = 0; next < kRanks; ++next) {
          if (rank == next) return;
          Survivors fewer = go_on(*current);
          ASSERT_EQ(fewer.communicator->size(), kRanks - 1 - next);
          EXPECT_EQ(fewer.communicator->rank(), rank - next - 1);
          left = std::move(fewer);
          current = left.communicator.get();
          hear_all(*current, rank);
          if (current->size() == 1) return;
        }
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

// Nothing has failed: a rank that wants fewer ranks ends what the others are waiting for.
TEST_P(ThreadSurvivors, CallOnAGroupThatWorks_BringsTheOthersOutOfTheirWaits) {
  const auto outcomes = testing::run_ranks(
      GetParam().make({.num_ranks = 3, .timeout = 60s}), [&](int32_t rank, auto& comm) {
        if (rank != 0) {
          try {
            comm.barrier("long wait");
            ADD_FAILURE() << "no error";
          } catch (const CommError& error) {
            EXPECT_EQ(error.code(), ErrorCode::kCommAborted);
            EXPECT_EQ(error.peer(), 0);
          }
        } else {
          std::this_thread::sleep_for(20ms);
        }
        const Survivors left = survivors(comm);
        EXPECT_EQ(hear_all(*left.communicator, rank), (std::vector<int32_t>{0, 1, 2}));
        EXPECT_THROW(comm.barrier("old"), CommError);
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

TEST_P(ThreadSurvivors, SecondCall_IsRefused) {
  auto group = GetParam().make({.num_ranks = 1});
  const Survivors left = survivors(*group[0]);
  EXPECT_EQ(left.old_ranks, std::vector<int32_t>{0});
  try {
    survivors(*group[0]);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kState);
  }
  try {
    survivors(*left.communicator, {.deadline = -1s});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.detail().tensor, "deadline");
  }
  survivors(*left.communicator).communicator->barrier("a refused call has changed nothing");
}

// A group whose ranks come, leave, stay away or come late at random moments has one answer, and
// every rank is in it or knows that it is not.
TEST_P(ThreadSurvivors, RandomComings_HaveOneAnswer) {
  const int rounds = GetParam().name == "local" ? 60 : 20;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE("seed " + std::to_string(round));
    constexpr int32_t kRanks = 4;
    std::array<std::vector<int32_t>, kRanks> answers;
    const auto outcomes = testing::run_ranks(
        GetParam().make({.num_ranks = kRanks, .timeout = 20s}), [&](int32_t rank, auto& comm) {
          std::mt19937 random(static_cast<uint32_t>(round * kRanks + rank));
          const auto choice = random() % 6;
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));
          if (choice == 0) return;
          const Survivors left = survivors(comm, {.deadline = 20ms});
          answers[static_cast<size_t>(rank)] = left.old_ranks;
        });
    // A later roll call of the same ranks may have lost some: answers lie within each other.
    std::vector<int32_t> largest;
    for (const auto& one : answers)
      largest =
          std::max(largest, one, [](const auto& a, const auto& b) { return a.size() < b.size(); });
    for (const auto& one : answers) {
      EXPECT_TRUE(std::ranges::includes(largest, one)) << "two groups";
    }
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
      if (!outcomes[rank].code) continue;
      EXPECT_TRUE(*outcomes[rank].code == ErrorCode::kCommExcluded ||
                  *outcomes[rank].code == ErrorCode::kCommTimeout ||
                  *outcomes[rank].code == ErrorCode::kCommPeerLost)
          << outcomes[rank].message;
    }
  }
}

// What lies unread between two ranks is not in the way of a roll call.
TEST(TcpSurvivors, BytesThatNobodyReads_AreNotInTheWay) {
  std::atomic<int> gone_on{0};
  const auto outcomes = testing::run_ranks(
      testing::make_tcp_group({.num_ranks = 3, .timeout = 500ms}), [&](int32_t rank, auto& comm) {
        const std::vector<std::byte> mine(16 << 20, std::byte{static_cast<unsigned char>(rank)});
        std::vector<std::byte> all(3 * mine.size());
        if (rank == 1) {
          // Its messages are begun, and it neither reads nor answers for long.
          comm.begin_all_gather(mine, all);
          while (gone_on < 2) std::this_thread::sleep_for(1ms);
          return;
        }
        try {
          comm.all_gather(mine, all, "step");
          ADD_FAILURE() << "no error";
        } catch (const CommError&) {
          const Survivors left = survivors(comm);
          EXPECT_EQ(left.old_ranks, (std::vector<int32_t>{0, 2}));
          std::vector<std::byte> both(2 * mine.size());
          left.communicator->all_gather(mine, both, "after");
          EXPECT_EQ(both[both.size() - 1], std::byte{2});
          EXPECT_EQ(both[0], std::byte{0});
          ++gone_on;
        }
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

INSTANTIATE_TEST_SUITE_P(Transports, ThreadSurvivors, ::testing::ValuesIn(testing::kThreadGroups),
                         [](const auto& c) { return std::string(c.param.name); });

}  // namespace
}  // namespace conclave
