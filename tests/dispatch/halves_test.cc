// Dispatch and combine in halves: batches of two workspaces under way at once, epochs of the
// placement that change between two calls, and the same bits as one after the other.
#include "dispatch/ep_problem.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::EpCase;
using testing::TokenInput;

// One batch on its way through a dispatcher.
class Batch {
 public:
  Batch(const dispatch::Dispatcher& dispatcher, const EpCase& c)
      : dispatcher_(dispatcher), case_(c), workspace_(dispatcher.workspace_bytes()) {}

  void begin_dispatch(const TokenInput& input, const PlacementEpoch* epoch = nullptr) {
    workspace_.poison();
    input_ = &input;
    rows_ = testing::bundle_rows(input, case_.hidden);
    dispatcher_.begin_dispatch(
        {.routing = routing(),
         .rows = {reinterpret_cast<const std::byte*>(rows_.data()), input.num_tokens,
                  testing::float_row_bytes(case_.hidden), DType::kF32},
         .epoch = epoch},
        workspace_.span(), executor_);
  }
  void run(const std::vector<int32_t>& experts) {
    const ExpertBatch batch = dispatcher_.await_dispatch(workspace_.span());
    results_ = testing::run_experts(batch, case_.hidden, experts);
    out_.assign(input_->hidden.size(), -77.0F);
    dispatcher_.begin_combine(combine_args(), workspace_.span(), executor_);
  }
  const std::vector<float>& finish() {
    dispatcher_.await_combine(combine_args(), workspace_.span(), executor_);
    return out_;
  }

 private:
  Routing routing() const {
    return {input_->num_tokens, case_.top_k, input_->ids.data(), input_->weights.data()};
  }
  dispatch::CombineArgs combine_args() {
    return {.output = {OutputTag::kPerRow, results_.data(), case_.hidden},
            .routing = routing(),
            .out = {out_.data(), DType::kF32, Shape{input_->num_tokens, case_.hidden}, 0}};
  }

  const dispatch::Dispatcher& dispatcher_;
  EpCase case_;
  testing::PoisonedWorkspace workspace_;
  testing::SerialExecutor executor_;
  const TokenInput* input_ = nullptr;
  std::vector<float> rows_, results_, out_;
};

std::vector<int32_t> experts_of(const EpCase& c, int32_t rank) {
  return make_placement(c.experts, {.ep_size = c.ranks, .placement = c.placement})
      .experts_of[static_cast<size_t>(rank)];
}

template <class Body>
void on_ranks(const EpCase& c, const Body& body) {
  const auto outcomes =
      testing::run_ranks(make_local_group({.num_ranks = c.ranks, .timeout = 20s}),
                         [&](int32_t rank, Communicator& communicator) {
                           body(rank, *testing::make_dispatcher(c, rank, communicator));
                         });
  EXPECT_EQ(testing::first_failure(outcomes), "") << testing::describe(c);
}

std::vector<EpCase> cases() {
  std::vector<EpCase> all;
  for (const int32_t ranks : {1, 2, 3}) {
    for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
      for (const auto combine : {EpCombine::kUnreduced, EpCombine::kReducedPerRank}) {
        all.push_back({.ranks = ranks, .experts = 7, .transport = transport, .combine = combine});
      }
    }
  }
  return all;
}

TEST(DispatchHalves, TwoBatchesUnderWay_HaveTheBitsOfOneAfterTheOther) {
  // None, one and many tokens, so that some rank is idle in each batch.
  const std::vector<std::vector<int64_t>> tokens = {{5, 0, 16}, {1, 16, 0}, {0, 0, 0}, {16, 1, 7}};
  for (const EpCase& c : cases()) {
    std::vector<std::vector<TokenInput>> inputs;
    std::vector<std::vector<std::vector<float>>> expected;
    for (size_t i = 0; i < tokens.size(); ++i) {
      inputs.push_back(testing::random_inputs(c, tokens[i], 100 + static_cast<uint32_t>(i) * 10));
      const auto run = testing::run_ep(c, {inputs.back()});
      ASSERT_EQ(testing::first_failure(run.outcomes), "");
      expected.push_back(run.outputs);
    }
    on_ranks(c, [&](int32_t rank, const dispatch::Dispatcher& dispatcher) {
      const auto at = static_cast<size_t>(rank);
      const std::vector<int32_t> experts = experts_of(c, rank);
      std::array<Batch, 2> batches = {Batch(dispatcher, c), Batch(dispatcher, c)};
      for (size_t pair = 0; pair < inputs.size(); pair += 2) {
        for (size_t i = 0; i < 2; ++i) batches[i].begin_dispatch(inputs[pair + i][at]);
        for (size_t i = 0; i < 2; ++i) batches[i].run(experts);
        for (size_t i = 0; i < 2; ++i) EXPECT_EQ(batches[i].finish(), expected[pair + i][at]);
      }
    });
  }
}

// The batch that began last may be finished first: halves belong to their workspace.
TEST(DispatchHalves, BatchesAwaitedInTheOtherOrder_AreKeptApart) {
  for (const EpCase& c : cases()) {
    const auto first = testing::random_inputs(c, {4, 9, 0}, 7);
    const auto second = testing::random_inputs(c, {8, 0, 3}, 17);
    const auto expected_first = testing::run_ep(c, {first}).outputs;
    const auto expected_second = testing::run_ep(c, {second}).outputs;
    on_ranks(c, [&](int32_t rank, const dispatch::Dispatcher& dispatcher) {
      const auto at = static_cast<size_t>(rank);
      const std::vector<int32_t> experts = experts_of(c, rank);
      Batch a(dispatcher, c);
      Batch b(dispatcher, c);
      a.begin_dispatch(first[at]);
      b.begin_dispatch(second[at]);
      b.run(experts);
      a.run(experts);
      EXPECT_EQ(b.finish(), expected_second[at]);
      EXPECT_EQ(a.finish(), expected_first[at]);
    });
  }
}

// Expert e lies on rank (e + shift) mod ranks: every epoch moves each expert on by a rank.
std::shared_ptr<const PlacementEpoch> shifted(const EpCase& c, int32_t shift) {
  ParallelSpec parallel{.ep_size = c.ranks, .placement = PlacementStrategy::kCustom};
  for (int64_t e = 0; e < c.experts; ++e) {
    parallel.rank_of.push_back(static_cast<int32_t>((e + shift) % c.ranks));
  }
  auto epoch = std::make_shared<PlacementEpoch>(*first_epoch(c.experts, parallel));
  epoch->number = static_cast<uint64_t>(shift);
  return epoch;
}

TEST(DispatchEpochs, ExpertsThatMoveBetweenTwoCalls_ChangeNoBit) {
  for (const EpTransport transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    const EpCase c{.ranks = 3, .experts = 9, .top_k = 3, .transport = transport};
    const auto inputs = testing::random_inputs(c, {16, 3, 8}, 5);
    const auto expected = testing::plain_layers(c, inputs);
    on_ranks(c, [&](int32_t rank, const dispatch::Dispatcher& dispatcher) {
      const auto at = static_cast<size_t>(rank);
      Batch batch(dispatcher, c);
      for (const int32_t shift : {0, 1, 2, 4}) {
        const auto epoch = shifted(c, shift);
        batch.begin_dispatch(inputs[at], epoch.get());
        batch.run(epoch->experts.experts_of[at]);
        EXPECT_EQ(batch.finish(), expected[at]) << "epoch " << shift;
      }
    });
  }
}

TEST(DispatchEpochs, RanksInDifferentEpochs_AllGetAMismatch) {
  for (const EpTransport transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    const EpCase c{.ranks = 2, .experts = 4, .transport = transport};
    const auto inputs = testing::random_inputs(c, {4}, 5);
    const auto outcomes = testing::run_ranks(
        make_local_group({.num_ranks = 2, .timeout = 20s}),
        [&](int32_t rank, Communicator& communicator) {
          const auto dispatcher = testing::make_dispatcher(c, rank, communicator);
          Batch batch(*dispatcher, c);
          const auto epoch = shifted(c, rank);
          batch.begin_dispatch(inputs[static_cast<size_t>(rank)], epoch.get());
          batch.run(epoch->experts.experts_of[static_cast<size_t>(rank)]);
        });
    for (const testing::RankOutcome& outcome : outcomes) {
      ASSERT_TRUE(outcome.code);
      EXPECT_EQ(to_string(*outcome.code), "kCommMismatch") << outcome.message;
      EXPECT_NE(outcome.message.find("placement epoch"), std::string::npos) << outcome.message;
    }
  }
}

TEST(DispatchEpochs, EpochThatDoesNotFitThePlan_IsRefusedBeforeAnythingIsSent) {
  const EpCase c{.ranks = 2, .experts = 4};
  on_ranks(c, [&](int32_t rank, const dispatch::Dispatcher& dispatcher) {
    const auto inputs = testing::random_inputs(c, {3}, 5);
    const auto crowded = first_epoch(
        4, {.ep_size = 2, .placement = PlacementStrategy::kCustom, .rank_of = {0, 0, 0, 1}});
    Batch batch(dispatcher, c);
    const auto at = static_cast<size_t>(rank);
    try {
      batch.begin_dispatch(inputs[at], crowded.get());
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("places for 2"), std::string::npos) << error.what();
    }
    batch.begin_dispatch(inputs[at]);
    batch.run(experts_of(c, rank));
    batch.finish();
  });
}

// On one rank the same, with the experts that it holds in another order.
TEST(DispatchEpochs, OneRank_FollowsTheOrderOfItsExperts) {
  const EpCase c{.experts = 4};
  const auto dispatcher = dispatch::dispatcher_catalog()
                              .find("local", "dispatcher")
                              .make(testing::problem_of(c, 0, nullptr));
  auto epoch = std::make_shared<PlacementEpoch>(*first_epoch(4, {}));
  epoch->number = 1;
  epoch->experts.experts_of = {{2, 0, 3, 1}};
  epoch->experts.local_of = {1, 3, 0, 2};
  const auto inputs = testing::random_inputs(c, {9}, 5);
  Batch batch(*dispatcher, c);
  batch.begin_dispatch(inputs[0], epoch.get());
  batch.run(epoch->experts.experts_of[0]);
  EXPECT_EQ(batch.finish(), testing::plain_layers(c, inputs)[0]);
}

TEST(DispatchEpochs, PlacementOfOtherSizes_IsNotPlanned) {
  const EpCase c{.ranks = 2, .experts = 4};
  const auto group = make_local_group({.num_ranks = 2});
  auto problem = testing::problem_of(c, 0, group[0].get());
  problem.epoch = first_epoch(5, {.ep_size = 2});
  for (const char* name : {"local", "ep.variable"}) {
    const auto& row = dispatch::dispatcher_catalog().find(name, "dispatcher");
    EXPECT_NE(row.supports(problem).reason().find("5 experts on 2 ranks"), std::string::npos)
        << name;
  }
}

}  // namespace
}  // namespace conclave
