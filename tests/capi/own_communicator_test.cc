// Communicators that an application gives as functions of C: layers over them, how failures are
// told, and tables that are wrong. tests/capi/own_rank_groups.cc runs the cases of every transport.
#include "capi/own_communicator.h"

#include "capi/local_ranks.h"
#include "capi/own_transport.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::expect_error;
using testing::Handle;
using testing::last_error;
using testing::make;
using testing::on_threads;
using testing::own_group;
using testing::sized;

// A rank that does as it is told, and keeps what it was asked.
struct Scripted {
  conclave_status of_start = CONCLAVE_OK;
  conclave_status of_wait = CONCLAVE_OK;
  conclave_status of_shrink = CONCLAVE_OK;
  int32_t peer = -1;
  bool throws = false;
  int starts = 0, waits = 0, aborts = 0, shrinks = 0, released = 0, closed = 0;
  int64_t asked_deadline_ns = 0;
  std::string asked_phase;
  conclave_comm_operation started = {};
  std::vector<int32_t> old_ranks;
  const conclave_own_communicator* left = nullptr;
  std::array<void*, 2> blocks = {};

  static Scripted& self(void* user) { return *static_cast<Scripted*>(user); }

  conclave_status answer(conclave_status status, conclave_comm_failure* failure) const {
    if (throws) throw std::runtime_error("a part of C++");
    if (status == CONCLAVE_OK) return status;
    EXPECT_EQ(failure->struct_size, sizeof(conclave_comm_failure));
    EXPECT_EQ(failure->peer, -1);
    failure->peer = peer;
    failure->reason = "the cable is cut";
    return status;
  }

  conclave_own_communicator table() {
    auto table = sized<conclave_own_communicator>();
    table.name = "scripted";
    table.user = this;
    table.rank = 1;
    table.size = 2;
    table.timeout_ms = 250;
    table.start = [](void* user, const conclave_comm_operation* operation,
                     conclave_comm_failure* failure) {
      Scripted& rank = self(user);
      ++rank.starts;
      rank.started = *operation;
      return rank.answer(rank.of_start, failure);
    };
    table.wait = [](void* user, uint64_t number, int64_t deadline_ns, const char* phase,
                    conclave_comm_failure* failure) {
      Scripted& rank = self(user);
      ++rank.waits;
      EXPECT_EQ(number, rank.started.number);
      rank.asked_deadline_ns = deadline_ns;
      rank.asked_phase = phase;
      return rank.answer(rank.of_wait, failure);
    };
    table.test = [](void*, uint64_t, int32_t* complete, const char*, conclave_comm_failure*) {
      *complete = 1;
      return conclave_status{CONCLAVE_OK};
    };
    table.abort = [](void* user, const char*) {
      ++self(user).aborts;
      if (self(user).throws) throw std::runtime_error("a part of C++");
    };
    table.release = [](void* user) { ++self(user).released; };
    return table;
  }

  conclave_own_communicator table_that_shrinks() {
    conclave_own_communicator with = table();
    with.shrink = [](void* user, int64_t, const char*, const conclave_own_communicator** to,
                     int32_t* ranks, conclave_comm_failure* failure) {
      Scripted& rank = self(user);
      ++rank.shrinks;
      EXPECT_EQ(ranks[0], -1);
      *to = rank.left;
      std::ranges::copy(rank.old_ranks, ranks);
      return rank.answer(rank.of_shrink, failure);
    };
    return with;
  }
};

Handle<conclave_communicator> made_of(const conclave_own_communicator& table) {
  return make<conclave_communicator>(&conclave_communicator_from_own, &table);
}

conclave_status barrier(const Handle<conclave_communicator>& ranks) {
  return conclave_communicator_barrier(ranks.get(), "step");
}

TEST(OwnCommunicators, ExpertParallelLayers_HaveTheBitsOfOne) {
  std::atomic<int> released = 0;
  testing::expect_bits_of_one(own_group(3, &released));
  EXPECT_EQ(released, 3);
}

TEST(OwnCommunicators, AreHeldByContexts_AndReleasedOnce) {
  Scripted rank;
  conclave_own_communicator table = rank.table();
  std::string name = "of the application";
  table.name = name.c_str();
  auto communicator = made_of(table);
  name = "another text in its place";
  auto info = sized<conclave_communicator_info>();
  ASSERT_EQ(conclave_communicator_get_info(communicator.get(), &info), CONCLAVE_OK);
  EXPECT_EQ(info.rank, 1);
  EXPECT_EQ(info.size, 2);
  EXPECT_EQ(info.timeout_ms, 250);
  EXPECT_STREQ(info.transport, "of the application");
  auto context = testing::context_of(communicator.get());
  communicator.reset();
  EXPECT_EQ(rank.released, 0);
  context.reset();
  EXPECT_EQ(rank.released, 1);
}

TEST(OwnCommunicators, OperationsAreToldWhole) {
  Scripted rank;
  const auto communicator = made_of(rank.table());
  const float mine[3] = {1, 2, 3};
  float sums[3] = {};
  ASSERT_EQ(conclave_communicator_all_reduce(communicator.get(), mine, sums, 3, CONCLAVE_DTYPE_F32,
                                             "sums of rows"),
            CONCLAVE_OK);
  const conclave_comm_operation& told = rank.started;
  EXPECT_EQ(told.struct_size, sizeof(told));
  EXPECT_EQ(told.number, 1U);
  EXPECT_EQ(told.kind, CONCLAVE_COMM_KIND_ALL_REDUCE);
  EXPECT_EQ(told.peer, -1);
  EXPECT_EQ(told.send, mine);
  EXPECT_EQ(told.send_bytes, 12U);
  EXPECT_EQ(told.recv, sums);
  EXPECT_EQ(told.recv_bytes, 12U);
  EXPECT_EQ(told.send_counts, nullptr);
  EXPECT_EQ(told.dtype, CONCLAVE_DTYPE_F32);
  EXPECT_EQ(told.reduce, CONCLAVE_REDUCE_OP_SUM);
  EXPECT_EQ(told.recv_memory, CONCLAVE_MEMORY_HOST);
  EXPECT_EQ(told.stream, nullptr);
  EXPECT_EQ(rank.asked_phase, "sums of rows");
  EXPECT_EQ(rank.asked_deadline_ns, 250'000'000);
  ASSERT_EQ(barrier(communicator), CONCLAVE_OK);
  EXPECT_EQ(rank.started.number, 2U);
  EXPECT_EQ(rank.started.kind, CONCLAVE_COMM_KIND_BARRIER);
  EXPECT_EQ(rank.started.dtype, 0);
  // A long phase is cut between two letters, here of two bytes each; the error has all of it.
  std::string letters;
  while (letters.size() < 300) letters += "\xC3\xA9";
  ASSERT_EQ(conclave_communicator_barrier(communicator.get(), letters.c_str()), CONCLAVE_OK);
  EXPECT_EQ(rank.asked_phase, letters.substr(0, 126));
  // The library refuses this before it reaches the transport.
  expect_error(conclave_communicator_all_reduce(communicator.get(), mine, sums, 3,
                                                CONCLAVE_DTYPE_BF16, "sums"),
               CONCLAVE_ERROR_DTYPE, "");
  EXPECT_EQ(rank.starts, 3);
}

struct FailureCase {
  conclave_status given;
  int32_t peer;
  conclave_status expected;
  int32_t told_peer;
};

TEST(OwnCommunicators, Failures_HaveStatusRankAndPhase_AndStay) {
  constexpr FailureCase kCases[] = {
      {CONCLAVE_ERROR_COMM_PEER_LOST, 0, CONCLAVE_ERROR_COMM_PEER_LOST, 0},
      {CONCLAVE_ERROR_COMM_TIMEOUT, 1, CONCLAVE_ERROR_COMM_TIMEOUT, 1},
      {CONCLAVE_ERROR_COMM_MISMATCH, 2, CONCLAVE_ERROR_COMM_MISMATCH, -1},
      {CONCLAVE_ERROR_COMM_ABORTED, -7, CONCLAVE_ERROR_COMM_ABORTED, -1},
      {CONCLAVE_ERROR_OUT_OF_MEMORY, 0, CONCLAVE_ERROR_OUT_OF_MEMORY, -1},
      {12345, 0, CONCLAVE_ERROR_STATE, -1},
      {-1, 0, CONCLAVE_ERROR_STATE, -1}};
  for (const FailureCase& given : kCases) {
    for (const bool in_start : {true, false}) {
      SCOPED_TRACE(std::to_string(given.given) + (in_start ? " of start" : " of wait"));
      Scripted rank;
      rank.peer = given.peer;
      (in_start ? rank.of_start : rank.of_wait) = given.given;
      const auto communicator = made_of(rank.table());
      expect_error(barrier(communicator), given.expected, "the cable is cut");
      EXPECT_NE(std::string(last_error().message).find("step"), std::string::npos);
      EXPECT_EQ(last_error().peer, given.told_peer);
      const bool is_of_ranks = given.expected >= CONCLAVE_ERROR_COMM_PEER_LOST;
      EXPECT_STREQ(last_error().phase, is_of_ranks ? "step" : "");
      // A transport that has failed is not asked again, though it would say yes.
      rank.of_start = rank.of_wait = CONCLAVE_OK;
      expect_error(barrier(communicator), given.expected, "scripted");
      EXPECT_EQ(conclave_communicator_check(communicator.get()), given.expected);
      EXPECT_EQ(rank.starts, 1);
      EXPECT_EQ(rank.waits, in_start ? 0 : 1);
    }
  }
}

TEST(OwnCommunicators, ExceptionsOfFunctions_EndTheCall) {
  Scripted rank;
  const auto communicator = made_of(rank.table());
  rank.throws = true;
  EXPECT_EQ(conclave_communicator_abort(communicator.get(), "now"), CONCLAVE_OK);
  EXPECT_EQ(rank.aborts, 1);
  expect_error(barrier(communicator), CONCLAVE_ERROR_INTERNAL, "a part of C++");
}

// Only this rank's transport knows: the others hear of it from the library.
TEST(OwnCommunicators, ATransportThatFailsInAForward_EndsItOnEveryRank) {
  std::atomic<int> starts = 0;
  static std::atomic<int>* counter;
  static std::atomic<bool> fails;
  counter = &starts;
  fails = false;
  auto group = own_group(2, nullptr, std::chrono::seconds(20), [](conclave_own_communicator& own) {
    if (own.rank != 1) return;
    own.start = [](void* user, const conclave_comm_operation* operation,
                   conclave_comm_failure* failure) -> conclave_status {
      ++*counter;
      if (!fails) return testing::OwnTransport::start(user, operation, failure);
      testing::OwnTransport::abort(user, "no more memory is registered");
      failure->peer = 1;
      failure->reason = "no more memory is registered";
      return CONCLAVE_ERROR_COMM_ABORTED;
    };
  });
  std::array<conclave_status, 2> found = {};
  std::array<int32_t, 2> peers = {};
  const auto enter = [&] {
    static std::atomic<int> here;
    ++here;
    while (here % 2 != 0) std::this_thread::yield();
    fails = true;
  };
  on_threads(2, [&](size_t rank) {
    const auto context = testing::context_of(group[rank].get());
    const auto checkpoint = testing::open_model();
    const conclave_parallel parallel = testing::split_over(2, rank);
    const auto layer = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context.get(),
                                            checkpoint.get(), int64_t{0}, nullptr, &parallel);
    const Tensor hidden = testing::random_tensor(DType::kBF16, 4, 88, rank);
    Tensor out(DType::kF32, hidden.shape());
    const conclave_tensor in = testing::tensor_of(hidden.const_view());
    const conclave_tensor written = testing::tensor_of(out.const_view());
    auto args = sized<conclave_forward_args>();
    args.hidden = &in;
    args.out = &written;
    enter();
    found[rank] = conclave_layer_forward(layer.get(), &args);
    peers[rank] = last_error().peer;
    EXPECT_STRNE(last_error().phase, "");
  });
  EXPECT_GT(starts, 0);
  EXPECT_EQ(found[0], CONCLAVE_ERROR_COMM_ABORTED);
  EXPECT_EQ(found[1], CONCLAVE_ERROR_COMM_ABORTED);
  EXPECT_EQ(peers[0], 1);
  EXPECT_EQ(peers[1], 1);
}

TEST(OwnCommunicators, ALateRank_IsATimeout) {
  auto group = own_group(2, nullptr, std::chrono::milliseconds(50), [](auto&) {});
  expect_error(barrier(group[0]), CONCLAVE_ERROR_COMM_TIMEOUT, "step");
  EXPECT_EQ(last_error().peer, 1);
}

TEST(OwnCommunicators, SurvivorsGoOnWithTablesOfTheirOwn) {
  std::atomic<int> released = 0;
  {
    auto group = own_group(3, &released);
    on_threads(3, [&](size_t rank) {
      if (rank == 1) return group[rank].reset();
      expect_error(barrier(group[rank]), CONCLAVE_ERROR_COMM_PEER_LOST, "step");
      EXPECT_EQ(last_error().peer, 1);
      int32_t old_ranks[3] = {-1, -1, -1};
      conclave_communicator* out = nullptr;
      ASSERT_EQ(conclave_survivors(group[rank].get(), 5000, &out, old_ranks), CONCLAVE_OK)
          << conclave_last_error_message();
      const Handle<conclave_communicator> left(out);
      EXPECT_EQ(old_ranks[0], 0);
      EXPECT_EQ(old_ranks[1], 2);
      EXPECT_EQ(old_ranks[2], -1);
      EXPECT_EQ(barrier(left), CONCLAVE_OK) << conclave_last_error_message();
      expect_error(conclave_survivors(group[rank].get(), 0, &out, nullptr), CONCLAVE_ERROR_STATE,
                   "before");
      expect_error(barrier(group[rank]), CONCLAVE_ERROR_COMM_PEER_LOST, "step");
    });
  }
  EXPECT_EQ(released, 5);
}

TEST(OwnCommunicators, WrongAnswersAboutSurvivors_AreTypedErrors) {
  Scripted next;
  conclave_own_communicator alone = next.table();
  alone.rank = 0;
  alone.size = 1;
  conclave_own_communicator many = next.table();
  many.rank = 0;
  many.size = 3;
  conclave_own_communicator torn = alone;
  torn.wait = nullptr;
  struct Wrong {
    const conclave_own_communicator* left;
    std::vector<int32_t> old_ranks;
    conclave_status status;
    const char* names;
  };
  const conclave_own_communicator both = next.table();
  const Wrong kWrong[] = {{nullptr, {1}, CONCLAVE_ERROR_NULL_POINTER, "left"},
                          {&alone, {0}, CONCLAVE_ERROR_STATE, "another rank"},
                          {&alone, {-1}, CONCLAVE_ERROR_STATE, "old_ranks"},
                          {&alone, {2}, CONCLAVE_ERROR_STATE, "old_ranks"},
                          {&both, {1, 1}, CONCLAVE_ERROR_STATE, "old_ranks"},
                          {&many, {0, 1}, CONCLAVE_ERROR_STATE, "old_ranks"},
                          {&torn, {1}, CONCLAVE_ERROR_NULL_POINTER, "left.wait"}};
  for (const Wrong& wrong : kWrong) {
    SCOPED_TRACE(wrong.names);
    Scripted rank;
    rank.left = wrong.left;
    rank.old_ranks = wrong.old_ranks;
    const auto communicator = made_of(rank.table_that_shrinks());
    conclave_communicator* out = nullptr;
    expect_error(conclave_survivors(communicator.get(), 0, &out, nullptr), wrong.status,
                 wrong.names);
    EXPECT_EQ(out, nullptr);
    EXPECT_EQ(rank.aborts, 0);  // peers may still read what this rank has completed
    expect_error(barrier(communicator), CONCLAVE_ERROR_COMM_ABORTED, "survivors");
  }
  EXPECT_EQ(next.released, 0);

  Scripted late;
  late.of_shrink = CONCLAVE_ERROR_COMM_EXCLUDED;
  late.peer = 1;
  late.of_wait = CONCLAVE_ERROR_COMM_TIMEOUT;
  const auto communicator = made_of(late.table_that_shrinks());
  EXPECT_EQ(barrier(communicator), CONCLAVE_ERROR_COMM_TIMEOUT);
  conclave_communicator* out = nullptr;
  expect_error(conclave_survivors(communicator.get(), 0, &out, nullptr),
               CONCLAVE_ERROR_COMM_EXCLUDED, "the cable is cut");
  EXPECT_EQ(late.aborts, 0);  // it had failed already
  EXPECT_EQ(late.shrinks, 1);
  const auto without = made_of(late.table());
  expect_error(conclave_survivors(without.get(), 0, &out, nullptr), CONCLAVE_ERROR_UNSUPPORTED,
               "scripted");
}

TEST(OwnCommunicators, WhatATableLacks_IsRefusedWithTheReason) {
  Scripted rank;
  capi::CCommunicator plain(std::make_shared<capi::CommunicatorFunctions>(rank.table(), "own"));
  for (const CommFeature feature :
       {CommFeature::kDeviceMemory, CommFeature::kStreamOrder, CommFeature::kOverlap,
        CommFeature::kPeerMemory, CommFeature::kShrink}) {
    EXPECT_NE(plain.supports(feature).reason().find("scripted"), std::string::npos);
  }
  EXPECT_TRUE(plain.supports(CommFeature::kHostMemory));
  EXPECT_FALSE(plain.supports_reduction(DType::kBF16, ReduceOp::kSum));
  EXPECT_THROW(plain.open_window(8, MemoryKind::kHost, std::chrono::seconds(1), "w"), Error);
  EXPECT_THROW(plain.wait_on({}, {1}, std::chrono::seconds(1), "w"), Error);
  std::byte bytes[2] = {};
  EXPECT_THROW(plain.begin_send(0, ConstByteView(std::span(bytes), MemoryKind::kDevice)), Error);
  EXPECT_THROW(plain.begin_barrier({&rank}), Error);
  EXPECT_EQ(rank.starts, 0);
}

TEST(OwnCommunicators, WhatATableAdds_IsUsed) {
  Scripted rank;
  conclave_own_communicator table = rank.table();
  table.flags = CONCLAVE_OWN_COMMUNICATOR_DEVICE_MEMORY | CONCLAVE_OWN_COMMUNICATOR_OVERLAP;
  table.supports_reduction = [](void*, conclave_dtype dtype, conclave_reduce_op reduce) {
    return int32_t{dtype == CONCLAVE_DTYPE_BF16 && reduce == CONCLAVE_REDUCE_OP_MAX};
  };
  table.check = [](void*, const char*, conclave_comm_failure* failure) {
    failure->peer = 0;
    return conclave_status{CONCLAVE_ERROR_COMM_PEER_LOST};
  };
  table.wait_on = [](void* user, void* stream, uint64_t number, int64_t, const char*,
                     conclave_comm_failure*) {
    EXPECT_EQ(stream, user);
    EXPECT_EQ(number, 1U);
    return conclave_status{CONCLAVE_OK};
  };
  table.open_window = [](void* user, size_t bytes, conclave_memory memory, int64_t, const char*,
                         conclave_peer_window* window, conclave_comm_failure*) {
    Scripted& self = Scripted::self(user);
    EXPECT_EQ(bytes, 64U);
    EXPECT_EQ(memory, CONCLAVE_MEMORY_DEVICE);
    window->window = user;
    window->blocks = self.blocks.data();
    return conclave_status{CONCLAVE_OK};
  };
  table.close_window = [](void* user, void* window) {
    EXPECT_EQ(window, user);
    ++Scripted::self(user).closed;
  };
  {
    const auto functions = std::make_shared<capi::CommunicatorFunctions>(table, "own");
    capi::CCommunicator own(functions);
    EXPECT_TRUE(own.supports_reduction(DType::kBF16, ReduceOp::kMax));
    EXPECT_FALSE(own.supports_reduction(DType::kBF16, ReduceOp::kSum));
    EXPECT_TRUE(own.supports_reduction(DType::kF32, ReduceOp::kSum));
    std::byte bytes[2] = {};
    const CommHandle sent =
        own.begin_send(0, ConstByteView(std::span(bytes), MemoryKind::kDevice), {&rank});
    EXPECT_EQ(rank.started.send_memory, CONCLAVE_MEMORY_DEVICE);
    EXPECT_EQ(rank.started.stream, &rank);
    EXPECT_EQ(rank.started.peer, 0);
    own.wait_on({&rank}, sent, std::chrono::seconds(1), "sent");
    EXPECT_THROW(own.open_window(64, MemoryKind::kDevice, std::chrono::seconds(1), "w"), Error);
    EXPECT_EQ(rank.closed, 1);  // its blocks are nowhere
    rank.blocks = {&rank, bytes};
    const auto window = own.open_window(64, MemoryKind::kDevice, std::chrono::seconds(1), "w");
    EXPECT_EQ(window->bytes(), 64U);
    EXPECT_EQ(window->block(1), bytes);
    try {
      own.check("afterwards");
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.peer(), 0);
      EXPECT_EQ(error.phase(), "afterwards");
    }
  }
  EXPECT_EQ(rank.closed, 2);
}

TEST(OwnCommunicators, WrongTables_AreTypedErrors_AndNothingIsKept) {
  Scripted rank;
  const conclave_own_communicator good = rank.table();
  struct Wrong {
    const char* names;
    conclave_status status;
    void (*change)(conclave_own_communicator&);
  };
  const Wrong kWrong[] = {
      {"own.name", CONCLAVE_ERROR_NULL_POINTER, [](auto& own) { own.name = nullptr; }},
      {"own.start", CONCLAVE_ERROR_NULL_POINTER, [](auto& own) { own.start = nullptr; }},
      {"own.wait", CONCLAVE_ERROR_NULL_POINTER, [](auto& own) { own.wait = nullptr; }},
      {"own.test", CONCLAVE_ERROR_NULL_POINTER, [](auto& own) { own.test = nullptr; }},
      {"own.abort", CONCLAVE_ERROR_NULL_POINTER, [](auto& own) { own.abort = nullptr; }},
      {"own.check", CONCLAVE_ERROR_NULL_POINTER,
       [](auto& own) {
         own.wait_on = [](void*, void*, uint64_t, int64_t, const char*, conclave_comm_failure*) {
           return conclave_status{CONCLAVE_OK};
         };
       }},
      {"own.open_window", CONCLAVE_ERROR_NULL_POINTER,
       [](auto& own) { own.close_window = [](void*, void*) {}; }},
      {"own.close_window", CONCLAVE_ERROR_NULL_POINTER,
       [](auto& own) { own.open_window = &testing::OwnTransport::open_window; }},
      {"own.size", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& own) { own.size = 0; }},
      {"own.size", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& own) { own.size = -1; }},
      {"own.size", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& own) { own.size = 1 << 30; }},
      {"own.rank", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& own) { own.rank = 2; }},
      {"own.rank", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& own) { own.rank = -1; }},
      {"own.timeout_ms", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& own) { own.timeout_ms = -1; }},
      {"own.timeout_ms", CONCLAVE_ERROR_INVALID_ARGUMENT,
       [](auto& own) { own.timeout_ms = int64_t{1} << 62; }},
      {"own.flags", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& own) { own.flags = 4; }},
      {"own.reserved", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& own) { own.reserved = 1; }},
      {"struct_size", CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& own) { own.struct_size = 12; }}};
  conclave_communicator* out = nullptr;
  for (const Wrong& wrong : kWrong) {
    SCOPED_TRACE(wrong.names);
    conclave_own_communicator own = good;
    wrong.change(own);
    expect_error(conclave_communicator_from_own(&own, &out), wrong.status, wrong.names);
  }
  expect_error(conclave_communicator_from_own(nullptr, &out), CONCLAVE_ERROR_NULL_POINTER, "own");
  expect_error(conclave_communicator_from_own(&good, nullptr), CONCLAVE_ERROR_NULL_POINTER, "out");
  alignas(conclave_own_communicator) char shifted[sizeof(good) + 1];
  expect_error(conclave_communicator_from_own(
                   reinterpret_cast<const conclave_own_communicator*>(shifted + 1), &out),
               CONCLAVE_ERROR_MISALIGNED, "own");
  EXPECT_EQ(out, nullptr);
  EXPECT_EQ(rank.released, 0);
  // A program that ends its table behind the functions that are needed.
  conclave_own_communicator older = good;
  older.struct_size = offsetof(conclave_own_communicator, release);
  made_of(older);
  EXPECT_EQ(rank.released, 0);
}

}  // namespace
}  // namespace conclave
