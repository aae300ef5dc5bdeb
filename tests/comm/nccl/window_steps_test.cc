// Operations through windows between more ranks than there are GPUs: all on one device, each with a
// window in plain memory and a stream of its own.
#include "comm/nccl/device_steps.h"
#include "comm/nccl/nccl_bytes.h"
#include "comm/nccl/one_device_ranks.h"
#include "comm/reduce.h"
#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/stream.h"

#include "conclave/comm.h"
#include "conclave/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <iterator>
#include <vector>

namespace conclave {
namespace {

using comm::Marks;
using testing::Bytes;
using testing::letters;
using testing::OnDevice;
using testing::values;

using Ranks = testing::RanksOnOneDevice;
constexpr int64_t kSlot = testing::kSmallSlot;

size_t index(int32_t rank) { return static_cast<size_t>(rank); }

// A rank has this of an exchange: its bytes for all ranks, and room for those of all.
struct Parts {
  std::vector<int64_t> send_bytes, send_offsets, recv_bytes, recv_offsets;
  std::vector<OnDevice> memory;  // out, in
  Bytes expected;

  AllToAllV exchange() const {
    return {.send = memory[0].data(),
            .send_bytes = send_bytes,
            .send_offsets = send_offsets,
            .recv = memory[1].data(),
            .recv_bytes = recv_bytes,
            .recv_offsets = recv_offsets,
            .memory = MemoryKind::kDevice};
  }
};

class WindowSteps : public ::testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    const cuda::DeviceCount devices = cuda::count_devices();
    if (devices.count == 0) GTEST_SKIP() << devices.reason;
  }
};

// Every pair has its own length: some go by stripes, some by chunks, some are empty.
TEST_P(WindowSteps, AnExchange_BringsEveryRankItsBytes) {
  const Ranks ranks(GetParam());
  constexpr int64_t kLengths[] = {0, 1, 8193, kSlot + 1, 100000, kSlot, 3 * kSlot + 777, 16};
  for (int32_t round = 0; round < 6; ++round) {
    const auto bytes = [&](int32_t from, int32_t to) {
      return kLengths[index(from * 3 + to * 5 + round) % std::size(kLengths)];
    };
    std::vector<Parts> all(index(ranks.count()));
    std::vector<CommOperation> operations;
    for (int32_t rank = 0; rank < ranks.count(); ++rank) {
      Parts& parts = all[index(rank)];
      Bytes source;
      for (int32_t peer = 0; peer < ranks.count(); ++peer) {
        const Bytes out = letters(bytes(rank, peer), rank, peer);
        const Bytes in = letters(bytes(peer, rank), peer, rank);
        parts.send_bytes.push_back(bytes(rank, peer));
        parts.recv_bytes.push_back(bytes(peer, rank));
        parts.send_offsets.push_back(static_cast<int64_t>(source.size()));
        parts.recv_offsets.push_back(static_cast<int64_t>(parts.expected.size()));
        source.insert(source.end(), out.begin(), out.end());
        parts.expected.insert(parts.expected.end(), in.begin(), in.end());
      }
      parts.memory.emplace_back(source, index(round % 2));
      parts.memory.emplace_back(Bytes(parts.expected.size(), std::byte{0xee}));
    }
    for (const Parts& parts : all) {
      operations.push_back({.kind = CommKind::kAllToAllV, .exchange = parts.exchange()});
    }
    ranks.run(operations, bytes);
    for (const Parts& parts : all) {
      EXPECT_EQ(parts.memory[1].bytes() == parts.expected, true) << "round " << round;
    }
    ranks.expect_marks(static_cast<uint32_t>(round + 1));
  }
}

// Each rank's block has another length, as expert-parallel ranks bring other numbers of tokens.
TEST_P(WindowSteps, PartsOfRanks_AreAddedInRankOrder) {
  const Ranks ranks(GetParam());
  constexpr int64_t kCounts[] = {kSlot / 4, 5, kSlot + 3, 0, kSlot / 4 + 1, 20001};
  for (int32_t round = 0; round < 4; ++round) {
    const auto bytes = [&](int32_t rank) {
      return kCounts[index(rank + round) % std::size(kCounts)] * 4;
    };
    std::vector<int64_t> sizes, offsets;
    int64_t together = 0;
    for (int32_t rank = 0; rank < ranks.count(); ++rank) {
      sizes.push_back(bytes(rank));
      offsets.push_back(together);
      together += bytes(rank);
    }
    Bytes expected;
    std::vector<Parts> all(index(ranks.count()));
    std::vector<CommOperation> operations;
    for (int32_t rank = 0; rank < ranks.count(); ++rank) {
      Parts& parts = all[index(rank)];
      const Bytes mine = values<float>(together / 4, index(rank + 10 * round));
      parts.memory.emplace_back(mine);
      parts.memory.emplace_back(Bytes(static_cast<size_t>(bytes(rank)), std::byte{0x5a}));
      parts.send_bytes = sizes;
      parts.send_offsets = offsets;
      parts.recv_bytes.assign(sizes.size(), bytes(rank));
      parts.recv_offsets.assign(sizes.size(), 0);
      if (rank == 0) expected = mine;
      if (rank == 0) continue;
      comm::reduce_into(expected.data(), mine.data(), together, DType::kF32, ReduceOp::kSum);
    }
    for (const Parts& parts : all) {
      operations.push_back(
          {.kind = CommKind::kAllToAllV, .exchange = parts.exchange(), .dtype = DType::kF32});
    }
    ranks.run(operations, [&](int32_t, int32_t to) { return bytes(to); });
    for (int32_t rank = 0; rank < ranks.count(); ++rank) {
      const Bytes found = all[index(rank)].memory[1].bytes();
      EXPECT_EQ(std::equal(found.begin(), found.end(), expected.begin() + offsets[index(rank)]),
                true)
          << "round " << round << ", rank " << rank;
    }
    ranks.expect_marks(static_cast<uint32_t>(round + 1));
  }
}

// Short ones at once, long ones of more than two ranks by blocks; the same numbers scattered too.
// All counts are multiples of 12, so that 2, 3 and 4 ranks have equal blocks.
TEST_P(WindowSteps, Reductions_HaveTheBitsOfTheHost) {
  const Ranks ranks(GetParam());
  uint32_t operations_so_far = 0;
  for (const int64_t count : {int64_t{12}, kSlot / 4 + 4, comm::kAtOnceBytes / 4 + 4}) {
    Bytes expected = values<int64_t>(count, 1);
    std::vector<OnDevice> mine;
    std::vector<OnDevice> sums;
    std::vector<OnDevice> blocks;
    const size_t block = expected.size() / index(ranks.count());
    for (int32_t rank = 0; rank < ranks.count(); ++rank) {
      const Bytes part = values<int64_t>(count, index(rank) + 1);
      mine.emplace_back(part);
      sums.emplace_back(Bytes(part.size(), std::byte{0x5a}));
      blocks.emplace_back(Bytes(block, std::byte{0x5a}));
      if (rank == 0) continue;
      comm::reduce_into(expected.data(), part.data(), count * 8, DType::kI64, ReduceOp::kSum);
    }
    std::vector<CommOperation> reduce, scatter;
    for (int32_t rank = 0; rank < ranks.count(); ++rank) {
      reduce.push_back({.kind = CommKind::kAllReduce,
                        .send = mine[index(rank)].read(),
                        .recv = sums[index(rank)].write(),
                        .dtype = DType::kI64});
      scatter.push_back({.kind = CommKind::kReduceScatter,
                         .send = mine[index(rank)].read(),
                         .recv = blocks[index(rank)].write(),
                         .dtype = DType::kI64});
    }
    ranks.run(reduce, [&](int32_t, int32_t) { return count * 8; });
    ranks.run(scatter, [&](int32_t, int32_t) { return static_cast<int64_t>(block); });
    for (int32_t rank = 0; rank < ranks.count(); ++rank) {
      EXPECT_EQ(sums[index(rank)].bytes() == expected, true) << count << ", rank " << rank;
      const Bytes found = blocks[index(rank)].bytes();
      const auto begin = expected.begin() + static_cast<std::ptrdiff_t>(block) * rank;
      EXPECT_EQ(std::equal(found.begin(), found.end(), begin), true) << count << ", " << rank;
    }
    operations_so_far += 2;
    ranks.expect_marks(operations_so_far);
  }
}

// One of them means something else, or the host has told all to stop: every kernel ends, and takes
// nothing.
TEST_P(WindowSteps, RanksOfAnotherMind_AndStops_EndEveryWait) {
  for (const bool stops : {false, true}) {
    const Ranks ranks(GetParam());
    if (stops) ranks.stop();
    for (const int64_t bytes : {int64_t{100000}, 2 * kSlot}) {
      const OnDevice from(letters(bytes, 1, 2));
      const Bytes before(static_cast<size_t>(bytes) * index(ranks.count()), std::byte{0x5a});
      std::vector<OnDevice> got;
      std::vector<CommOperation> operations;
      // The last one does not come, or means another operation.
      const int32_t present = ranks.count() - (stops ? 1 : 0);
      for (int32_t rank = 0; rank < present; ++rank) got.emplace_back(before);
      for (int32_t rank = 0; rank < present; ++rank) {
        operations.push_back(
            {.kind = CommKind::kAllGather, .send = from.read(), .recv = got[index(rank)].write()});
      }
      std::vector<uint32_t> codes(index(present), 7);
      if (!stops) codes.back() = 8;
      ranks.run(operations, codes, [&](int32_t, int32_t) { return bytes; });
      for (int32_t rank = 0; rank < present; ++rank) {
        const Marks marks = ranks.marks(rank);
        EXPECT_EQ(marks.begun[0], marks.ended[0]);
        EXPECT_EQ(marks.mismatches != 0, !stops);
        // Its own bytes go to their place whatever the others say.
        Bytes found = got[index(rank)].bytes();
        std::fill_n(found.begin() + bytes * rank, bytes, std::byte{0x5a});
        EXPECT_EQ(found == before, true);
      }
    }
  }
}

// The sums of ranks without windows, whose parts lie side by side: aligned to vectors and not.
TEST_P(WindowSteps, SumsOfStagedParts_HaveTheSameBits) {
  const int32_t count = GetParam();
  for (const int64_t numbers : {int64_t{1}, int64_t{3}, int64_t{4097}, int64_t{3'000'001}}) {
    for (const size_t offset : {size_t{0}, size_t{4}}) {
      const int64_t bytes = numbers * 4;
      const int64_t stride = (bytes + 255) / 256 * 256;
      const int32_t own = count / 2;
      Bytes staged(static_cast<size_t>(stride * (count - 1)));
      Bytes expected = values<float>(numbers, 1);
      Bytes mine;
      for (int32_t rank = 0; rank < count; ++rank) {
        const Bytes part = values<float>(numbers, index(rank) + 1);
        const int64_t place = stride * (rank < own ? rank : rank - 1);
        if (rank == own) mine = part;
        if (rank != own) std::copy(part.begin(), part.end(), staged.begin() + place);
        if (rank == 0) continue;
        comm::reduce_into(expected.data(), part.data(), bytes, DType::kF32, ReduceOp::kSum);
      }
      const OnDevice others(staged);
      const OnDevice own_part(mine, offset);
      const OnDevice sum(Bytes(mine.size(), std::byte{0x5a}));
      const cuda::OwnedStream stream = cuda::make_stream();
      comm::add_in_order({.own = own_part.data(),
                          .others = others.data(),
                          .stride_bytes = stride,
                          .rank = own,
                          .ranks = count},
                         sum.data(), bytes, DType::kF32, ReduceOp::kSum, stream.get());
      cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
      EXPECT_EQ(sum.bytes() == expected, true) << numbers << ", offset " << offset;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, WindowSteps, ::testing::Values(2, 3, 4));

}  // namespace
}  // namespace conclave
