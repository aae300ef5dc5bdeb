// Operations of "local" complete without a call of wait: the last rank that begins moves what all
// were waiting for. One thread plays every rank here, so that nobody else could. Over other
// transports those in the background do.
#include "support/thread_groups.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ns;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

using Group = std::vector<std::unique_ptr<Communicator>>;

Group group_of(int32_t ranks) { return make_local_group({.num_ranks = ranks, .timeout = 20s}); }

// The buffers of one rank for an all-to-all of one int32 per pair of ranks.
struct Pairs {
  Pairs(int32_t rank, int32_t ranks)
      : send(static_cast<size_t>(ranks)),
        recv(static_cast<size_t>(ranks), -1),
        bytes(static_cast<size_t>(ranks), sizeof(int32_t)),
        offsets(static_cast<size_t>(ranks)) {
    for (int32_t peer = 0; peer < ranks; ++peer) {
      const auto at = static_cast<size_t>(peer);
      send[at] = rank * 100 + peer;
      offsets[at] = int64_t{peer} * static_cast<int64_t>(sizeof(int32_t));
    }
  }
  AllToAllV exchange() {
    return {.send = std::as_bytes(std::span(send)).data(),
            .send_bytes = bytes,
            .send_offsets = offsets,
            .recv = std::as_writable_bytes(std::span(recv)).data(),
            .recv_bytes = bytes,
            .recv_offsets = offsets};
  }
  std::vector<int32_t> send, recv;
  std::vector<int64_t> bytes, offsets;
};

TEST(Overlap, AllToAllBegunByAll_IsCompleteBeforeAnyoneWaits) {
  for (const int32_t ranks : {1, 2, 3, 8}) {
    SCOPED_TRACE(ranks);
    const Group group = group_of(ranks);
    std::vector<Pairs> pairs;
    for (int32_t rank = 0; rank < ranks; ++rank) pairs.emplace_back(rank, ranks);
    std::vector<CommHandle> handles;
    for (size_t rank = 0; rank < group.size(); ++rank) {
      if (rank > 0) {
        EXPECT_FALSE(group[0]->test(handles[0], "step")) << "before rank " << rank << " began";
      }
      handles.push_back(group[rank]->begin_all_to_all_v(pairs[rank].exchange()));
    }
    for (size_t rank = 0; rank < group.size(); ++rank) {
      EXPECT_TRUE(group[rank]->test(handles[rank], "step")) << "rank " << rank;
      group[rank]->wait(handles[rank], 0ns, "step");
      for (int32_t peer = 0; peer < ranks; ++peer) {
        EXPECT_EQ(pairs[rank].recv[static_cast<size_t>(peer)],
                  peer * 100 + static_cast<int32_t>(rank));
      }
    }
  }
}

TEST(Overlap, EveryKindOfOperation_CompletesWithTheLastBegin) {
  const Group group = group_of(3);
  std::vector<std::vector<int64_t>> mine = {{1, 2, 3}, {10, 20, 30}, {100, 200, 300}};
  std::vector<std::vector<int64_t>> sums(3, std::vector<int64_t>(3));
  std::vector<std::vector<int64_t>> blocks(3, std::vector<int64_t>(1));
  std::vector<std::vector<int64_t>> all(3, std::vector<int64_t>(9));
  std::vector<std::vector<CommHandle>> handles(3);
  for (size_t rank = 0; rank < 3; ++rank) {
    const auto send = std::as_bytes(std::span(mine[rank]));
    const auto out = [&](std::vector<std::vector<int64_t>>& to) {
      return std::as_writable_bytes(std::span(to[rank]));
    };
    Communicator& comm = *group[rank];
    handles[rank] = {comm.begin_all_reduce(send, out(sums), DType::kI64, ReduceOp::kSum),
                     comm.begin_reduce_scatter(send, out(blocks), DType::kI64, ReduceOp::kSum),
                     comm.begin_all_gather(send, out(all)), comm.begin_barrier()};
  }
  for (size_t rank = 0; rank < 3; ++rank) {
    for (const CommHandle handle : handles[rank]) {
      EXPECT_TRUE(group[rank]->test(handle, "step"));
      group[rank]->wait(handle, 0ns, "step");
    }
    EXPECT_EQ(sums[rank], (std::vector<int64_t>{111, 222, 333}));
    EXPECT_EQ(blocks[rank][0], sums[rank][rank]);
    EXPECT_EQ(all[rank], (std::vector<int64_t>{1, 2, 3, 10, 20, 30, 100, 200, 300}));
  }
}

TEST(Overlap, MessageBegunOnBothSides_IsThereWhicheverSideWasLast) {
  for (const bool send_first : {true, false}) {
    const Group group = group_of(2);
    const std::vector<std::byte> sent(8, std::byte{7});
    std::vector<std::byte> got(8);
    CommHandle send;
    if (send_first) send = group[0]->begin_send(1, sent);
    const CommHandle recv = group[1]->begin_recv(0, got);
    if (!send_first) send = group[0]->begin_send(1, sent);
    EXPECT_TRUE(group[0]->test(send, "step"));
    EXPECT_TRUE(group[1]->test(recv, "step"));
    group[0]->wait(send, 0ns, "step");
    group[1]->wait(recv, 0ns, "step");
    EXPECT_EQ(got, sent);
  }
}

TEST(Overlap, SeveralExchangesUnderWay_AreKeptApart) {
  const Group group = group_of(2);
  std::vector<Pairs> first = {{0, 2}, {1, 2}};
  std::vector<Pairs> second = {{10, 2}, {11, 2}};
  const CommHandle a0 = group[0]->begin_all_to_all_v(first[0].exchange());
  const CommHandle b0 = group[0]->begin_all_to_all_v(second[0].exchange());
  const CommHandle a1 = group[1]->begin_all_to_all_v(first[1].exchange());
  EXPECT_TRUE(group[0]->test(a0, "first"));
  EXPECT_FALSE(group[0]->test(b0, "second"));
  const CommHandle b1 = group[1]->begin_all_to_all_v(second[1].exchange());
  group[0]->wait(b0, 0ns, "second");
  group[1]->wait(b1, 0ns, "second");
  group[0]->wait(a0, 0ns, "first");
  group[1]->wait(a1, 0ns, "first");
  EXPECT_EQ(first[0].recv, (std::vector<int32_t>{0, 100}));
  EXPECT_EQ(second[0].recv, (std::vector<int32_t>{1000, 1100}));
  EXPECT_EQ(second[1].recv, (std::vector<int32_t>{1001, 1101}));
}

// Each rank is a thread here that begins, computes, and finds its result when it is done.
TEST(Overlap, RanksThatCompute_FindTheExchangeDone) {
  constexpr int32_t kRanks = 4;
  for (int round = 0; round < 50; ++round) {
    std::atomic<int32_t> begun{0};
    const auto outcomes =
        testing::run_ranks(group_of(kRanks), [&](int32_t rank, Communicator& comm) {
          Pairs pairs(rank, kRanks);
          const CommHandle handle = comm.begin_all_to_all_v(pairs.exchange());
          ++begun;
          while (begun.load() < kRanks) std::this_thread::yield();
          // A peer may still be moving the last bytes, but nobody is in wait.
          while (!comm.test(handle, "step")) std::this_thread::yield();
          comm.wait(handle, 0ns, "step");
          for (int32_t peer = 0; peer < kRanks; ++peer) {
            EXPECT_EQ(pairs.recv[static_cast<size_t>(peer)], peer * 100 + rank);
          }
        });
    ASSERT_EQ(testing::first_failure(outcomes), "");
  }
}

TEST(Overlap, Test_ThrowsWhatWaitWouldThrow) {
  const auto expect = [](ErrorCode code, int32_t peer, Communicator& comm, CommHandle handle) {
    try {
      comm.test(handle, "step");
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
      EXPECT_EQ(error.peer(), peer);
      EXPECT_EQ(error.phase(), "step");
    }
  };
  {
    Group group = group_of(2);
    const CommHandle handle = group[0]->begin_barrier();
    group[1].reset();
    expect(ErrorCode::kCommPeerLost, 1, *group[0], handle);
    expect(ErrorCode::kCommPeerLost, 1, *group[0], handle);
  }
  {
    const Group group = group_of(2);
    const CommHandle handle = group[0]->begin_barrier();
    group[1]->abort("the operator asked for it");
    expect(ErrorCode::kCommAborted, 1, *group[0], handle);
  }
  {
    const Group group = group_of(2);
    std::vector<std::byte> data(8);
    std::vector<std::byte> all(16);
    const CommHandle barrier = group[0]->begin_barrier();
    const CommHandle gather = group[1]->begin_all_gather(data, all);
    expect(ErrorCode::kCommMismatch, 1, *group[0], barrier);
    expect(ErrorCode::kCommMismatch, 0, *group[1], gather);
  }
  {
    const Group group = group_of(1);
    EXPECT_THROW(group[0]->test({77}, "step"), Error);
  }
}

// A rank that gives up while peers move its bytes must not free them before the move is over.
TEST(Overlap, RankThatLeavesAfterBegin_IsNotReadAfterwards) {
  for (int round = 0; round < 200; ++round) {
    testing::run_ranks(group_of(3), [&](int32_t rank, Communicator& comm) {
      const auto send = std::make_unique<std::vector<std::byte>>(1 << 14);
      const auto recv = std::make_unique<std::vector<std::byte>>(3 << 14);
      const CommHandle handle = comm.begin_all_gather(*send, *recv);
      if (rank == round % 3) {
        try {
          comm.wait(handle, 0ns, "step");
        } catch (const CommError&) {
          return;
        }
      } else {
        comm.wait(handle, 20s, "step");
      }
    });
  }
}

// An exchange of `bytes` bytes with each peer, in the background.
struct Blocks {
  Blocks(int32_t ranks, int64_t bytes)
      : send(static_cast<size_t>(bytes), std::byte{7}),
        recv(static_cast<size_t>(bytes * ranks)),
        counts(static_cast<size_t>(ranks), bytes),
        none(static_cast<size_t>(ranks)) {
    for (int32_t peer = 0; peer < ranks; ++peer) offsets.push_back(peer * bytes);
  }
  CommHandle begin(Communicator& comm) const {
    return comm.begin({.kind = CommKind::kAllToAllV,
                       .exchange = {.send = send.data(),
                                    .send_bytes = counts,
                                    .send_offsets = none,
                                    .recv = const_cast<std::byte*>(recv.data()),
                                    .recv_bytes = counts,
                                    .recv_offsets = offsets},
                       .in_background = true});
  }
  std::vector<std::byte> send, recv;
  std::vector<int64_t> counts, none, offsets;
};
constexpr int64_t kLong = int64_t{2} << 20;

// What a rank that calls nothing owes to its peers gets there.
TEST(Background, PeersOfARankThatDoesNotCall_HaveItsBytes) {
  for (const testing::ThreadGroups& row : testing::kThreadGroups) {
    SCOPED_TRACE(std::string(row.name));
    std::atomic<int> done{0};
    const auto outcomes = testing::run_ranks(
        row.make({.num_ranks = 3, .timeout = 20s}), [&](int32_t rank, Communicator& comm) {
          const Blocks blocks(3, kLong);
          const CommHandle handle = blocks.begin(comm);
          const auto until = std::chrono::steady_clock::now() + 20s;
          while (rank == 0 && done < 2 && std::chrono::steady_clock::now() < until) {
            std::this_thread::sleep_for(1ms);
          }
          EXPECT_TRUE(rank != 0 || done == 2);
          comm.wait(handle, comm.timeout(), "step");
          ++done;
          EXPECT_EQ(blocks.recv, std::vector<std::byte>(blocks.recv.size(), std::byte{7}));
        });
    EXPECT_EQ(testing::first_failure(outcomes), "");
  }
}

// A rank that only receives takes what comes, too: its peers wait for no call of it.
TEST(Background, PeersOfARankThatOnlyReceives_AreDone) {
  constexpr int64_t kMore = 8 * kLong;
  for (const testing::ThreadGroups& row : testing::kThreadGroups) {
    SCOPED_TRACE(std::string(row.name));
    std::atomic<bool> is_sent{false};
    const auto outcomes = testing::run_ranks(
        row.make({.num_ranks = 2, .timeout = 20s}), [&](int32_t rank, Communicator& comm) {
          Blocks blocks(2, kMore);
          std::vector<int64_t> send_bytes = {rank == 0 ? 0 : kMore, 0};
          std::vector<int64_t> recv_bytes = {0, rank == 0 ? kMore : 0};
          const CommHandle handle = comm.begin({.kind = CommKind::kAllToAllV,
                                                .exchange = {.send = blocks.send.data(),
                                                             .send_bytes = send_bytes,
                                                             .send_offsets = blocks.none,
                                                             .recv = blocks.recv.data(),
                                                             .recv_bytes = recv_bytes,
                                                             .recv_offsets = blocks.none},
                                                .in_background = true});
          const auto until = std::chrono::steady_clock::now() + 15s;
          while (rank == 0 && !is_sent && std::chrono::steady_clock::now() < until) {
            std::this_thread::sleep_for(1ms);
          }
          EXPECT_TRUE(rank == 1 || is_sent) << "the sender waits for a call of the receiver";
          comm.wait(handle, comm.timeout(), "step");
          if (rank == 1) is_sent = true;
          EXPECT_TRUE(rank == 1 || blocks.recv[static_cast<size_t>(kMore) - 1] == std::byte{7});
        });
    EXPECT_EQ(testing::first_failure(outcomes), "");
  }
}

// Whoever meets the disagreement first, a thread in the background or a wait, says the same.
TEST(Background, RanksThatDisagree_HearHowInTheirWaits) {
  for (const testing::ThreadGroups& row : testing::kThreadGroups) {
    for (const auto rest : {0ms, 60ms}) {
      SCOPED_TRACE(std::string(row.name));
      const auto outcomes = testing::run_ranks(
          row.make({.num_ranks = 2, .timeout = 20s}), [&](int32_t rank, Communicator& comm) {
            const Blocks blocks(2, rank == 0 ? kLong : kLong + 1);
            const CommHandle handle = blocks.begin(comm);
            std::this_thread::sleep_for(rest);
            comm.wait(handle, comm.timeout(), "step");
          });
      for (size_t rank = 0; rank < 2; ++rank) {
        ASSERT_TRUE(outcomes[rank].code);
        EXPECT_EQ(*outcomes[rank].code, ErrorCode::kCommMismatch) << outcomes[rank].message;
        EXPECT_EQ(outcomes[rank].phase, "step");
        EXPECT_NE(outcomes[rank].message.find(std::to_string(kLong + 1)), std::string::npos)
            << outcomes[rank].message;
      }
    }
  }
}

// The buffers of what is under way are freed at once, as an error of the caller's would do it.
TEST(Background, RankThatLeavesOrAborts_EndsWhatIsUnderWay) {
  for (const testing::ThreadGroups& row : testing::kThreadGroups) {
    for (const bool aborts : {false, true}) {
      SCOPED_TRACE(std::string(row.name) + (aborts ? ", aborts" : ", leaves"));
      const auto outcomes = testing::run_ranks(row.make({.num_ranks = 3, .timeout = 20s}),
                                               [&](int32_t rank, Communicator& comm) {
                                                 const Blocks first(3, kLong);
                                                 const Blocks second(3, kLong);
                                                 if (rank == 1) {
                                                   if (aborts) comm.abort("enough");
                                                   return;
                                                 }
                                                 const CommHandle one = first.begin(comm);
                                                 const CommHandle other = second.begin(comm);
                                                 comm.wait(one, comm.timeout(), "step");
                                                 comm.wait(other, comm.timeout(), "step");
                                               });
      for (const size_t rank : {0U, 2U}) {
        ASSERT_TRUE(outcomes[rank].code);
        EXPECT_EQ(*outcomes[rank].code, aborts ? ErrorCode::kCommAborted : ErrorCode::kCommPeerLost)
            << outcomes[rank].message;
        EXPECT_EQ(outcomes[rank].peer, 1);
      }
    }
  }
}

}  // namespace
}  // namespace conclave
