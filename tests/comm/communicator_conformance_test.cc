// Checks what every communicator must do. Ranks may be processes: a body shares nothing with those
// of other ranks.
#include "support/rank_groups.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using testing::on_every_group;

std::span<const std::byte> bytes_of(const auto& value) {
  return std::as_bytes(std::span(&value, 1));
}
std::span<std::byte> writable(auto& value) { return std::as_writable_bytes(std::span(&value, 1)); }
template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}
template <class T>
std::span<std::byte> writable(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

TEST(Communicator, AllGather_OrdersBlocksByRank) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const std::vector<int32_t> mine = {rank, rank * 10, -rank};
    std::vector<int32_t> all(static_cast<size_t>(comm.size()) * 3, -99);
    comm.all_gather(bytes_of(mine), writable(all), "gather");
    for (int32_t peer = 0; peer < comm.size(); ++peer) {
      const auto at = static_cast<size_t>(peer) * 3;
      EXPECT_EQ(all[at], peer);
      EXPECT_EQ(all[at + 1], peer * 10);
      EXPECT_EQ(all[at + 2], -peer);
    }
  });
}

TEST(Communicator, AllToAllV_MovesUnevenBlocks) {
  on_every_group([](int32_t rank, Communicator& comm) {
    // Rank a sends (a * 3 + b) % 5 bytes to rank b, with gaps between the blocks.
    const auto ranks = static_cast<size_t>(comm.size());
    const auto count = [](int32_t from, int32_t to) { return int64_t{(from * 3 + to) % 5}; };
    std::vector<int64_t> send_bytes(ranks);
    std::vector<int64_t> recv_bytes(ranks);
    std::vector<int64_t> offsets(ranks);
    std::vector<uint8_t> send(ranks * 8);
    std::vector<uint8_t> recv(ranks * 8, 0xee);
    for (size_t peer = 0; peer < ranks; ++peer) {
      send_bytes[peer] = count(rank, static_cast<int32_t>(peer));
      recv_bytes[peer] = count(static_cast<int32_t>(peer), rank);
      offsets[peer] = static_cast<int64_t>(peer) * 8;
      for (size_t i = 0; i < 8; ++i) {
        send[peer * 8 + i] = static_cast<uint8_t>(rank * 64 + static_cast<int>(peer * 8 + i));
      }
    }
    comm.all_to_all_v({.send = bytes_of(send).data(),
                       .send_bytes = send_bytes,
                       .send_offsets = offsets,
                       .recv = writable(recv).data(),
                       .recv_bytes = recv_bytes,
                       .recv_offsets = offsets},
                      "exchange");
    for (size_t peer = 0; peer < ranks; ++peer) {
      for (size_t i = 0; i < 8; ++i) {
        const bool sent = static_cast<int64_t>(i) < recv_bytes[peer];
        const auto expected =
            static_cast<uint8_t>(static_cast<int>(peer) * 64 + rank * 8 + static_cast<int>(i));
        EXPECT_EQ(recv[peer * 8 + i], sent ? expected : 0xee);
      }
    }
  });
}

TEST(Communicator, AllReduce_AddsInRankOrder) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const auto value = [](int32_t r, size_t i) {
      return static_cast<float>(r + 1) * 0.1F + static_cast<float>(i) * 1e7F;
    };
    std::vector<float> mine(100);
    std::vector<float> sum(100);
    for (size_t i = 0; i < mine.size(); ++i) mine[i] = value(rank, i);
    comm.all_reduce(bytes_of(mine), writable(sum), DType::kF32, ReduceOp::kSum, "sum");
    for (size_t i = 0; i < mine.size(); ++i) {
      float expected = value(0, i);
      for (int32_t r = 1; r < comm.size(); ++r) expected += value(r, i);
      EXPECT_EQ(sum[i], expected) << i;
    }
  });
}

TEST(Communicator, AllReduceMax_TakesTheLargestOfEveryType) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const auto check = [&](auto zero, DType dtype) {
      using T = decltype(zero);
      const std::vector<T> mine = {static_cast<T>(rank), static_cast<T>(-rank)};
      std::vector<T> largest(2);
      comm.all_reduce(bytes_of(mine), writable(largest), dtype, ReduceOp::kMax, "max");
      EXPECT_EQ(largest[0], static_cast<T>(comm.size() - 1));
      EXPECT_EQ(largest[1], static_cast<T>(0));
    };
    check(float{}, DType::kF32);
    check(double{}, DType::kF64);
    check(int32_t{}, DType::kI32);
    check(int64_t{}, DType::kI64);
  });
}

TEST(Communicator, ReduceScatter_GivesEachRankItsBlock) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const int32_t ranks = comm.size();
    std::vector<int64_t> mine(static_cast<size_t>(ranks) * 2);
    for (size_t i = 0; i < mine.size(); ++i) mine[i] = (rank + 1) * 100 + static_cast<int64_t>(i);
    std::vector<int64_t> block(2);
    comm.reduce_scatter(bytes_of(mine), writable(block), DType::kI64, ReduceOp::kSum, "scatter");
    const int64_t hundreds = 100 * ranks * (ranks + 1) / 2;
    EXPECT_EQ(block[0], hundreds + ranks * (rank * 2));
    EXPECT_EQ(block[1], hundreds + ranks * (rank * 2 + 1));
  });
}

TEST(Communicator, Messages_ArriveInOrderAroundTheRing) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const int32_t next = (rank + 1) % comm.size();
    const int32_t previous = (rank + comm.size() - 1) % comm.size();
    for (int32_t round = 0; round < 5; ++round) {
      const std::vector<int32_t> first = {rank, round};
      const std::vector<int32_t> second = {rank, round, -1};
      std::vector<int32_t> got_first(2);
      std::vector<int32_t> got_second(3);
      const CommHandle a = comm.begin_send(next, bytes_of(first));
      const CommHandle b = comm.begin_send(next, bytes_of(second));
      comm.recv(previous, writable(got_first), "first");
      comm.recv(previous, writable(got_second), "second");
      comm.wait(b, comm.timeout(), "sent second");
      comm.wait(a, comm.timeout(), "sent first");
      EXPECT_EQ(got_first, (std::vector<int32_t>{previous, round}));
      EXPECT_EQ(got_second, (std::vector<int32_t>{previous, round, -1}));
    }
  });
}

TEST(Communicator, OverlappingOperations_MayBeWaitedForInAnyOrder) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const std::vector<int32_t> a = {rank};
    const std::vector<int32_t> b = {rank + 100};
    std::vector<int32_t> all_a(static_cast<size_t>(comm.size()));
    std::vector<int32_t> sum_b(1);
    const CommHandle gather = comm.begin_all_gather(bytes_of(a), writable(all_a));
    const CommHandle reduce =
        comm.begin_all_reduce(bytes_of(b), writable(sum_b), DType::kI32, ReduceOp::kSum);
    const CommHandle barrier = comm.begin_barrier();
    // Odd ranks wait in the other order: each wait must serve all operations under way.
    if (rank % 2 == 0) {
      comm.wait(gather, comm.timeout(), "gather");
      comm.wait(reduce, comm.timeout(), "reduce");
      comm.wait(barrier, comm.timeout(), "barrier");
    } else {
      comm.wait(barrier, comm.timeout(), "barrier");
      comm.wait(reduce, comm.timeout(), "reduce");
      comm.wait(gather, comm.timeout(), "gather");
    }
    for (int32_t peer = 0; peer < comm.size(); ++peer) {
      EXPECT_EQ(all_a[static_cast<size_t>(peer)], peer);
    }
    EXPECT_EQ(sum_b[0], 100 * comm.size() + comm.size() * (comm.size() - 1) / 2);
  });
}

TEST(Communicator, EmptyBuffers_AreLegal) {
  on_every_group([](int32_t, Communicator& comm) {
    comm.all_gather({}, {}, "nothing");
    comm.all_reduce({}, {}, DType::kF32, ReduceOp::kSum, "nothing");
    const std::vector<int64_t> zeros(static_cast<size_t>(comm.size()), 0);
    comm.all_to_all_v({nullptr, zeros, zeros, nullptr, zeros, zeros}, "nothing");
  });
}

// The clock is one for all ranks of a host.
TEST(Communicator, Barrier_HoldsEveryRankUntilTheLast) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
    for (int32_t late = 0; late < comm.size(); ++late) {
      if (rank == late) std::this_thread::sleep_for(20ms);
      const int64_t entered = now();
      comm.barrier("enter");
      const int64_t left = now();
      int64_t last_entered = 0;
      comm.all_reduce(bytes_of(entered), writable(last_entered), DType::kI64, ReduceOp::kMax,
                      "compare");
      EXPECT_GE(left, last_entered);
    }
  });
}

// Lengths below and above what travels with an announcement, and those of several chunks.
TEST(Communicator, BuffersOfAnyLength_ArriveWhole) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const int32_t ranks = comm.size();
    const auto value = [](int32_t r, size_t i) { return r * 1'000'000 + static_cast<int32_t>(i); };
    for (const size_t length : {1U, 127U, 128U, 129U, 1000U, 65535U, 65536U, 65537U, 300001U}) {
      std::vector<int32_t> mine(length);
      for (size_t i = 0; i < length; ++i) mine[i] = value(rank, i);
      std::vector<int32_t> all(length * static_cast<size_t>(ranks));
      comm.all_gather(bytes_of(mine), writable(all), "gather");
      std::vector<int32_t> sum(length);
      comm.all_reduce(bytes_of(mine), writable(sum), DType::kI32, ReduceOp::kSum, "reduce");
      std::vector<int32_t> block(length);
      comm.reduce_scatter(bytes_of(all), writable(block), DType::kI32, ReduceOp::kSum, "scatter");
      std::vector<int32_t> got(length);
      const CommHandle sent = comm.begin_send((rank + 1) % ranks, bytes_of(mine));
      const int32_t previous = (rank + ranks - 1) % ranks;
      comm.recv(previous, writable(got), "ring");
      comm.wait(sent, comm.timeout(), "ring");
      int64_t wrong = 0;
      for (size_t i = 0; i < length; ++i) {
        int32_t expected = 0;
        for (int32_t r = 0; r < ranks; ++r) {
          expected += value(r, i);
          wrong += all[static_cast<size_t>(r) * length + i] != value(r, i);
        }
        wrong += sum[i] != expected;
        wrong += block[i] != ranks * value(rank, i);
        wrong += got[i] != value(previous, i);
      }
      EXPECT_EQ(wrong, 0) << length;
    }
  });
}

// Floating sums differ in another order: each element is added up as rank 0 + 1 + 2 ...
TEST(Communicator, LongAllReduce_AddsInRankOrder) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const auto value = [](int32_t r, size_t i) {
      return static_cast<float>(r + 1) * 0.1F + static_cast<float>(i % 977) * 1e5F;
    };
    std::vector<float> mine(100'003);
    std::vector<float> sum(mine.size());
    for (size_t i = 0; i < mine.size(); ++i) mine[i] = value(rank, i);
    comm.all_reduce(bytes_of(mine), writable(sum), DType::kF32, ReduceOp::kSum, "sum");
    int64_t wrong = 0;
    for (size_t i = 0; i < mine.size(); ++i) {
      float expected = value(0, i);
      for (int32_t r = 1; r < comm.size(); ++r) expected += value(r, i);
      wrong += sum[i] != expected;
    }
    EXPECT_EQ(wrong, 0);
  });
}

// A rank that is ahead begins operations which its peers have not heard of.
TEST(Communicator, RankFarAhead_IsCaughtUpWith) {
  on_every_group([](int32_t rank, Communicator& comm) {
    constexpr size_t kAhead = 40;
    std::vector<int32_t> mine(kAhead);
    std::vector<std::vector<int32_t>> all(kAhead,
                                          std::vector<int32_t>(static_cast<size_t>(comm.size())));
    std::vector<CommHandle> handles;
    if (rank != 0) std::this_thread::sleep_for(50ms);
    for (size_t i = 0; i < kAhead; ++i) {
      mine[i] = rank * 1000 + static_cast<int32_t>(i);
      handles.push_back(comm.begin_all_gather(bytes_of(mine[i]), writable(all[i])));
    }
    for (const CommHandle handle : handles) comm.wait(handle, comm.timeout(), "gather");
    for (size_t i = 0; i < kAhead; ++i) {
      for (int32_t peer = 0; peer < comm.size(); ++peer) {
        EXPECT_EQ(all[i][static_cast<size_t>(peer)], peer * 1000 + static_cast<int32_t>(i));
      }
    }
  });
}

TEST(Communicator, SizeThatOneRankDoesNotExpect_IsAMismatchOnEveryRank) {
  on_every_group([](int32_t rank, Communicator& comm) {
    if (comm.size() == 1) return;
    const std::vector<std::byte> mine(rank == comm.size() - 1 ? 24 : 8);
    std::vector<std::byte> all(mine.size() * static_cast<size_t>(comm.size()));
    try {
      comm.all_gather(mine, all, "step");
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(to_string(error.code()), "kCommMismatch") << error.what();
      EXPECT_EQ(error.phase(), "step");
    }
    EXPECT_THROW(comm.barrier("later"), CommError);
  });
}

TEST(Communicator, Abort_ReachesEveryRankWithTheReason) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const int32_t last = comm.size() - 1;
    if (rank == last) {
      std::this_thread::sleep_for(20ms);
      // As a watchdog would.
      std::thread([&] { comm.abort("the operator asked for it"); }).join();
    }
    try {
      // The other ranks wait for the last one.
      if (rank != last || comm.size() == 1) comm.barrier("step");
      if (rank == last) comm.check("step");
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(to_string(error.code()), "kCommAborted") << error.what();
      EXPECT_EQ(error.peer(), last);
      EXPECT_NE(std::string(error.what()).find("the operator asked for it"), std::string::npos);
    }
  });
}

TEST(Communicator, SurvivorsOfAGroupThatWorks_AreAllOfIt) {
  on_every_group([](int32_t rank, Communicator& comm) {
    if (!comm.supports(CommFeature::kShrink)) {
      EXPECT_THROW(survivors(comm), Error);
      return;
    }
    // A peer may be through, and call for the survivors, before this rank has read that it came.
    comm.barrier("before");
    const Survivors first = survivors(comm);
    Communicator& left = *first.communicator;
    ASSERT_EQ(left.size(), comm.size());
    EXPECT_EQ(left.rank(), rank);
    EXPECT_EQ(left.timeout(), comm.timeout());
    const std::vector<uint8_t> mine(300'000, static_cast<uint8_t>(rank));
    std::vector<uint8_t> all(mine.size() * static_cast<size_t>(left.size()));
    left.all_gather(bytes_of(mine), writable(all), "after");
    for (int32_t peer = 0; peer < left.size(); ++peer) {
      EXPECT_EQ(first.old_ranks[static_cast<size_t>(peer)], peer);
      EXPECT_EQ(all[static_cast<size_t>(peer) * mine.size()], peer);
      EXPECT_EQ(all[static_cast<size_t>(peer + 1) * mine.size() - 1], peer);
    }
    EXPECT_THROW(comm.barrier("the old one stays unusable"), CommError);
    // The new one is a communicator like any other.
    EXPECT_EQ(survivors(left).old_ranks, first.old_ranks);
  });
}

// A rank that has returned from its last operation owes its peers nothing.
TEST(Communicator, RankThatIsDone_MayLeaveBeforeItsPeers) {
  for (int round = 0; round < 20; ++round) {
    on_every_group([&](int32_t rank, Communicator& comm) {
      const std::vector<std::byte> mine(100'000, std::byte{3});
      std::vector<std::byte> all(mine.size() * static_cast<size_t>(comm.size()));
      if (rank == round % comm.size()) std::this_thread::sleep_for(1ms);
      comm.all_gather(mine, all, "last");
      EXPECT_EQ(all.back(), std::byte{3});
    });
  }
}

TEST(Communicator, ManyRandomSteps_StayConsistent) {
  on_every_group([](int32_t rank, Communicator& comm) {
    const auto ranks = static_cast<size_t>(comm.size());
    std::mt19937 shared(42);  // the same sequence on every rank
    std::vector<int64_t> send_bytes(ranks);
    std::vector<int64_t> recv_bytes(ranks);
    std::vector<int64_t> offsets(ranks);
    std::vector<uint8_t> send(ranks * 64);
    std::vector<uint8_t> recv(ranks * 64);
    for (size_t peer = 0; peer < ranks; ++peer) offsets[peer] = static_cast<int64_t>(peer) * 64;
    for (int step = 0; step < 300; ++step) {
      std::vector<int64_t> counts(ranks * ranks);
      for (int64_t& count : counts) count = static_cast<int64_t>(shared() % 65);
      if (shared() % 4 == 0) std::fill(counts.begin(), counts.end(), 0);
      for (size_t peer = 0; peer < ranks; ++peer) {
        send_bytes[peer] = counts[static_cast<size_t>(rank) * ranks + peer];
        recv_bytes[peer] = counts[peer * ranks + static_cast<size_t>(rank)];
      }
      std::fill(send.begin(), send.end(), static_cast<uint8_t>(rank + step));
      comm.all_to_all_v(
          {bytes_of(send).data(), send_bytes, offsets, writable(recv).data(), recv_bytes, offsets},
          "step");
      for (size_t peer = 0; peer < ranks; ++peer) {
        for (int64_t i = 0; i < recv_bytes[peer]; ++i) {
          ASSERT_EQ(recv[peer * 64 + static_cast<size_t>(i)],
                    static_cast<uint8_t>(static_cast<int>(peer) + step));
        }
      }
    }
  });
}

// Calls of a rank move a piece or two of what is on its way: three of them are not enough.
TEST(Communicator, InBackground_BytesMoveWhileNobodyCalls) {
  on_every_group([](int32_t rank, Communicator& comm) {
    if (comm.size() > 3) return;
    ASSERT_TRUE(comm.supports(CommFeature::kOverlap)) << comm.name();
    constexpr int64_t kBytes = int64_t{2} << 20;
    const auto ranks = static_cast<size_t>(comm.size());
    const std::vector<int64_t> counts(ranks, kBytes);
    std::vector<int64_t> offsets(ranks);
    for (size_t peer = 0; peer < ranks; ++peer) offsets[peer] = static_cast<int64_t>(peer) * kBytes;
    const std::vector<int64_t> none(ranks, 0);
    const std::vector<std::byte> send(kBytes, static_cast<std::byte>(rank + 1));
    std::vector<std::byte> recv(static_cast<size_t>(kBytes) * ranks);
    const CommHandle handle = comm.begin({.kind = CommKind::kAllToAllV,
                                          .exchange = {.send = send.data(),
                                                       .send_bytes = counts,
                                                       .send_offsets = none,
                                                       .recv = recv.data(),
                                                       .recv_bytes = counts,
                                                       .recv_offsets = offsets},
                                          .in_background = true});
    bool is_complete = false;
    for (const auto rest : {50ms, 500ms, 4000ms}) {
      if (is_complete) break;
      std::this_thread::sleep_for(rest);
      is_complete = comm.test(handle, "round");
    }
    EXPECT_TRUE(is_complete) << comm.name();
    comm.wait(handle, comm.timeout(), "round");
    for (size_t peer = 0; peer < ranks; ++peer) {
      const auto mine = std::span(recv).subspan(peer * kBytes, kBytes);
      const std::vector<std::byte> expected(kBytes, static_cast<std::byte>(peer + 1));
      EXPECT_EQ(std::memcmp(mine.data(), expected.data(), expected.size()), 0);
    }
  });
}

}  // namespace
}  // namespace conclave
