// A rank that is late, gone, of another mind or told to stop: each survivor has a typed error that
// names it, in bounded time, and its device goes on.
#include "comm/nccl/nccl_ranks.h"
#include "cuda/check.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cuda_runtime_api.h>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::NcclTest;
using testing::on_nccl_ranks;
using testing::RankOutcome;
using Clock = std::chrono::steady_clock;

// Two buffers of a device.
struct Pair {
  explicit Pair(size_t bytes) : from(bytes), to(bytes * 2) {
    cuda::check(cudaMemset(from.data(), 0, bytes), "cudaMemset");
    cuda::check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
  }
  ConstByteView send(size_t bytes) const {
    return {std::span<const std::byte>(from.data(), bytes), MemoryKind::kDevice};
  }
  ByteView recv(size_t bytes) const {
    return {std::span<std::byte>(to.data(), bytes), MemoryKind::kDevice};
  }
  cuda::DeviceBuffer from;
  cuda::DeviceBuffer to;
};

struct Seen {
  RankOutcome outcome;
  std::chrono::nanoseconds took{};
};

// What `step` throws, and after how long.
Seen see(const std::function<void()>& step) {
  const auto begin = Clock::now();
  Seen seen;
  try {
    step();
  } catch (const CommError& error) {
    seen.outcome = {error.code(), error.peer(), error.phase(), error.what()};
  } catch (const Error& error) {
    seen.outcome = {error.code(), -1, {}, error.what()};
  }
  seen.took = Clock::now() - begin;
  return seen;
}

void expect_error(const Seen& seen, ErrorCode code, int32_t peer, std::chrono::nanoseconds within) {
  ASSERT_TRUE(seen.outcome.code.has_value()) << "no error";
  EXPECT_EQ(to_string(*seen.outcome.code), to_string(code)) << seen.outcome.message;
  EXPECT_EQ(seen.outcome.peer, peer) << seen.outcome.message;
  EXPECT_LT(seen.took, within) << seen.outcome.message;
}

// Waits until what another rank has done is known here.
Seen see_check(const Communicator& comm, std::chrono::nanoseconds within = 3s) {
  return see([&] {
    const auto until = Clock::now() + within;
    while (Clock::now() < until) {
      const_cast<Communicator&>(comm).check("later");
      std::this_thread::sleep_for(1ms);
    }
  });
}

void wait_for(const std::atomic<int>& flag) {
  while (flag == 0) std::this_thread::sleep_for(1ms);
}

class NcclFaults : public NcclTest {};

TEST_F(NcclFaults, ALateRank_IsATimeoutThatNamesItOnBoth) {
  std::atomic<int> over = 0;
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const Pair memory(4096);
    if (rank == 1) wait_for(over);
    const Seen seen = see([&] {
      const CommHandle handle =
          comm.begin_all_reduce(memory.send(4096), memory.recv(4096), DType::kF32, ReduceOp::kSum);
      comm.wait(handle, 500ms, "sum");
    });
    over = 1;
    expect_error(seen, ErrorCode::kCommTimeout, 1, 2s);
    EXPECT_EQ(seen.outcome.phase, "sum");
    // It stays so, for every kind of memory.
    expect_error(see([&] { comm.barrier("again"); }), ErrorCode::kCommTimeout, 1, 1s);
  });
}

TEST_F(NcclFaults, ADeviceThatWaitsTooLong_GoesOn) {
  std::atomic<int> over = 0;
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const Pair memory(4096);
    if (rank == 1) {
      wait_for(over);
      return;
    }
    const cuda::OwnedStream stream = cuda::make_stream();
    const Stream on = to_stream(stream.get());
    const CommHandle handle = comm.begin_all_gather(memory.send(64), memory.recv(128), on);
    comm.wait_on(on, handle, 400ms, "gather");
    const auto begin = Clock::now();
    EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
    EXPECT_LT(Clock::now() - begin, 3s);
    expect_error(see_check(comm), ErrorCode::kCommTimeout, 1, 3s);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    over = 1;
  });
}

TEST_F(NcclFaults, AGraphThatWaitsTooLong_GoesOn) {
  std::atomic<int> over = 0;
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const Pair memory(4096);
    const cuda::OwnedStream stream = cuda::make_stream();
    const Stream on = to_stream(stream.get());
    {
      const cuda::OwnedGraph graph = cuda::capture(stream.get(), [&] {
        const CommHandle handle = comm.begin_barrier(on);
        comm.wait_on(on, handle, 400ms, "barrier");
      });
      for (int round = 0; round < 3; ++round) {
        EXPECT_EQ(cudaGraphLaunch(graph.get(), stream.get()), cudaSuccess);
      }
      EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
      comm.check("both came");
      if (rank == 1) {
        wait_for(over);
        expect_error(see_check(comm), ErrorCode::kCommTimeout, 1, 3s);
        return;
      }
      EXPECT_EQ(cudaGraphLaunch(graph.get(), stream.get()), cudaSuccess);
      const auto begin = Clock::now();
      EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
      EXPECT_LT(Clock::now() - begin, 3s);
      expect_error(see_check(comm), ErrorCode::kCommTimeout, 1, 3s);
    }
    over = 1;
  });
}

TEST_F(NcclFaults, AMessageThatNobodyTakes_NamesItsPeer) {
  std::atomic<int> over = 0;
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const Pair memory(1 << 20);
    if (rank == 0) {
      wait_for(over);
      return;
    }
    const CommHandle handle = comm.begin_recv(0, memory.recv(64));
    const Seen seen = see([&] { comm.wait(handle, 400ms, "message"); });
    over = 1;
    expect_error(seen, ErrorCode::kCommTimeout, 0, 2s);
  });
}

TEST_F(NcclFaults, AnAbort_EndsTheWaitOfEveryRank) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const Pair memory(4096);
    const CommHandle handle =
        rank == 0 ? comm.begin_all_gather(memory.send(64), memory.recv(128)) : CommHandle{};
    if (rank == 1) {
      std::this_thread::sleep_for(200ms);
      comm.abort("had enough");
      expect_error(see([&] { comm.barrier("after"); }), ErrorCode::kCommAborted, 1, 1s);
      return;
    }
    const Seen seen = see([&] { comm.wait(handle, 10s, "gather"); });
    expect_error(seen, ErrorCode::kCommAborted, 1, 2s);
    EXPECT_NE(seen.outcome.message.find("had enough"), std::string::npos) << seen.outcome.message;
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  });
}

TEST_F(NcclFaults, AnAbort_EndsOperationsOfHostMemoryToo) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    if (rank == 1) {
      std::this_thread::sleep_for(200ms);
      comm.abort("had enough");
      return;
    }
    expect_error(see([&] { comm.barrier("host"); }), ErrorCode::kCommAborted, 1, 2s);
  });
}

TEST_F(NcclFaults, WhatIsComplete_StaysComplete) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const Pair memory(4096);
    const CommHandle done = comm.begin_all_gather(memory.send(64), memory.recv(128));
    while (!comm.test(done, "gather")) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(100ms);
    if (rank == 1) comm.abort("had enough");
    static_cast<void>(see_check(comm));
    EXPECT_FALSE(see([&] { comm.wait(done, 1s, "gather"); }).outcome.code.has_value());
  });
}

struct Disagreement {
  std::string name;
  std::function<CommHandle(int32_t rank, Communicator&, const Pair&)> begin;
};

std::vector<Disagreement> disagreements() {
  return {{"sizes of one step",
           [](int32_t rank, Communicator& comm, const Pair& memory) {
             const size_t bytes = rank == 0 ? 64 : 128;
             return comm.begin_all_reduce(memory.send(bytes), memory.recv(bytes), DType::kF32,
                                          ReduceOp::kSum);
           }},
          {"sizes far apart",
           [](int32_t rank, Communicator& comm, const Pair& memory) {
             const size_t bytes = rank == 0 ? 64 : size_t{12} << 20;
             return comm.begin_all_reduce(memory.send(bytes), memory.recv(bytes), DType::kF32,
                                          ReduceOp::kSum);
           }},
          {"types",
           [](int32_t rank, Communicator& comm, const Pair& memory) {
             return comm.begin_all_reduce(memory.send(64), memory.recv(64),
                                          rank == 0 ? DType::kF32 : DType::kI32, ReduceOp::kSum);
           }},
          {"rules",
           [](int32_t rank, Communicator& comm, const Pair& memory) {
             return comm.begin_all_reduce(memory.send(64), memory.recv(64), DType::kF32,
                                          rank == 0 ? ReduceOp::kSum : ReduceOp::kMax);
           }},
          {"operations",
           [](int32_t rank, Communicator& comm, const Pair& memory) {
             return rank == 0 ? comm.begin_all_gather(memory.send(64), memory.recv(128))
                              : comm.begin_reduce_scatter(memory.send(128), memory.recv(64),
                                                          DType::kF32, ReduceOp::kSum);
           }},
          {"bytes of a message", [](int32_t rank, Communicator& comm, const Pair& memory) {
             return rank == 0 ? comm.begin_send(1, memory.send(64))
                              : comm.begin_recv(0, memory.recv(32));
           }}};
}

// Where the bytes that do come let the operation end, it is a disagreement at once; where they do
// not, at the deadline, as a rank that waits for more: on every rank an error, on none a result.
TEST_F(NcclFaults, RanksThatDisagree_HaveNoResult) {
  for (const Disagreement& it : disagreements()) {
    SCOPED_TRACE(it.name);
    std::array<Seen, testing::kNcclRanks> seen;
    on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
      const Pair memory(size_t{16} << 20);
      const auto at = static_cast<size_t>(rank);
      seen[at] = see([&] { comm.wait(it.begin(rank, comm, memory), 700ms, "step"); });
      // A sender may be done before its receiver sees what it has.
      if (!seen[at].outcome.code) seen[at] = see_check(comm);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    });
    for (const Seen& one : seen) {
      ASSERT_TRUE(one.outcome.code.has_value());
      EXPECT_TRUE(*one.outcome.code == ErrorCode::kCommMismatch) << one.outcome.message;
      EXPECT_LT(one.took, 4s);
    }
  }
}

TEST_F(NcclFaults, ARankThatIsDestroyed_IsLostToItsPeers) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const Pair memory(4096);
    comm.wait(comm.begin_all_gather(memory.send(64), memory.recv(128)), 10s, "first");
    if (rank == 1) return;
    const Seen seen = see([&] {
      comm.wait(comm.begin_all_gather(memory.send(64), memory.recv(128)), 10s, "second");
    });
    expect_error(seen, ErrorCode::kCommPeerLost, 1, 3s);
    expect_error(see([&] { comm.barrier("host"); }), ErrorCode::kCommPeerLost, 1, 3s);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  });
}

TEST_F(NcclFaults, ARankThatIsDestroyedDuringAnOperation_IsLostToo) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const Pair memory(4096);
    if (rank == 1) {
      static_cast<void>(comm.begin_recv(0, memory.recv(64)));
      std::this_thread::sleep_for(100ms);
      return;
    }
    const Seen seen = see([&] {
      comm.wait(comm.begin_all_gather(memory.send(64), memory.recv(128)), 10s, "gather");
    });
    expect_error(seen, ErrorCode::kCommPeerLost, 1, 3s);
  });
}

TEST_F(NcclFaults, RanksThatLeaveTogether_DoNotWait) {
  const auto begin = Clock::now();
  for (int round = 0; round < 3; ++round) {
    on_nccl_ranks(20s, [&](int32_t, Communicator& comm) { comm.barrier("together"); });
  }
  EXPECT_LT(Clock::now() - begin, 30s);
}

TEST_F(NcclFaults, ARankThatNeverConnects_IsATimeout) {
  auto group = make_local_group({.num_ranks = 2, .timeout = 1s});
  const auto outcomes = testing::run_ranks(std::move(group), [&](int32_t rank,
                                                                 Communicator& local) {
    if (rank == 1) {
      std::this_thread::sleep_for(3s);
      return;
    }
    static_cast<void>(connect(
        "nccl", {.rank = 0, .size = 2, .bootstrap = &local, .device = "cuda:0", .timeout = 1s}));
  });
  ASSERT_TRUE(outcomes[0].code.has_value());
  EXPECT_EQ(*outcomes[0].code, ErrorCode::kCommTimeout) << outcomes[0].message;
  EXPECT_EQ(outcomes[0].peer, 1);
}

}  // namespace
}  // namespace conclave
