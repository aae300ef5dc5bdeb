// Operations of devices that go through peers' windows in one launch: of every length around
// stripes, slots and chunks, a thousand after another, and where ranks are late or disagree.
#include "comm/nccl/nccl_bytes.h"
#include "comm/nccl/nccl_ranks.h"
#include "comm/nccl/window_layout.h"
#include "comm/one_launch.h"
#include "comm/reduce.h"
#include "cuda/check.h"
#include "cuda/stream.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cuda_runtime_api.h>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::Bytes;
using testing::kNcclRanks;
using testing::letters;
using testing::NcclTest;
using testing::on_nccl_ranks;
using testing::OnDevice;
using testing::values;

// Longer messages than this go by chunks. Where NCCL or the machine has no windows, the same
// operations take the other way, and ranks must see the same.
constexpr int64_t kSlot = int64_t{8} << 20;

// The bytes of each direction between two ranks, at offsets of their own.
struct Exchange {
  std::array<std::array<int64_t, kNcclRanks>, kNcclRanks> bytes;  // [from][to]
  int64_t send_gap = 0;
  int64_t recv_gap = 0;
};

void check_exchange(int32_t rank, Communicator& comm, const Exchange& it) {
  std::vector<int64_t> send_bytes, recv_bytes, send_offsets, recv_offsets;
  Bytes source;
  Bytes expected;
  const auto append = [](Bytes& to, const Bytes& from, int64_t gap) {
    to.insert(to.end(), static_cast<size_t>(gap), std::byte{0xee});
    to.insert(to.end(), from.begin(), from.end());
    return static_cast<int64_t>(to.size() - from.size());
  };
  for (int32_t peer = 0; peer < kNcclRanks; ++peer) {
    const auto own = static_cast<size_t>(rank);
    const auto other = static_cast<size_t>(peer);
    send_bytes.push_back(it.bytes[own][other]);
    recv_bytes.push_back(it.bytes[other][own]);
    send_offsets.push_back(append(source, letters(send_bytes.back(), rank, peer), it.send_gap));
    recv_offsets.push_back(append(expected, letters(recv_bytes.back(), peer, rank), it.recv_gap));
  }
  const OnDevice send(source);
  const OnDevice recv(Bytes(expected.size(), std::byte{0xee}));
  comm.all_to_all_v({.send = send.data(),
                     .send_bytes = send_bytes,
                     .send_offsets = send_offsets,
                     .recv = recv.data(),
                     .recv_bytes = recv_bytes,
                     .recv_offsets = recv_offsets,
                     .memory = MemoryKind::kDevice},
                    "exchange");
  EXPECT_EQ(recv.bytes() == expected, true)
      << it.bytes[0][1] << " and " << it.bytes[1][0] << " bytes, gaps " << it.send_gap << ", "
      << it.recv_gap;
}

class NcclWindows : public NcclTest {};

TEST_F(NcclWindows, MessagesOfEveryLength_ArriveWhole) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    constexpr int64_t kMostShortest = 8192 * comm::kMaxLanes;
    for (const int64_t bytes :
         {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{17}, int64_t{8191}, int64_t{8192},
          int64_t{8193}, kMostShortest - 1, kMostShortest, kMostShortest + 1}) {
      for (const int64_t gap : {0, 1, 4}) {
        check_exchange(rank, comm,
                       {.bytes = {{{3, bytes}, {bytes, 5}}}, .send_gap = gap, .recv_gap = 2 * gap});
      }
    }
  });
}

TEST_F(NcclWindows, AroundTheLengthOfASlot_NothingChanges) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    for (const int64_t bytes : {kSlot - 1, kSlot, kSlot + 1, 5 * kSlot + 77}) {
      check_exchange(rank, comm, {.bytes = {{{0, bytes}, {bytes, 0}}}});
      // One direction is short and the other is not, or is empty.
      check_exchange(rank, comm, {.bytes = {{{9, bytes}, {100, 9}}}, .send_gap = 3});
      check_exchange(rank, comm, {.bytes = {{{0, 0}, {bytes, 0}}}});
    }
    for (const int64_t count : {kSlot / 4 - 1, kSlot / 4, kSlot / 4 + 1, kSlot + 3}) {
      Bytes expected = values<float>(count, 1);
      const Bytes other = values<float>(count, 2);
      const OnDevice mine(rank == 0 ? expected : other);
      comm::reduce_into(expected.data(), other.data(), count * 4, DType::kF32, ReduceOp::kSum);
      const OnDevice sum(Bytes(expected.size(), std::byte{0x5a}));
      comm.all_reduce(mine.read(), sum.write(), DType::kF32, ReduceOp::kSum, "sum");
      EXPECT_EQ(sum.bytes() == expected, true) << count;
    }
  });
}

// Nothing waits between the rounds, ranks are late by turns, and every round has other bytes.
TEST_F(NcclWindows, AThousandRounds_KeepTheirBytesApart) {
  constexpr int kRounds = 1000;
  constexpr size_t kMost = 40000;
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const cuda::OwnedStream stream = cuda::make_stream();
    const Stream on = to_stream(stream.get());
    const OnDevice mine{Bytes(kMost)};
    const OnDevice all(Bytes(kMost * kNcclRanks));
    const OnDevice kept(Bytes(kRounds * kNcclRanks));
    for (int round = 0; round < kRounds; ++round) {
      const size_t bytes = 1 + static_cast<size_t>(round) * 7919 % (kMost - 1);
      if (round % 50 == rank * 25) std::this_thread::sleep_for(2ms);
      const int value = (round * 3 + rank * 101) % 251;
      cuda::check(cudaMemsetAsync(mine.data(), value, bytes, stream.get()), "cudaMemsetAsync");
      const ConstByteView from(std::span<const std::byte>(mine.data(), bytes), MemoryKind::kDevice);
      const ByteView to(std::span<std::byte>(all.data(), bytes * kNcclRanks), MemoryKind::kDevice);
      comm.wait_on(on, comm.begin_all_gather(from, to, on), 10s, "gather");
      for (size_t peer = 0; peer < kNcclRanks; ++peer) {
        // The last byte of each rank's.
        const size_t at = static_cast<size_t>(round) * kNcclRanks + peer;
        cuda::check(cudaMemcpyAsync(kept.data() + at, all.data() + bytes * (peer + 1) - 1, 1,
                                    cudaMemcpyDeviceToDevice, stream.get()),
                    "cudaMemcpyAsync");
      }
    }
    cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    comm.check("after the rounds");
    const Bytes found = kept.bytes();
    int wrong = 0;
    for (int round = 0; round < kRounds; ++round) {
      for (int peer = 0; peer < kNcclRanks; ++peer) {
        const auto expected = static_cast<std::byte>((round * 3 + peer * 101) % 251);
        wrong += found[static_cast<size_t>(round * kNcclRanks + peer)] != expected ? 1 : 0;
      }
    }
    EXPECT_EQ(wrong, 0);
    comm.barrier("both are done");
  });
}

// Operations of several kinds and lengths in a graph; between replays ranks are late by turns.
TEST_F(NcclWindows, AGraphOfMany_IsReplayedAThousandTimes) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const cuda::OwnedStream stream = cuda::make_stream();
    const Stream on = to_stream(stream.get());
    constexpr int64_t kCount = 30011;
    const OnDevice mine(values<int32_t>(kCount, static_cast<uint64_t>(rank) + 1));
    const OnDevice sum(Bytes(kCount * 4));
    const OnDevice all(Bytes(kCount * 4 * kNcclRanks));
    const cuda::OwnedGraph graph = cuda::capture(stream.get(), [&] {
      // The sum is the next replay's addend of rank 0.
      comm.wait_on(on,
                   comm.begin_all_reduce(mine.read(), sum.write(), DType::kI32, ReduceOp::kSum, on),
                   10s, "sum");
      comm.wait_on(on, comm.begin_all_gather(sum.read(), all.write(), on), 10s, "gather");
      comm.wait_on(on, comm.begin_barrier(on), 10s, "barrier");
      if (rank != 0) return;
      cuda::check(cudaMemcpyAsync(mine.data(), sum.data(), kCount * 4, cudaMemcpyDeviceToDevice,
                                  stream.get()),
                  "cudaMemcpyAsync");
    });
    constexpr int kReplays = 1000;
    for (int replay = 0; replay < kReplays; ++replay) {
      if (replay % 100 == rank * 50) std::this_thread::sleep_for(2ms);
      cuda::check(cudaGraphLaunch(graph.get(), stream.get()), "cudaGraphLaunch");
    }
    cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    comm.check("after the replays");
    Bytes expected = values<int32_t>(kCount, 1);
    const Bytes addend = values<int32_t>(kCount, 2);
    for (int replay = 0; replay < kReplays; ++replay) {
      comm::reduce_into(expected.data(), addend.data(), kCount * 4, DType::kI32, ReduceOp::kSum);
    }
    EXPECT_EQ(sum.bytes() == expected, true);
    expected.insert(expected.end(), expected.begin(), expected.begin() + kCount * 4);
    EXPECT_EQ(all.bytes() == expected, true);
    comm.barrier("both are done");
  });
}

TEST_F(NcclWindows, PartsOfRanks_AreAddedWhereTheyArrive) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    comm::OneLaunch* const able = comm::find_one_launch(&comm);
    if (able == nullptr) return;
    constexpr int64_t kFits = kSlot / 4;
    using Counts = std::array<int64_t, kNcclRanks>;
    for (const Counts& counts : {Counts{5, 7}, Counts{0, 3}, Counts{0, 0}, Counts{kFits, 1},
                                 Counts{1, kFits + 5}, Counts{3 * kFits, 5 * kFits + 1}}) {
      const int64_t together = counts[0] + counts[1];
      const Bytes first = values<float>(together, 1);
      const Bytes second = values<float>(together, 2);
      const std::array<int64_t, kNcclRanks> bytes = {counts[0] * 4, counts[1] * 4};
      const std::array<int64_t, kNcclRanks> offsets = {0, counts[0] * 4};
      Bytes sums = first;
      comm::reduce_into(sums.data(), second.data(), together * 4, DType::kF32, ReduceOp::kSum);
      const auto own = static_cast<size_t>(rank);
      const auto begin = sums.begin() + offsets[own];
      const Bytes expected(begin, begin + bytes[own]);
      const OnDevice parts(rank == 0 ? first : second);
      const OnDevice out(Bytes(expected.size(), std::byte{0x5a}));
      const cuda::OwnedStream stream = cuda::make_stream();
      const Stream on = to_stream(stream.get());
      const CommHandle handle = able->begin_sum_of_parts(
          {.parts = parts.data(), .bytes = bytes, .offsets = offsets, .out = out.data()}, on);
      comm.wait_on(on, handle, 10s, "sums");
      cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
      comm.check("after the sums");
      EXPECT_EQ(out.bytes() == expected, true) << counts[0] << " and " << counts[1];
    }
  });
}

// A rank that means something else brings nothing that this rank could take for its result.
TEST_F(NcclWindows, RanksThatDisagree_LeaveTheResultAlone) {
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const bool by_windows = comm::find_one_launch(&comm) != nullptr;
    const auto bytes = static_cast<size_t>(rank == 0 ? 20000 : 30000);
    const OnDevice mine(Bytes(bytes, std::byte{1}));
    const Bytes before(bytes * kNcclRanks, std::byte{0x5a});
    const OnDevice all(before);
    const cuda::OwnedStream stream = cuda::make_stream();
    const Stream on = to_stream(stream.get());
    const CommHandle handle = comm.begin_all_gather(mine.read(), all.write(), on);
    comm.wait_on(on, handle, 500ms, "gather");
    EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
    try {
      for (int look = 0; look < 3000; ++look) {
        comm.check("later");
        std::this_thread::sleep_for(1ms);
      }
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(to_string(error.code()), to_string(ErrorCode::kCommMismatch)) << error.what();
      EXPECT_EQ(error.peer(), 1 - rank);
    }
    Bytes found = all.bytes();
    // Its own bytes may be there.
    const auto own = static_cast<std::ptrdiff_t>(bytes) * rank;
    std::fill_n(found.begin() + own, bytes, std::byte{0x5a});
    EXPECT_TRUE(!by_windows || found == before);
  });
}

// Graphs that wait for a rank which has died, or is late, end, and so do those that come after.
TEST_F(NcclWindows, AGraphWhosePeerHasFailed_Ends) {
  std::atomic<int> over = 0;
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const cuda::OwnedStream stream = cuda::make_stream();
    const Stream on = to_stream(stream.get());
    const OnDevice mine{Bytes(100000)};
    const OnDevice all(Bytes(100000 * kNcclRanks));
    {
      const cuda::OwnedGraph graph = cuda::capture(stream.get(), [&] {
        for (int i = 0; i < 3; ++i) {
          comm.wait_on(on, comm.begin_all_gather(mine.read(), all.write(), on), 300ms, "gather");
        }
      });
      EXPECT_EQ(cudaGraphLaunch(graph.get(), stream.get()), cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
      comm.check("both came");
      if (rank == 1) {
        while (over == 0) std::this_thread::sleep_for(1ms);
      } else {
        EXPECT_EQ(cudaGraphLaunch(graph.get(), stream.get()), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
        std::this_thread::sleep_for(100ms);
        EXPECT_THROW(comm.check("later"), CommError);
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      }
    }
    over = 1;
  });
}

}  // namespace
}  // namespace conclave
