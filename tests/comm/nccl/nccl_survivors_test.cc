// Ranks of NCCL that are left after a failure find each other, and go on with another communicator.
#include "comm/nccl/nccl_ranks.h"
#include "cuda/check.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "support/layer_fixture.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::code_of;
using testing::kNcclRanks;
using testing::NcclTest;
using testing::on_nccl_ranks;
using Clock = std::chrono::steady_clock;

// Adds up rank + 1 in memory of the device, by NCCL where there are peers.
void expect_sums(Communicator& comm, const char* what) {
  SCOPED_TRACE(what);
  constexpr size_t kCount = 1000;
  std::vector<float> values(kCount, static_cast<float>(comm.rank() + 1));
  cuda::DeviceBuffer from(kCount * sizeof(float));
  cuda::DeviceBuffer to(kCount * sizeof(float));
  cuda::check(cudaMemcpy(from.data(), values.data(), from.bytes(), cudaMemcpyHostToDevice),
              "cudaMemcpy");
  comm.all_reduce({std::span<const std::byte>(from.data(), from.bytes()), MemoryKind::kDevice},
                  {std::span<std::byte>(to.data(), to.bytes()), MemoryKind::kDevice}, DType::kF32,
                  ReduceOp::kSum, "sum");
  cuda::check(cudaMemcpy(values.data(), to.data(), to.bytes(), cudaMemcpyDeviceToHost),
              "cudaMemcpy");
  const auto expected = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
  EXPECT_EQ(values.front(), expected);
  EXPECT_EQ(values.back(), expected);
  comm.barrier("both have it");
}

std::vector<int32_t> all_ranks(const Communicator& comm) {
  std::vector<int32_t> ranks(static_cast<size_t>(comm.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

class NcclSurvivors : public NcclTest {};

TEST_F(NcclSurvivors, AfterALoss_TheOtherIsAloneAndServes) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    EXPECT_TRUE(comm.supports(CommFeature::kShrink))
        << comm.supports(CommFeature::kShrink).reason();
    expect_sums(comm, "before");
    if (rank == 1) return;
    EXPECT_EQ(code_of([&] { expect_sums(comm, "without it"); }), ErrorCode::kCommPeerLost);
    const auto begin = Clock::now();
    const Survivors left = survivors(comm, {.deadline = 5s});
    EXPECT_LT(Clock::now() - begin, 3s);
    EXPECT_EQ(left.old_ranks, std::vector<int32_t>{0});
    EXPECT_EQ(left.communicator->size(), 1);
    EXPECT_EQ(left.communicator->name(), "nccl");
    EXPECT_EQ(left.communicator->timeout(), comm.timeout());
    expect_sums(*left.communicator, "after");
    EXPECT_EQ(code_of([&] { survivors(comm); }), ErrorCode::kState) << "it has gone on before";
    EXPECT_EQ(code_of([&] { comm.barrier("on the old one"); }), ErrorCode::kCommPeerLost);
    const Survivors again = survivors(*left.communicator);
    expect_sums(*again.communicator, "once more");
  });
}

// Work of the failed group waits on the device of a rank that asks for the survivors.
TEST_F(NcclSurvivors, WorkThatWaitsOnTheDevice_EndsFirst) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const cuda::OwnedStream stream = cuda::make_stream();
    cuda::DeviceBuffer memory(4096);
    if (rank == 0) {
      const Stream on = to_stream(stream.get());
      const CommHandle handle = comm.begin_all_gather(
          {std::span<const std::byte>(memory.data(), 64), MemoryKind::kDevice},
          {std::span<std::byte>(memory.data() + 1024, 128), MemoryKind::kDevice}, on);
      comm.wait_on(on, handle, 20s, "gather");
      std::this_thread::sleep_for(200ms);
    } else {
      EXPECT_EQ(code_of([&] {
                  while (true) {
                    comm.check("later");
                    std::this_thread::sleep_for(1ms);
                  }
                }),
                ErrorCode::kCommAborted);
    }
    const Survivors left = survivors(comm, {.deadline = 5s});
    EXPECT_EQ(left.old_ranks, all_ranks(comm));
    EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
    EXPECT_EQ(code_of([&] { comm.check("old"); }), ErrorCode::kCommAborted);
    expect_sums(*left.communicator, "after");
  });
}

TEST_F(NcclSurvivors, BothAreLeft_OverAndOver) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    std::vector<std::unique_ptr<Communicator>> groups;
    Communicator* now = &comm;
    for (int round = 0; round < 3; ++round) {
      if (rank == round % 2) now->abort("had enough");
      Survivors left = survivors(*now, {.deadline = 5s});
      ASSERT_EQ(left.old_ranks, all_ranks(comm));
      groups.push_back(std::move(left.communicator));
      now = groups.back().get();
      expect_sums(*now, "round");
    }
    // The older ones go while the last one serves.
    groups.erase(groups.begin(), groups.end() - 1);
    expect_sums(*now, "last");
  });
}

// Memory that an aborted communicator had on the device is there again for others. What was kept of
// one would be missing after every round; other programs on the device come and go.
TEST_F(NcclSurvivors, RoundAfterRound_MemoryIsReturned) {
  on_nccl_ranks(20s, [&](int32_t, Communicator& comm) {
    constexpr int kRounds = 5;
    constexpr int64_t kMost = int64_t{10} << 20;
    std::unique_ptr<Communicator> now;
    std::vector<int64_t> free_after;
    for (int round = 0; round < kRounds; ++round) {
      Communicator& before = now ? *now : comm;
      Survivors left = survivors(before, {.deadline = 5s});
      ASSERT_EQ(left.old_ranks, all_ranks(comm));
      now = std::move(left.communicator);
      expect_sums(*now, "round");
      size_t free = 0;
      size_t total = 0;
      cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
      free_after.push_back(static_cast<int64_t>(free));
      now->barrier("both have looked");
    }
    // The first one loads what stays for all others.
    int64_t least_taken = free_after[1];
    for (size_t round = 2; round < free_after.size(); ++round) {
      least_taken = std::min(least_taken, free_after[round - 1] - free_after[round]);
    }
    EXPECT_LT(least_taken, kMost) << ::testing::PrintToString(free_after);
  });
}

TEST_F(NcclSurvivors, WhoComesTooLate_IsLeftOut) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    if (rank == 1) {
      std::this_thread::sleep_for(4s);
      const auto begin = Clock::now();
      EXPECT_EQ(code_of([&] { survivors(comm, {.deadline = 2s}); }), ErrorCode::kCommExcluded);
      EXPECT_LT(Clock::now() - begin, 4s);
      return;
    }
    comm.abort("it does not come");
    const auto begin = Clock::now();
    const Survivors left = survivors(comm, {.deadline = 1s});
    EXPECT_LT(Clock::now() - begin, 4s);
    EXPECT_EQ(left.old_ranks, std::vector<int32_t>{0});
    expect_sums(*left.communicator, "alone");
  });
}

}  // namespace
}  // namespace conclave
