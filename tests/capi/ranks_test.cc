// Ranks through the C interface: threads of this process, and processes that meet by tcp or MPI.
#include "capi/local_ranks.h"
#include "support/layer_fixture.h"

#include "conclave/comm.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::context_of;
using testing::expect_error;
using testing::forward;
using testing::Handle;
using testing::local_group;
using testing::make;
using testing::of_one_rank;
using testing::on_threads;
using testing::same_bits;
using testing::sized;

TEST(Ranks, ExpertParallelLayers_HaveTheBitsOfOne) { testing::expect_bits_of_one(local_group(3)); }

// All ranks are told how many rows each of them brings; one that is told otherwise says so.
TEST(Ranks, TokensOfAllRanks_AreTaken) {
  auto group = local_group(2);
  on_threads(2, [&](size_t rank) {
    const auto context = context_of(group[rank].get());
    const auto checkpoint = testing::open_model();
    const conclave_parallel parallel = testing::split_over(2, rank);
    const auto layer = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context.get(),
                                            checkpoint.get(), int64_t{0}, nullptr, &parallel);
    const Tensor hidden = testing::random_tensor(DType::kBF16, rank == 0 ? 3 : 0, 88, rank);
    Tensor out(DType::kF32, hidden.shape());
    const int64_t tokens[] = {3, 0};
    testing::forward(layer.get(), hidden, out, tokens, 2);
    EXPECT_TRUE(same_bits(out, of_one_rank(hidden)));
  });
}

TEST(Ranks, WrongTokensOfAllRanks_AreTypedErrors) {
  const auto context = testing::make_context();
  const auto checkpoint = testing::open_model();
  const auto layer = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context.get(),
                                          checkpoint.get(), int64_t{0}, nullptr, nullptr);
  const Tensor hidden = testing::random_tensor(DType::kBF16, 3, 88, 1);
  Tensor out(DType::kF32, hidden.shape());
  const conclave_tensor in = testing::tensor_of(hidden.const_view());
  const conclave_tensor written = testing::tensor_of(out.const_view());
  auto args = sized<conclave_forward_args>();
  args.hidden = &in;
  args.out = &written;
  const auto expect_refused = [&](const int64_t* tokens, size_t count, conclave_status status,
                                  const char* names) {
    args.rank_tokens = tokens;
    args.rank_tokens_count = count;
    expect_error(conclave_layer_forward(layer.get(), &args), status, names);
  };
  const int64_t right[] = {3, 3};
  const int64_t other[] = {4};
  const int64_t negative[] = {-1};
  const int64_t absurd[] = {int64_t{1} << 40};
  expect_refused(right, 2, CONCLAVE_ERROR_SHAPE, "rank_tokens");
  expect_refused(right, 0, CONCLAVE_ERROR_SHAPE, "rank_tokens");
  expect_refused(other, 1, CONCLAVE_ERROR_INVALID_ARGUMENT, "rank_tokens");
  expect_refused(negative, 1, CONCLAVE_ERROR_INVALID_ARGUMENT, "rank_tokens");
  expect_refused(absurd, 1, CONCLAVE_ERROR_INVALID_ARGUMENT, "rank_tokens");
  expect_refused(nullptr, 1, CONCLAVE_ERROR_NULL_POINTER, "rank_tokens");
  expect_refused(right, size_t{1} << 60, CONCLAVE_ERROR_INVALID_ARGUMENT, "rank_tokens_count");
  expect_refused(reinterpret_cast<const int64_t*>(reinterpret_cast<const char*>(right) + 4), 1,
                 CONCLAVE_ERROR_MISALIGNED, "rank_tokens");
  args.rank_tokens = right;
  args.rank_tokens_count = 1;
  EXPECT_EQ(conclave_layer_forward(layer.get(), &args), CONCLAVE_OK);
}

TEST(Ranks, Collectives) {
  auto group = local_group(2);
  on_threads(2, [&](size_t rank) {
    auto info = sized<conclave_communicator_info>();
    EXPECT_EQ(conclave_communicator_get_info(group[rank].get(), &info), CONCLAVE_OK);
    EXPECT_EQ(info.rank, static_cast<int32_t>(rank));
    EXPECT_EQ(info.size, 2);
    EXPECT_EQ(info.timeout_ms, 30000);
    EXPECT_STREQ(info.transport, "local");
    const auto mine = static_cast<int32_t>(rank + 10);
    int32_t all[2] = {};
    EXPECT_EQ(
        conclave_communicator_all_gather(group[rank].get(), &mine, all, sizeof(mine), nullptr),
        CONCLAVE_OK)
        << conclave_last_error_message();
    EXPECT_EQ(all[0], 10);
    EXPECT_EQ(all[1], 11);
    int32_t sum = 0;
    EXPECT_EQ(conclave_communicator_all_reduce(group[rank].get(), &mine, &sum, 1,
                                               CONCLAVE_DTYPE_I32, "sums"),
              CONCLAVE_OK);
    EXPECT_EQ(sum, 21);
    EXPECT_EQ(conclave_communicator_barrier(group[rank].get(), "end"), CONCLAVE_OK);
    EXPECT_EQ(conclave_communicator_check(group[rank].get()), CONCLAVE_OK);
  });
}

TEST(Ranks, BadCollectives_AreTypedErrors) {
  auto group = local_group(2);
  int64_t words[2] = {};
  conclave_communicator* const rank = group[0].get();
  expect_error(
      conclave_communicator_all_reduce(rank, words, words + 1, 1, CONCLAVE_DTYPE_BF16, "p"),
      CONCLAVE_ERROR_DTYPE, "");
  expect_error(conclave_communicator_all_reduce(rank, words, words + 1, 1, 77, "p"),
               CONCLAVE_ERROR_DTYPE, "77");
  expect_error(conclave_communicator_all_reduce(rank, words, words + 1, 1, CONCLAVE_DTYPE_I4, "p"),
               CONCLAVE_ERROR_DTYPE, "");
  expect_error(conclave_communicator_all_reduce(rank, words, words + 1, ~size_t{0} / 2,
                                                CONCLAVE_DTYPE_F32, "p"),
               CONCLAVE_ERROR_SIZE_OVERFLOW, "count");
  expect_error(conclave_communicator_all_reduce(rank, nullptr, words, 1, CONCLAVE_DTYPE_F32, "p"),
               CONCLAVE_ERROR_NULL_POINTER, "send");
  expect_error(conclave_communicator_all_reduce(rank, reinterpret_cast<char*>(words) + 1, words + 1,
                                                1, CONCLAVE_DTYPE_F32, "p"),
               CONCLAVE_ERROR_MISALIGNED, "send");
  expect_error(conclave_communicator_all_gather(rank, words, nullptr, 8, "p"),
               CONCLAVE_ERROR_NULL_POINTER, "recv");
  conclave_communicator* out[2] = {};
  expect_error(conclave_local_group(0, 0, out), CONCLAVE_ERROR_INVALID_ARGUMENT, "num_ranks");
  expect_error(conclave_local_group(1 << 30, 0, out), CONCLAVE_ERROR_INVALID_ARGUMENT, "num_ranks");
  expect_error(conclave_local_group(2, -1, out), CONCLAVE_ERROR_INVALID_ARGUMENT, "timeout_ms");
}

TEST(Ranks, ALostRank_IsNamed_AndTheOthersGoOn) {
  constexpr int32_t kRanks = 3;
  auto group = local_group(kRanks);
  on_threads(kRanks, [&](size_t rank) {
    if (rank == 1) return group[rank].reset();
    const conclave_status status = conclave_communicator_barrier(group[rank].get(), "step");
    expect_error(status, CONCLAVE_ERROR_COMM_PEER_LOST, "step");
    EXPECT_EQ(testing::last_error().peer, 1);
    EXPECT_STREQ(testing::last_error().phase, "step");
    int32_t old_ranks[kRanks] = {-1, -1, -1};
    conclave_communicator* made = nullptr;
    ASSERT_EQ(conclave_survivors(group[rank].get(), 5000, &made, old_ranks), CONCLAVE_OK)
        << conclave_last_error_message();
    const Handle<conclave_communicator> left(made);
    EXPECT_EQ(old_ranks[0], 0);
    EXPECT_EQ(old_ranks[1], 2);
    EXPECT_EQ(old_ranks[2], -1);

    // A layer on the ranks that are left, which reads what it lacks.
    const auto checkpoint = testing::open_model();
    const auto one = testing::make_context();
    const auto whole = make<conclave_layer>(&conclave_layer_create_from_checkpoint, one.get(),
                                            checkpoint.get(), int64_t{0}, nullptr, nullptr);
    const auto source =
        make<conclave_source>(&conclave_checkpoint_source, checkpoint.get(), int64_t{0});
    const auto context = context_of(left.get());
    const conclave_parallel parallel = testing::split_over(2, rank == 0 ? 0 : 1);
    const auto layer = make<conclave_layer>(&conclave_layer_on_ranks, whole.get(), context.get(),
                                            &parallel, source.get());
    const Tensor hidden = testing::random_tensor(DType::kBF16, 4, 88, rank);
    Tensor out(DType::kF32, hidden.shape());
    forward(layer.get(), hidden, out);
    EXPECT_TRUE(same_bits(out, of_one_rank(hidden)));
  });
}

TEST(Ranks, AnAbort_EndsEveryWait) {
  auto group = local_group(2);
  std::thread other(
      [&] { EXPECT_EQ(conclave_communicator_abort(group[1].get(), "told to stop"), CONCLAVE_OK); });
  expect_error(conclave_communicator_barrier(group[0].get(), nullptr), CONCLAVE_ERROR_COMM_ABORTED,
               "told to stop");
  other.join();
  EXPECT_EQ(conclave_communicator_check(group[0].get()), CONCLAVE_ERROR_COMM_ABORTED);
}

TEST(Ranks, ALateRank_IsATimeout) {
  auto group = local_group(2, 50);
  expect_error(conclave_communicator_barrier(group[0].get(), "alone"), CONCLAVE_ERROR_COMM_TIMEOUT,
               "alone");
}

// A rank that stays away is waited for as long as the caller says, not as the group does.
TEST(Ranks, Survivors_HaveTheCallersTime) {
  auto group = local_group(2, 6000);
  const auto begin = std::chrono::steady_clock::now();
  int32_t old_ranks[2] = {-1, -1};
  conclave_communicator* made = nullptr;
  ASSERT_EQ(conclave_survivors(group[0].get(), 50, &made, old_ranks), CONCLAVE_OK)
      << conclave_last_error_message();
  const Handle<conclave_communicator> left(made);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
  EXPECT_EQ(old_ranks[0], 0);
  EXPECT_EQ(old_ranks[1], -1);
}

TEST(Ranks, ErrorsOfThisRankAlone_HaveNoRankAndNoPhase) {
  auto group = local_group(2);
  group[1].reset();
  expect_error(conclave_communicator_barrier(group[0].get(), "step"), CONCLAVE_ERROR_COMM_PEER_LOST,
               "step");
  EXPECT_EQ(testing::last_error().peer, 1);
  expect_error(conclave_communicator_barrier(nullptr, "step"), CONCLAVE_ERROR_NULL_POINTER,
               "communicator");
  EXPECT_EQ(testing::last_error().peer, -1);
  EXPECT_STREQ(testing::last_error().phase, "");
}

// Texts of ranks that are threads here, by a table that they share.
struct Table {
  std::mutex mutex;
  std::vector<std::vector<std::string>> rounds;
  int32_t ranks = 0;
};
struct TableOfRank {
  Table* table;
  int32_t rank;
  size_t round = 0;
  std::vector<std::string> held = {};

  static conclave_status exchange(void* user, const char* mine, int32_t num_ranks,
                                  const char** all) {
    auto& self = *static_cast<TableOfRank*>(user);
    EXPECT_EQ(num_ranks, self.table->ranks);
    for (bool is_first = true;; is_first = false) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const std::lock_guard lock(self.table->mutex);
      self.table->rounds.resize(std::max(self.table->rounds.size(), self.round + 1));
      std::vector<std::string>& texts = self.table->rounds[self.round];
      texts.resize(static_cast<size_t>(num_ranks));
      if (is_first) texts[static_cast<size_t>(self.rank)] = std::string("+") + mine;
      if (std::ranges::any_of(texts, [](const std::string& text) { return text.empty(); }))
        continue;
      self.held = texts;
      break;
    }
    ++self.round;
    for (size_t rank = 0; rank < self.held.size(); ++rank) all[rank] = self.held[rank].c_str() + 1;
    return CONCLAVE_OK;
  }
};

TEST(Connect, Tcp_ByTheCallersExchange) {
  Table table;
  table.ranks = 2;
  on_threads(2, [&](size_t rank) {
    TableOfRank mine{.table = &table, .rank = static_cast<int32_t>(rank)};
    auto options = sized<conclave_connect_options>();
    options.rank = static_cast<int32_t>(rank);
    options.size = 2;
    options.exchange = &TableOfRank::exchange;
    options.exchange_user = &mine;
    options.timeout_ms = 20000;
    const auto communicator = make<conclave_communicator>(&conclave_connect, "tcp", &options);
    const double value = 0.5 + static_cast<double>(rank);
    double sum = 0;
    EXPECT_EQ(conclave_communicator_all_reduce(communicator.get(), &value, &sum, 1,
                                               CONCLAVE_DTYPE_F64, nullptr),
              CONCLAVE_OK)
        << conclave_last_error_message();
    EXPECT_EQ(sum, 2.0);
  });
}

TEST(Connect, WhatFails_IsATypedError) {
  conclave_communicator* out = nullptr;
  expect_error(conclave_connect("smoke signals", nullptr, &out), CONCLAVE_ERROR_UNKNOWN_NAME,
               "smoke signals");
  auto options = sized<conclave_connect_options>();
  options.rank = 2;
  options.size = 2;
  expect_error(conclave_connect("tcp", &options, &out), CONCLAVE_ERROR_INVALID_ARGUMENT, "rank");
  options.rank = 0;
  options.flags = 2;
  expect_error(conclave_connect("tcp", &options, &out), CONCLAVE_ERROR_INVALID_ARGUMENT, "flags");
  options.flags = CONCLAVE_CONNECT_HAS_GROUP;
  options.group = -1;
  expect_error(conclave_connect("tcp", &options, &out), CONCLAVE_ERROR_INVALID_ARGUMENT, "group");
  options.flags = 0;
  options.timeout_ms = int64_t{1} << 60;
  expect_error(conclave_connect("tcp", &options, &out), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "timeout_ms");
  options.timeout_ms = 100;
  options.exchange = [](void*, const char*, int32_t, const char**) -> conclave_status {
    return CONCLAVE_ERROR_COMM_TIMEOUT;
  };
  expect_error(conclave_connect("tcp", &options, &out), CONCLAVE_ERROR_COMM_TIMEOUT, "exchange");
  options.exchange = [](void*, const char*, int32_t, const char**) -> conclave_status { return 0; };
  expect_error(conclave_connect("tcp", &options, &out), CONCLAVE_ERROR_NULL_POINTER, "exchange");
  options.size = 0;
  expect_error(conclave_connect("tcp", &options, &out), CONCLAVE_ERROR_INVALID_ARGUMENT, "size");
  EXPECT_EQ(out, nullptr);
}

TEST(Connect, LibrariesThatABuildLacks_AreSaid) {
  conclave_communicator* out = nullptr;
  auto group = local_group(1);
  int object = 0;
  for (const TransportInfo& row : transports()) {
    if (row.usable || row.reason.find("this build") == std::string::npos) continue;
    expect_error(conclave_connect(row.name.c_str(), nullptr, &out), CONCLAVE_ERROR_UNSUPPORTED,
                 row.name);
    const conclave_status status =
        row.name == "nccl" ? conclave_communicator_from_nccl(&object, group[0].get(), 0, &out)
                           : conclave_communicator_from_mpi(&object, 0, &out);
    expect_error(status, CONCLAVE_ERROR_UNSUPPORTED, "this build");
  }
  EXPECT_EQ(out, nullptr);
}

}  // namespace
}  // namespace conclave
