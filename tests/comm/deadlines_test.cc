// The deadline of a wait counts, not the timeout of the group: it ends every kind of operation in
// time, and a deadline longer than the timeout lets the wait continue.
#include "support/thread_groups.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::RankOutcome;
using Clock = std::chrono::steady_clock;

// Memory that an operation of two ranks uses until it is waited for.
struct Buffers {
  std::vector<std::byte> send = std::vector<std::byte>(16);
  std::vector<std::byte> recv = std::vector<std::byte>(16);
  std::vector<int64_t> bytes = {8, 8};
  std::vector<int64_t> offsets = {0, 8};
};

struct Operation {
  const char* name;
  std::function<CommHandle(Communicator& comm, Buffers& buffers)> begin;
};

std::span<std::byte> half(std::vector<std::byte>& bytes) { return std::span(bytes).first(8); }

std::vector<Operation> every_operation() {
  return {
      {"barrier", [](Communicator& c, Buffers&) { return c.begin_barrier(); }},
      {"all_gather",
       [](Communicator& c, Buffers& b) { return c.begin_all_gather(half(b.send), b.recv); }},
      {"all_reduce",
       [](Communicator& c, Buffers& b) {
         return c.begin_all_reduce(b.send, b.recv, DType::kF32, ReduceOp::kSum);
       }},
      {"reduce_scatter",
       [](Communicator& c, Buffers& b) {
         return c.begin_reduce_scatter(b.send, half(b.recv), DType::kI64, ReduceOp::kMax);
       }},
      {"all_to_all_v",
       [](Communicator& c, Buffers& b) {
         return c.begin_all_to_all_v(
             {b.send.data(), b.bytes, b.offsets, b.recv.data(), b.bytes, b.offsets});
       }},
      {"message",
       [](Communicator& c, Buffers& b) {
         return c.rank() == 0 ? c.begin_send(1, b.send) : c.begin_recv(0, b.recv);
       }},
  };
}

// A busy machine may wake a thread late, but far less than the minute that the group allows.
constexpr auto kSoon = 5s;

class Deadlines : public ::testing::TestWithParam<testing::ThreadGroups> {};

INSTANTIATE_TEST_SUITE_P(Threads, Deadlines, ::testing::ValuesIn(testing::kThreadGroups),
                         [](const auto& group) { return std::string(group.param.name); });

TEST_P(Deadlines, ShorterThanTheTimeout_EndsTheWaitInTime) {
  for (const Operation& operation : every_operation()) {
    for (const int32_t waiter : {0, 1}) {
      SCOPED_TRACE(std::string(operation.name) + " on rank " + std::to_string(waiter));
      std::atomic<bool> over{false};
      Clock::duration waited{};
      const auto outcomes = testing::run_ranks(
          GetParam().make({.num_ranks = 2, .timeout = 60s}), [&](int32_t rank, Communicator& comm) {
            if (rank != waiter) {
              while (!over) std::this_thread::sleep_for(1ms);  // alive, but absent
              return;
            }
            Buffers buffers;
            const CommHandle handle = operation.begin(comm, buffers);
            const auto start = Clock::now();
            try {
              comm.wait(handle, 50ms, "step");
            } catch (...) {
              waited = Clock::now() - start;
              over = true;
              throw;
            }
            over = true;
          });
      const RankOutcome& outcome = outcomes[static_cast<size_t>(waiter)];
      ASSERT_EQ(outcome.code, ErrorCode::kCommTimeout) << outcome.message;
      EXPECT_EQ(outcome.peer, 1 - waiter);
      EXPECT_EQ(outcome.phase, "step");
      EXPECT_NE(outcome.message.find("50 ms"), std::string::npos) << outcome.message;
      EXPECT_GE(waited, 50ms);
      ASSERT_LT(waited, kSoon);
    }
  }
}

TEST_P(Deadlines, LongerThanTheTimeout_WaitsForALateRank) {
  for (const Operation& operation : every_operation()) {
    SCOPED_TRACE(operation.name);
    const auto outcomes = testing::run_ranks(
        GetParam().make({.num_ranks = 2, .timeout = 300ms}), [&](int32_t rank, Communicator& comm) {
          if (rank == 1) std::this_thread::sleep_for(400ms);
          Buffers buffers;
          comm.wait(operation.begin(comm, buffers), 60s, "step");
        });
    EXPECT_EQ(testing::first_failure(outcomes), "");
  }
}

TEST_P(Deadlines, TimeoutOfTheGroup_EndsCallsWithoutADeadline) {
  const auto start = Clock::now();
  std::atomic<bool> over{false};
  const auto outcomes = testing::run_ranks(GetParam().make({.num_ranks = 2, .timeout = 300ms}),
                                           [&](int32_t rank, Communicator& comm) {
                                             if (rank == 1) {
                                               while (!over) std::this_thread::sleep_for(1ms);
                                               return;
                                             }
                                             try {
                                               comm.barrier("step");
                                             } catch (...) {
                                               over = true;
                                               throw;
                                             }
                                             over = true;
                                           });
  EXPECT_EQ(outcomes[0].code, ErrorCode::kCommTimeout) << outcomes[0].message;
  EXPECT_GE(Clock::now() - start, 300ms);
  EXPECT_LT(Clock::now() - start, kSoon);
}

}  // namespace
}  // namespace conclave
