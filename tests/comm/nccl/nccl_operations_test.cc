// Every operation on device memory against what the host makes of the same bytes, of every length:
// none, odd ones, those of one step, of blocks and of several pieces.
#include "comm/nccl/nccl_bytes.h"
#include "comm/nccl/nccl_ranks.h"
#include "comm/reduce.h"
#include "cuda/check.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

#include "conclave/interop/cuda.h"
#include "conclave/interop/nccl.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cuda_runtime_api.h>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::Bytes;
using testing::first_failure;
using testing::kNcclRanks;
using testing::letters;
using testing::NcclTest;
using testing::OnDevice;
using testing::run_nccl_ranks;
using testing::values;

const std::vector<int64_t> kCounts = {
    0, 1, 3, 5, 1000, 65537, (1 << 20) + 3, (3 << 20) + 1, 18 * (1 << 20) + 5};

template <class T>
void check_reductions(DType dtype, const std::vector<int64_t>& counts) {
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
      for (const int64_t count : counts) {
        Bytes expected = values<T>(count, 1);
        const Bytes other = values<T>(count, 2);
        const OnDevice mine(rank == 0 ? expected : other);
        comm::reduce_into(expected.data(), other.data(), static_cast<int64_t>(other.size()), dtype,
                          op);
        const OnDevice sum(Bytes(expected.size(), std::byte{0x5a}));
        comm.all_reduce(mine.read(), sum.write(), dtype, op, "sum");
        ASSERT_EQ(sum.bytes() == expected, true) << to_string(dtype) << ", " << count;
        if (count % kNcclRanks != 0) continue;
        const size_t half = expected.size() / kNcclRanks;
        const OnDevice block(Bytes(half, std::byte{0x5a}));
        comm.reduce_scatter(mine.read(), block.write(), dtype, op, "scatter");
        const auto begin = expected.begin() + static_cast<std::ptrdiff_t>(half) * rank;
        ASSERT_EQ(block.bytes() == Bytes(begin, begin + static_cast<std::ptrdiff_t>(half)), true)
            << to_string(dtype) << ", " << count;
      }
    }
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

class NcclOperations : public NcclTest {};

TEST_F(NcclOperations, SumsOfFloats_HaveTheBitsOfTheHosts) {
  std::vector<int64_t> counts = kCounts;
  counts.push_back(20 * (1 << 20));  // a scattered block is longer than the staging memory
  check_reductions<float>(DType::kF32, counts);
}

TEST_F(NcclOperations, SumsOfOtherTypes_HaveTheBitsOfTheHosts) {
  check_reductions<double>(DType::kF64, {0, 1, 7, 4096, (1 << 20) + 6});
  check_reductions<int32_t>(DType::kI32, {0, 1, 7, 4096, (3 << 20) + 2});
  check_reductions<int64_t>(DType::kI64, {0, 1, 7, 4096, (1 << 20) + 6});
}

TEST_F(NcclOperations, SumsOfUnevenAddresses_AreTheSame) {
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    Bytes expected = values<float>(1025, 1);
    const Bytes other = values<float>(1025, 2);
    const OnDevice mine(rank == 0 ? expected : other, rank == 0 ? 4 : 12);
    comm::reduce_into(expected.data(), other.data(), static_cast<int64_t>(other.size()),
                      DType::kF32, ReduceOp::kSum);
    const OnDevice sum(Bytes(expected.size()), 8);
    comm.all_reduce(mine.read(), sum.write(), DType::kF32, ReduceOp::kSum, "sum");
    EXPECT_EQ(sum.bytes() == expected, true);
    const OnDevice odd(Bytes(8), 2);
    const OnDevice to(Bytes(8));
    EXPECT_THROW(comm.begin_all_reduce(odd.read(), to.write(), DType::kF32, ReduceOp::kSum), Error);
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(NcclOperations, AllGather_OrdersBlocksByRank) {
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    for (const int64_t bytes :
         {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{4099}, int64_t{9 << 20} + 1}) {
      const OnDevice mine(letters(bytes, rank, 0));
      const OnDevice all(Bytes(static_cast<size_t>(bytes) * kNcclRanks));
      comm.all_gather(mine.read(), all.write(), "gather");
      Bytes expected = letters(bytes, 0, 0);
      const Bytes second = letters(bytes, 1, 0);
      expected.insert(expected.end(), second.begin(), second.end());
      EXPECT_EQ(all.bytes() == expected, true) << bytes;
    }
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(NcclOperations, AllToAllV_MovesUnevenBlocksBetweenGaps) {
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    for (const int64_t unit : {int64_t{1}, int64_t{1000}, int64_t{5 << 20}}) {
      const auto count = [&](int32_t from, int32_t to) { return unit * ((from * 3 + to) % 4); };
      const int64_t room = unit * 3 + 5;
      std::vector<int64_t> send_bytes, recv_bytes, offsets;
      Bytes source(static_cast<size_t>(room * kNcclRanks));
      Bytes expected(source.size(), std::byte{0xee});
      for (int32_t peer = 0; peer < kNcclRanks; ++peer) {
        send_bytes.push_back(count(rank, peer));
        recv_bytes.push_back(count(peer, rank));
        offsets.push_back(room * peer + 2);
        const auto at = static_cast<std::ptrdiff_t>(offsets.back());
        std::ranges::copy(letters(send_bytes.back(), rank, peer), source.begin() + at);
        std::ranges::copy(letters(recv_bytes.back(), peer, rank), expected.begin() + at);
      }
      const OnDevice send(source);
      const OnDevice recv(Bytes(source.size(), std::byte{0xee}));
      comm.all_to_all_v({.send = send.data(),
                         .send_bytes = send_bytes,
                         .send_offsets = offsets,
                         .recv = recv.data(),
                         .recv_bytes = recv_bytes,
                         .recv_offsets = offsets,
                         .memory = MemoryKind::kDevice},
                        "exchange");
      EXPECT_EQ(recv.bytes() == expected, true) << unit;
    }
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(NcclOperations, MessagesThatCross_AreWaitedForInAnyOrder) {
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const int32_t peer = 1 - rank;
    for (const int64_t bytes : {int64_t{0}, int64_t{3}, int64_t{24 << 20} + 1}) {
      const OnDevice first(letters(bytes, rank, 1));
      const OnDevice second(letters(bytes + 1, rank, 2));
      const OnDevice own(letters(9, rank, 3));
      const OnDevice got_first(Bytes(static_cast<size_t>(bytes)));
      const OnDevice got_second(Bytes(static_cast<size_t>(bytes) + 1));
      const OnDevice got_own(Bytes(9));
      const CommHandle a = comm.begin_send(peer, first.read());
      const CommHandle b = comm.begin_send(peer, second.read());
      const CommHandle c = comm.begin_recv(peer, got_first.write());
      const CommHandle d = comm.begin_recv(peer, got_second.write());
      // Nobody but the rank itself has the other half of this one.
      const CommHandle e = comm.begin_send(rank, own.read());
      const CommHandle f = comm.begin_recv(rank, got_own.write());
      std::vector<CommHandle> handles = {a, b, c, d, e, f};
      if (rank == 1) std::ranges::reverse(handles);
      for (const CommHandle handle : handles) comm.wait(handle, 20s, "message");
      EXPECT_EQ(got_first.bytes() == letters(bytes, peer, 1), true) << bytes;
      EXPECT_EQ(got_second.bytes() == letters(bytes + 1, peer, 2), true) << bytes;
      EXPECT_EQ(got_own.bytes() == letters(9, rank, 3), true) << bytes;
    }
    comm.barrier("together");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(NcclOperations, HostMemory_GoesTheHostsWay) {
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const std::vector<int64_t> mine(70000, rank + 1);
    std::vector<int64_t> sum(mine.size());
    comm.all_reduce(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(sum)),
                    DType::kI64, ReduceOp::kSum, "sum");
    EXPECT_EQ(std::ranges::count(sum, 3), 70000);
    comm.barrier("together");
    for (const CommFeature feature :
         {CommFeature::kHostMemory, CommFeature::kDeviceMemory, CommFeature::kStreamOrder,
          CommFeature::kOverlap, CommFeature::kShrink}) {
      EXPECT_TRUE(comm.supports(feature));
    }
    EXPECT_FALSE(comm.supports(CommFeature::kPeerMemory));
    EXPECT_THROW(comm.open_window(64, MemoryKind::kDevice, 1s, "step"), Error);
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(NcclOperations, MemoryThatLiesElsewhere_IsRefusedBeforeAnythingBegins) {
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto code = [&](const ConstByteView& from, Stream stream) {
      const OnDevice to(Bytes(8));
      try {
        static_cast<void>(
            comm.begin_all_reduce(from, to.write(), DType::kF32, ReduceOp::kSum, stream));
      } catch (const Error& error) {
        return error.code();
      }
      return ErrorCode{0};
    };
    const Bytes host(8);
    const cuda::OwnedStream stream = cuda::make_stream();
    EXPECT_EQ(code(host, to_stream(stream.get())), ErrorCode::kDevice);
    EXPECT_EQ(code({std::span<const std::byte>(host), MemoryKind::kDevice}, {}),
              ErrorCode::kDevice);
    {
      const cuda::DeviceGuard guard(1 - rank);
      const OnDevice elsewhere(Bytes(8));
      EXPECT_EQ(code(elsewhere.read(), {}), ErrorCode::kDevice);
    }
    EXPECT_THROW(comm.wait({77}, 1s, "step"), Error);
    comm.barrier("still usable");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

// More operations than the communicator has places for, with nobody waiting between them.
TEST_F(NcclOperations, Streams_FollowOneAnother) {
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const cuda::OwnedStream stream = cuda::make_stream();
    const Stream on = to_stream(stream.get());
    constexpr int64_t kCount = 10001;
    const OnDevice a(values<float>(kCount, static_cast<uint64_t>(rank)));
    const OnDevice b(Bytes(kCount * sizeof(float)));
    const OnDevice c(Bytes(kCount * sizeof(float)));
    for (int round = 0; round < 200; ++round) {
      const OnDevice& to = round % 2 == 0 ? b : c;
      const CommHandle handle = comm.begin_all_reduce((round == 0       ? a
                                                       : round % 2 == 0 ? c
                                                                        : b)
                                                          .read(),
                                                      to.write(), DType::kF32, ReduceOp::kMax, on);
      comm.wait_on(on, handle, 10s, "max");
    }
    const CommHandle last = comm.begin_barrier(on);
    comm.wait_on(on, last, 10s, "barrier");
    cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    comm.check("done");
    Bytes expected = values<float>(kCount, 0);
    const Bytes other = values<float>(kCount, 1);
    comm::reduce_into(expected.data(), other.data(), static_cast<int64_t>(other.size()),
                      DType::kF32, ReduceOp::kMax);
    EXPECT_EQ(c.bytes() == expected, true);
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(NcclOperations, AGraph_RunsThemAsOftenAsItLikes) {
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const cuda::OwnedStream stream = cuda::make_stream();
    const Stream on = to_stream(stream.get());
    for (const int64_t count : {int64_t{1000}, int64_t{3 << 20}}) {
      const OnDevice mine(values<float>(count, static_cast<uint64_t>(rank) + 1));
      const OnDevice sum(Bytes(static_cast<size_t>(count) * sizeof(float)));
      const cuda::OwnedGraph graph = cuda::capture(stream.get(), [&] {
        const CommHandle handle =
            comm.begin_all_reduce(mine.read(), sum.write(), DType::kF32, ReduceOp::kSum, on);
        EXPECT_THROW(static_cast<void>(comm.test(handle, "test")), Error);
        comm.wait_on(on, handle, 10s, "sum");
      });
      for (uint64_t round = 1; round <= 20; ++round) {
        Bytes expected = values<float>(count, round);
        const Bytes other = values<float>(count, round + 1);
        cuda::copy_to_device(rank == 0 ? expected : other, mine.data());
        cuda::check(cudaGraphLaunch(graph.get(), stream.get()), "cudaGraphLaunch");
        cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
        comm::reduce_into(expected.data(), other.data(), static_cast<int64_t>(other.size()),
                          DType::kF32, ReduceOp::kSum);
        ASSERT_EQ(sum.bytes() == expected, true) << round;
      }
      comm.check("after the graph");
      comm.barrier("both are done");
    }
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(NcclOperations, AnApplicationsCommunicator_IsCopiedAndStays) {
  const comm::NcclLibrary nccl = comm::find_nccl().library;
  comm::NcclUniqueId id{};
  ASSERT_EQ(nccl.get_unique_id(&id), comm::kNcclSuccess);
  auto group = make_local_group({.num_ranks = kNcclRanks, .timeout = 60s});
  const auto outcomes =
      testing::run_ranks(std::move(group), [&](int32_t rank, Communicator& local) {
        const cuda::DeviceGuard guard(rank);
        comm::NcclConfig config;
        ncclComm* own = nullptr;
        ASSERT_EQ(nccl.comm_init_rank_config(&own, kNcclRanks, id, rank, &config), 0);
        {
          const auto comm = make_nccl_communicator(own, local, 20s);
          const OnDevice mine(values<float>(100, static_cast<uint64_t>(rank)));
          const OnDevice sum(Bytes(400));
          comm->all_reduce(mine.read(), sum.write(), DType::kF32, ReduceOp::kSum, "sum");
          Bytes expected = values<float>(100, 0);
          const Bytes other = values<float>(100, 1);
          comm::reduce_into(expected.data(), other.data(), 400, DType::kF32, ReduceOp::kSum);
          EXPECT_EQ(sum.bytes() == expected, true);
        }
        int ranks = 0;
        EXPECT_EQ(nccl.comm_count(own, &ranks), 0);
        EXPECT_EQ(ranks, kNcclRanks);
        EXPECT_EQ(nccl.comm_abort(own), 0);
      });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST(NcclAlone, AGroupOfOne_NeedsOneGpu) {
  if (cuda::count_devices().count == 0) GTEST_SKIP() << cuda::count_devices().reason;
  if (!comm::find_nccl().support) GTEST_SKIP() << comm::find_nccl().support.reason();
  const auto comm = connect("nccl", {.timeout = 10s});
  const OnDevice mine(values<float>(1000, 1));
  const OnDevice sum(Bytes(4000));
  comm->all_reduce(mine.read(), sum.write(), DType::kF32, ReduceOp::kSum, "sum");
  EXPECT_EQ(sum.bytes() == mine.bytes(), true);
  const OnDevice gathered(Bytes(4000));
  comm->all_gather(mine.read(), gathered.write(), "gather");
  EXPECT_EQ(gathered.bytes() == mine.bytes(), true);
  comm->barrier("alone");
}

}  // namespace
}  // namespace conclave
