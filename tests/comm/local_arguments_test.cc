#include "comm/communicator.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace conclave {
namespace {

template <class Call>
void expect_error(ErrorCode code, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "accepted; expected " << to_string(code);
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
  }
}

TEST(LocalGroup, Ranks_KnowTheirNumbersAndName) {
  for (const auto& row : comm::communicator_catalog().rows()) {
    if (row.make_group == nullptr) continue;
    const auto group = row.make_group({.num_ranks = 3, .timeout = std::chrono::seconds(7)});
    ASSERT_EQ(group.size(), 3U);
    for (int32_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(group[static_cast<size_t>(rank)]->rank(), rank);
      EXPECT_EQ(group[static_cast<size_t>(rank)]->size(), 3);
      EXPECT_EQ(group[static_cast<size_t>(rank)]->name(), row.name);
      EXPECT_EQ(group[static_cast<size_t>(rank)]->timeout(), std::chrono::seconds(7));
    }
  }
}

class LocalArguments : public ::testing::Test {
 protected:
  std::vector<std::unique_ptr<Communicator>> group_ = make_local_group({.num_ranks = 2});
  Communicator& comm_ = *group_[0];
  std::vector<std::byte> four_ = std::vector<std::byte>(4);
  std::vector<std::byte> eight_ = std::vector<std::byte>(8);
  std::vector<std::byte> other_eight_ = std::vector<std::byte>(8);
};

TEST_F(LocalArguments, GroupWithoutRanks_IsRefused) {
  for (const int32_t ranks : {0, 4097, std::numeric_limits<int32_t>::max()}) {
    expect_error(ErrorCode::kInvalidArgument, [&] { make_local_group({.num_ranks = ranks}); });
  }
  expect_error(ErrorCode::kInvalidArgument, [] { make_local_group({.num_ranks = -3}); });
}

TEST_F(LocalArguments, WrongSizes_AreRefused) {
  expect_error(ErrorCode::kShape, [&] { comm_.begin_all_gather(four_, four_); });
  expect_error(ErrorCode::kShape,
               [&] { comm_.begin_all_reduce(four_, eight_, DType::kF32, ReduceOp::kSum); });
  expect_error(ErrorCode::kShape,
               [&] { comm_.begin_reduce_scatter(four_, eight_, DType::kF32, ReduceOp::kSum); });
  expect_error(ErrorCode::kShape, [&] {
    std::vector<std::byte> odd(6);
    std::vector<std::byte> result(6);
    comm_.begin_all_reduce(odd, result, DType::kF32, ReduceOp::kSum);
  });
}

TEST_F(LocalArguments, TypesThatDoNotReduce_AreRefused) {
  expect_error(ErrorCode::kDType,
               [&] { comm_.begin_all_reduce(eight_, other_eight_, DType::kBF16, ReduceOp::kSum); });
}

TEST_F(LocalArguments, OverlappingBuffers_AreRefused) {
  expect_error(ErrorCode::kOverlap,
               [&] { comm_.begin_all_reduce(eight_, eight_, DType::kF32, ReduceOp::kSum); });
  expect_error(ErrorCode::kOverlap,
               [&] { comm_.begin_all_gather(std::span(eight_).subspan(4, 4), eight_); });
}

TEST_F(LocalArguments, UnknownPeers_AreRefused) {
  for (const int32_t peer : {-1, 2, 1000}) {
    expect_error(ErrorCode::kInvalidArgument, [&] { comm_.begin_send(peer, four_); });
    expect_error(ErrorCode::kInvalidArgument, [&] { comm_.begin_recv(peer, four_); });
  }
}

TEST_F(LocalArguments, BadCounts_AreRefused) {
  const std::vector<int64_t> two = {1, 1};
  const std::vector<int64_t> one = {1};
  const std::vector<int64_t> negative = {1, -1};
  const auto exchange = [&](std::span<const int64_t> bytes, std::span<const int64_t> offsets,
                            const std::byte* send) {
    comm_.begin_all_to_all_v({send, bytes, offsets, eight_.data(), two, two});
  };
  expect_error(ErrorCode::kShape, [&] { exchange(one, two, four_.data()); });
  expect_error(ErrorCode::kShape, [&] { exchange(two, one, four_.data()); });
  expect_error(ErrorCode::kInvalidArgument, [&] { exchange(negative, two, four_.data()); });
  expect_error(ErrorCode::kInvalidArgument, [&] { exchange(two, negative, four_.data()); });
  expect_error(ErrorCode::kNullPointer, [&] { exchange(two, two, nullptr); });
}

TEST_F(LocalArguments, UnknownHandle_IsRefused) {
  expect_error(ErrorCode::kInvalidArgument,
               [&] { comm_.wait({12345}, comm_.timeout(), "nothing"); });
  expect_error(ErrorCode::kInvalidArgument, [&] { comm_.wait({}, comm_.timeout(), "nothing"); });
}

TEST_F(LocalArguments, HandleWaitedForTwice_IsRefused) {
  const CommHandle handle = comm_.begin_send(0, four_);
  comm_.recv(0, eight_.empty() ? std::span<std::byte>() : std::span(eight_).first(4), "own");
  comm_.wait(handle, comm_.timeout(), "sent");
  expect_error(ErrorCode::kInvalidArgument, [&] { comm_.wait(handle, comm_.timeout(), "again"); });
}

TEST_F(LocalArguments, TooManyOperationsUnderWay_AreRefused) {
  expect_error(ErrorCode::kState, [&] {
    for (int i = 0; i < 100000; ++i) comm_.begin_send(1, four_);
  });
}

TEST_F(LocalArguments, RefusedCalls_LeaveTheGroupUsable) {
  expect_error(ErrorCode::kShape, [&] { comm_.begin_all_gather(four_, four_); });
  const CommHandle handle = comm_.begin_send(0, four_);
  std::vector<std::byte> got(4);
  comm_.recv(0, got, "own");
  comm_.wait(handle, comm_.timeout(), "sent");
}

}  // namespace
}  // namespace conclave
