// Disagreeing, missing and lying ranks give a typed error on every rank, in bounded time, and data
// from a peer never becomes an index out of range.
#include "dispatch/ep_plan.h"
#include "dispatch/ep_problem.h"
#include "dispatch/ep_wire.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::EpCase;
using testing::RankOutcome;

// Runs one layer call of a rank that plans `c`.
void call_layer(const EpCase& c, int32_t rank, Communicator& communicator) {
  const auto dispatcher = testing::make_dispatcher(c, rank, communicator);
  testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
  testing::SerialExecutor executor;
  const auto placed = make_placement(c.experts, {.ep_size = c.ranks, .placement = c.placement});
  testing::run_layer(
      *dispatcher, testing::random_input(c.max_tokens, c.top_k, c.experts, c.hidden, 1), c.top_k,
      c.hidden, placed.experts_of[static_cast<size_t>(rank)], workspace.span(), executor);
}

TEST(EpFaults, RanksWithDifferentPlans_AllGetAMismatch) {
  const EpCase base{.ranks = 3, .experts = 6, .top_k = 2, .hidden = 32};
  const std::vector<std::pair<std::string, std::function<void(EpCase&)>>> changes = {
      {"max_tokens", [](EpCase& c) { c.max_tokens = 17; }},
      {"top_k", [](EpCase& c) { c.top_k = 3; }},
      {"hidden_size", [](EpCase& c) { c.hidden = 31; }},
      {"hidden_size", [](EpCase& c) { c.hidden = 320; }},
      {"num_experts", [](EpCase& c) { c.experts = 7; }},
      {"placement", [](EpCase& c) { c.placement = PlacementStrategy::kRoundRobin; }},
      {"combine", [](EpCase& c) { c.combine = EpCombine::kReducedPerRank; }},
      {"transport",
       [](EpCase& c) {
         c.transport = c.transport == EpTransport::kVariable ? EpTransport::kFixedSlots
                                                             : EpTransport::kVariable;
       }},
  };
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    for (const auto& [field, change] : changes) {
      EpCase usual = base;
      usual.transport = transport;
      EpCase other = usual;
      change(other);
      SCOPED_TRACE(testing::describe(usual) + " against " + testing::describe(other));
      const auto outcomes =
          testing::run_ranks(make_local_group({.num_ranks = 3, .timeout = 20s}),
                             [&](int32_t rank, Communicator& communicator) {
                               call_layer(rank == 1 ? other : usual, rank, communicator);
                             });
      for (const RankOutcome& outcome : outcomes) {
        ASSERT_TRUE(outcome.code.has_value());
        EXPECT_EQ(to_string(*outcome.code), "kCommMismatch") << outcome.message;
        // With the variable transport the plan is checked first, field by field.
        if (transport == EpTransport::kVariable && field != "transport") {
          EXPECT_NE(outcome.message.find(field), std::string::npos) << outcome.message;
        }
      }
    }
  }
}

TEST(EpFaults, HeaderOfAnotherPlan_IsRefusedInEveryField) {
  const EpCase c{.ranks = 3, .experts = 6};
  const dispatch::EpPlan plan = dispatch::make_ep_plan(testing::problem_of(c, 0, nullptr));
  const dispatch::WireHeader ours = dispatch::make_header(plan, 0, 5);
  EXPECT_EQ(dispatch::checked_rows(plan, 0, ours, 1), 5);
  using Fields = std::array<int64_t, sizeof(ours) / sizeof(int64_t)>;
  // The last field is the number of rows, in which ranks may differ.
  for (size_t field = 0; field + 1 < std::tuple_size_v<Fields>; ++field) {
    SCOPED_TRACE("field " + std::to_string(field));
    auto fields = std::bit_cast<Fields>(ours);
    ++fields[field];
    const auto theirs = std::bit_cast<dispatch::WireHeader>(fields);
    try {
      dispatch::checked_rows(plan, 0, theirs, 1);
      ADD_FAILURE() << "accepted";
    } catch (const CommError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCommMismatch) << error.what();
      EXPECT_EQ(error.peer(), 1);
      EXPECT_NE(std::string(error.what()).find(std::to_string(fields[field])), std::string::npos)
          << error.what();
    }
  }
}

TEST(EpFaults, RankThatNeverDispatches_IsATimeoutNamingIt) {
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    const EpCase c{.ranks = 3, .experts = 6, .transport = transport};
    const auto start = std::chrono::steady_clock::now();
    std::atomic<int> waiting{2};
    const auto outcomes = testing::run_ranks(make_local_group({.num_ranks = 3, .timeout = 100ms}),
                                             [&](int32_t rank, Communicator& communicator) {
                                               if (rank == 1) {
                                                 while (waiting.load() > 0)
                                                   std::this_thread::sleep_for(1ms);
                                                 return;
                                               }
                                               try {
                                                 call_layer(c, rank, communicator);
                                               } catch (...) {
                                                 --waiting;
                                                 throw;
                                               }
                                             });
    for (const size_t rank : {0U, 2U}) {
      ASSERT_TRUE(outcomes[rank].code.has_value());
      EXPECT_EQ(*outcomes[rank].code, ErrorCode::kCommTimeout) << outcomes[rank].message;
      EXPECT_EQ(outcomes[rank].peer, 1);
      EXPECT_EQ(outcomes[rank].phase.rfind("dispatch.", 0), 0U) << outcomes[rank].phase;
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
  }
}

TEST(EpFaults, RankThatLeavesBeforeCombine_IsLost) {
  const EpCase c{.ranks = 2, .experts = 4};
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = 2, .timeout = 20s}),
      [&](int32_t rank, Communicator& communicator) {
        if (rank == 0) return call_layer(c, rank, communicator);
        const auto dispatcher = testing::make_dispatcher(c, rank, communicator);
        testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
        testing::SerialExecutor executor;
        dispatcher->dispatch({0, c.top_k, nullptr, nullptr},
                             {nullptr, 0, testing::float_row_bytes(c.hidden), DType::kF32},
                             workspace.span(), executor);
      });
  ASSERT_TRUE(outcomes[0].code.has_value());
  EXPECT_EQ(*outcomes[0].code, ErrorCode::kCommPeerLost) << outcomes[0].message;
  EXPECT_EQ(outcomes[0].phase, "combine.rows");
}

// Forwards to a real communicator and lets a test change what was received.
class TamperedCommunicator final : public Communicator {
 public:
  using Tamper = std::function<void(std::string_view phase, const AllToAllV& exchange)>;
  TamperedCommunicator(Communicator& real, Tamper tamper)
      : real_(real), tamper_(std::move(tamper)) {}

  std::string_view name() const noexcept override { return real_.name(); }
  int32_t rank() const noexcept override { return real_.rank(); }
  int32_t size() const noexcept override { return real_.size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return real_.timeout(); }
  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override {
    real_.wait(handle, deadline, phase);
    tamper_(phase, exchanges_[handle.sequence]);
  }
  bool test(CommHandle handle, std::string_view phase) override {
    return real_.test(handle, phase);
  }
  void abort(std::string_view reason) noexcept override { real_.abort(reason); }

 protected:
  CommHandle start(const CommOperation& operation) override {
    const CommHandle handle = real_.begin(operation);
    exchanges_[handle.sequence] = operation.exchange;
    return handle;
  }

 private:
  Communicator& real_;
  Tamper tamper_;
  std::map<uint64_t, AllToAllV> exchanges_;
};

// Rank 0 receives from rank 1 with the bytes changed by `tamper`; returns the outcome of rank 0.
RankOutcome tampered(const EpCase& c, const TamperedCommunicator::Tamper& tamper) {
  const auto start = std::chrono::steady_clock::now();
  const auto outcomes = testing::run_ranks(make_local_group({.num_ranks = c.ranks, .timeout = 20s}),
                                           [&](int32_t rank, Communicator& communicator) {
                                             if (rank != 0)
                                               return call_layer(c, rank, communicator);
                                             TamperedCommunicator between(communicator, tamper);
                                             call_layer(c, rank, between);
                                           });
  for (const RankOutcome& outcome : outcomes) EXPECT_TRUE(outcome.code.has_value());
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  return outcomes[0];
}

TEST(EpFaults, ForeignIdsFromAPeer_AreRefusedNotUsed) {
  const EpCase c{.ranks = 2, .experts = 6, .top_k = 2};
  for (const int32_t id : {-2, 3, 6, 1 << 20, std::numeric_limits<int32_t>::min(),
                           std::numeric_limits<int32_t>::max()}) {
    const RankOutcome outcome = tampered(c, [&](std::string_view phase, const AllToAllV& x) {
      if (phase == "dispatch.ids") std::memcpy(x.recv + x.recv_offsets[1], &id, sizeof(id));
    });
    EXPECT_EQ(to_string(*outcome.code), "kCommMismatch") << outcome.message;
    EXPECT_EQ(outcome.peer, 1);
    EXPECT_NE(outcome.message.find(std::to_string(id)), std::string::npos) << outcome.message;
  }
}

TEST(EpFaults, RepeatedIdsFromAPeer_AreRefused) {
  const EpCase c{.ranks = 2, .experts = 6, .top_k = 2};
  const RankOutcome outcome = tampered(c, [&](std::string_view phase, const AllToAllV& x) {
    const std::vector<int32_t> twice = {1, 1};
    if (phase == "dispatch.ids") std::memcpy(x.recv + x.recv_offsets[1], twice.data(), 8);
  });
  EXPECT_EQ(to_string(*outcome.code), "kCommMismatch") << outcome.message;
  EXPECT_NE(outcome.message.find("twice"), std::string::npos) << outcome.message;
}

TEST(EpFaults, ImpossibleRowCountsFromAPeer_AreRefused) {
  constexpr auto kRowsField = static_cast<int64_t>(offsetof(dispatch::WireHeader, num_rows));
  for (const int64_t rows : {int64_t{-1}, int64_t{17}, std::numeric_limits<int64_t>::max()}) {
    const EpCase c{.ranks = 2, .experts = 6, .top_k = 2};
    const RankOutcome variable = tampered(c, [&](std::string_view phase, const AllToAllV& x) {
      if (phase == "dispatch.counts") {
        std::memcpy(x.recv + x.recv_offsets[1] + kRowsField, &rows, sizeof(rows));
      }
    });
    EXPECT_EQ(to_string(*variable.code), "kCommMismatch") << variable.message;
    EXPECT_NE(variable.message.find("announces"), std::string::npos) << variable.message;

    EpCase fixed = c;
    fixed.transport = EpTransport::kFixedSlots;
    const int64_t header = fixed.max_tokens * testing::float_row_bytes(fixed.hidden);
    const RankOutcome slots = tampered(fixed, [&](std::string_view phase, const AllToAllV& x) {
      if (phase == "dispatch.slots") {
        std::memcpy(x.recv + x.recv_offsets[1] + header + kRowsField, &rows, sizeof(rows));
      }
    });
    EXPECT_EQ(to_string(*slots.code), "kCommMismatch") << slots.message;
    EXPECT_NE(slots.message.find("announces"), std::string::npos) << slots.message;
  }
}

TEST(EpFaults, NoiseInEveryDescription_IsRefusedOrHarmless) {
  // Random bytes replace everything but rows: the result is an error or has in-range ids, never a
  // crash.
  for (uint32_t seed = 0; seed < 60; ++seed) {
    EpCase c{.ranks = 2, .experts = 6, .top_k = 2};
    c.transport = seed % 2 == 0 ? EpTransport::kVariable : EpTransport::kFixedSlots;
    const int64_t rows_end = c.max_tokens * testing::float_row_bytes(c.hidden);
    std::mt19937 noise(seed);
    testing::run_ranks(make_local_group({.num_ranks = 2, .timeout = 500ms}),
                       [&](int32_t rank, Communicator& communicator) {
                         if (rank != 0) return call_layer(c, rank, communicator);
                         TamperedCommunicator between(
                             communicator, [&](std::string_view phase, const AllToAllV& x) {
                               const bool fixed = phase == "dispatch.slots";
                               if (!fixed && phase != "dispatch.ids" && phase != "dispatch.counts")
                                 return;
                               const int64_t first = fixed ? rows_end : 0;
                               if (x.recv_bytes[1] <= first) return;
                               for (int i = 0; i < 3; ++i) {
                                 const int64_t at = first + static_cast<int64_t>(noise() % 65536) %
                                                                (x.recv_bytes[1] - first);
                                 x.recv[x.recv_offsets[1] + at] ^=
                                     static_cast<std::byte>(1U << (noise() % 8));
                               }
                             });
                         call_layer(c, rank, between);
                       });
  }
}

TEST(EpFaults, WorkspaceBelowTheBound_IsRefusedBeforeAnyExchange) {
  const EpCase c{.ranks = 1, .experts = 4};
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = 1}), [&](int32_t rank, Communicator& communicator) {
        const auto dispatcher = testing::make_dispatcher(c, rank, communicator);
        testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
        testing::SerialExecutor executor;
        testing::run_layer(*dispatcher, testing::random_input(1, 2, 4, c.hidden, 1), 2, c.hidden,
                           testing::first_ids(4),
                           workspace.span().first(dispatcher->workspace_bytes() - 1), executor);
      });
  EXPECT_EQ(*outcomes[0].code, ErrorCode::kWorkspaceTooSmall) << outcomes[0].message;
}

TEST(EpFaults, CombineOfAnotherRouting_IsRefused) {
  const EpCase c{.ranks = 1, .experts = 4};
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = 1}), [&](int32_t rank, Communicator& communicator) {
        const auto dispatcher = testing::make_dispatcher(c, rank, communicator);
        testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
        testing::SerialExecutor executor;
        dispatcher->dispatch({0, 2, nullptr, nullptr},
                             {nullptr, 0, testing::float_row_bytes(c.hidden), DType::kF32},
                             workspace.span(), executor);
        std::vector<float> out(static_cast<size_t>(c.hidden));
        const std::vector<int32_t> ids = {0, 1};
        const std::vector<float> weights = {1, 1};
        dispatcher->combine({.output = {},
                             .routing = {1, 2, ids.data(), weights.data()},
                             .out = {out.data(), DType::kF32, Shape{1, c.hidden}, 0}},
                            workspace.span(), executor);
      });
  EXPECT_EQ(*outcomes[0].code, ErrorCode::kInvalidArgument) << outcomes[0].message;
}

}  // namespace
}  // namespace conclave
