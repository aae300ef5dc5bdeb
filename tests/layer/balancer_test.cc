// A balancer that counts, adds up over ranks, decides and moves, while every forward keeps its
// bits.
#include "conclave/balancer.h"

#include "layer/balancer/load_window.h"
#include "layer/moving_layers.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using testing::by_rank;
using testing::code_of;
using testing::forward;
using testing::GridRank;
using testing::make_layer;
using testing::make_spec;
using testing::on_grid;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;
using testing::SecondGroups;

TEST(LoadWindow, LastSteps_AreAddedUp_AndOlderOnesAreForgotten) {
  LoadWindow window(2, 3);
  const auto step = [&](int64_t first, int64_t second) {
    window.now()[0] += first;
    window.now()[1] += second;
    window.close_step();
    return std::vector<int64_t>(window.sums().begin(), window.sums().end());
  };
  EXPECT_EQ(step(1, 10), (std::vector<int64_t>{1, 10}));
  EXPECT_EQ(step(2, 0), (std::vector<int64_t>{3, 10}));
  EXPECT_EQ(step(4, 0), (std::vector<int64_t>{7, 10}));
  EXPECT_EQ(step(8, 5), (std::vector<int64_t>{14, 5}));
  EXPECT_EQ(step(0, 0), (std::vector<int64_t>{12, 5}));
}

class LinesOfLog final : public LogSink {
 public:
  void log(LogLevel, std::string_view message) override {
    const std::lock_guard lock(mutex_);
    lines_.emplace_back(message);
  }
  std::vector<std::string> lines() const {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

// Experts 0 and 1, on one rank at first, get most rows.
MoeSpec hot_spec() {
  MoeSpec spec = make_spec(8, 2, 40, 24, DType::kBF16);
  spec.router.name = "simulated";
  spec.router.simulated = {.distribution = SimulatedDistribution::kZipf, .seed = 3};
  return spec;
}

class BalancerOfTwo : public ::testing::TestWithParam<bool> {};

TEST_P(BalancerOfTwo, HotExperts_AreSpreadOverRanks_AndEveryForwardKeepsItsBits) {
  const bool use_async = GetParam();
  const MoeSpec spec = hot_spec();
  const auto first = make_synthetic_source(spec, 11);
  const auto second_weights = make_synthetic_source(spec, 12);
  const ParallelSpec split{.ep_size = 2, .num_redundant_experts = 2};
  const Tensor hidden = random_tensor(DType::kBF16, 64, 40, 1);
  SecondGroups second(2, 1);
  std::vector<std::vector<std::vector<int32_t>>> reached(2);
  on_grid(2, 1, [&](const GridRank& rank) {
    LinesOfLog log;
    ContextOptions context_options = rank.context_options();
    context_options.log = &log;
    const Context context(context_options);
    const LayerOptions options{.spare_experts = use_async ? 1 : 0};
    MoeLayer one = MoeLayer::create(context, spec, *first, options, rank.in(split));
    MoeLayer two = MoeLayer::create(context, spec, *second_weights, options, rank.in(split));
    const Tensor expected_one = forward(one, hidden);
    const Tensor expected_two = forward(two, hidden);
    Balancer balancer(context, {&one, &two},
                      {.communicator = second.of(rank).get(),
                       .window_size = 5,
                       .step_interval = 12,
                       .log_balancedness = true,
                       .log_balancedness_interval = 4,
                       .use_async = use_async,
                       .processor_share = 1});
    const auto step = [&] {
      const auto run = [&](const MoeLayer& layer, size_t index, const Tensor& expected) {
        const auto output =
            run_layer(layer, hidden.view(), DType::kBF16, {.expert_load = balancer.load(index)});
        ASSERT_TRUE(same_bits(output.out, expected));
      };
      run(one, 0, expected_one);
      run(two, 1, expected_two);
      balancer.step();
    };
    step();
    const double before = balancer.status().balancedness;
    // As many steps on each rank, whatever it knows already.
    for (int i = 0; i < 90; ++i) {
      step();
      // So that all copies get a core, whatever else runs here.
      std::this_thread::sleep_for(1ms);
    }
    EXPECT_GE(balancer.status().rebalances, 3);
    EXPECT_GT(balancer.status().experts_moved, 0);
    EXPECT_GT(balancer.status().balancedness, before);
    EXPECT_GT(balancer.status().balancedness, 0.9);
    EXPECT_GT(one.placement_epoch(), 0U);
    EXPECT_GT(two.placement_epoch(), 0U);
    reached[static_cast<size_t>(rank.ep_rank)] = by_rank(one.slots());
    const auto lines = log.lines();
    const auto has = [&](const char* text) {
      return std::ranges::any_of(
          lines, [&](const std::string& line) { return line.find(text) != std::string::npos; });
    };
    EXPECT_TRUE(has("balancer: step 4, balancedness"));
    EXPECT_FALSE(has("balancer: step 5,"));
    EXPECT_TRUE(has("balancer: layer 1,"));
  });
  EXPECT_EQ(reached[0], reached[1]);
}

INSTANTIATE_TEST_SUITE_P(Ways, BalancerOfTwo, ::testing::Bool(),
                         [](const auto& c) { return c.param ? "BesideForwards" : "Between"; });

// Counts of padding would move experts that nobody needs.
TEST(BalancerLoad, ValidTokensOnly_AreCounted) {
  const MoeSpec spec = make_spec(4, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const Context context({.num_threads = 1});
  MoeLayer layer = MoeLayer::create(context, spec, *source);
  auto alone = make_local_group({.num_ranks = 1});
  Balancer balancer(context, {&layer}, {.communicator = alone.front().get()});
  const Tensor hidden = random_tensor(DType::kBF16, 20, 40, 1);
  const int64_t valid = 7;
  Tensor out(DType::kBF16, {20, 40});
  layer.forward({.hidden = hidden.view(),
                 .num_tokens = &valid,
                 .out = out.view(),
                 .expert_load = balancer.load(0)});
  const auto load = balancer.load(0);
  EXPECT_EQ(std::accumulate(load.begin(), load.end(), int64_t{0}), 14);
  balancer.step();
  EXPECT_EQ(std::accumulate(load.begin(), load.end(), int64_t{0}), 0) << "a new step";
}

TEST(BalancerLoad, NoRowsAtAll_MoveNothing) {
  const MoeSpec spec = make_spec(4, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  SecondGroups second(2, 1);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.spare_experts = 1}, rank.in({.ep_size = 2}));
    Balancer balancer(context, {&layer}, {.communicator = second.of(rank).get()});
    balancer.rebalance();
    for (int i = 0; i < 800; ++i) {
      balancer.step();
      rank.communicator->barrier("step");
    }
    EXPECT_EQ(balancer.status().rebalances, 2) << "asked for, and after a quarter of 3000 steps";
    EXPECT_EQ(layer.placement_epoch(), 0U);
  });
}

TEST(BalancerErrors, WhatHasNoMeaning_IsNamed) {
  const MoeSpec spec = make_spec(4, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const Context context({.num_threads = 1});
  MoeLayer layer = MoeLayer::create(context, spec, *source);
  auto alone = make_local_group({.num_ranks = 1});
  Communicator* const own = alone.front().get();
  const auto code = [&](const std::vector<MoeLayer*>& layers, const BalancerOptions& options) {
    return code_of([&] { const Balancer balancer(context, layers, options); });
  };
  EXPECT_EQ(code({&layer}, {}), ErrorCode::kInvalidArgument) << "no communicator";
  EXPECT_EQ(code({}, {.communicator = own}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({nullptr}, {.communicator = own}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({&layer}, {.communicator = own, .rule = "best"}), ErrorCode::kUnknownName);
  EXPECT_EQ(code({&layer}, {.communicator = own, .window_size = 0}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({&layer}, {.communicator = own, .step_interval = -1}),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({&layer}, {.communicator = own, .log_balancedness_interval = 0}),
            ErrorCode::kInvalidArgument);
  Balancer balancer(context, {&layer}, {.communicator = own});
  EXPECT_EQ(code_of([&] { static_cast<void>(balancer.load(1)); }), ErrorCode::kInvalidArgument);
}

// A rank that is gone ends the balancing, not the layer.
// Not when the first rebalance is due, which may be thousands of steps later.
TEST(BalancerErrors, LayersWhoseExpertsStay_AreRefusedAtOnce) {
  const Checkpoint checkpoint =
      Checkpoint::open("testdata/mixtral-tiny", {.access = FileAccess::kMap});
  const CheckpointLayer& file = checkpoint.layers().front();
  const auto source = checkpoint.layer_source(file.index);
  const auto group = make_local_group({.num_ranks = 1});
  const Context context;
  for (const WeightUse use : {WeightUse::kPacked, WeightUse::kInPlace}) {
    MoeLayer layer = MoeLayer::create(context, file.spec, *source, {.weights = use});
    const ErrorCode code =
        code_of([&] { Balancer(context, {&layer}, {.communicator = group.front().get()}); });
    EXPECT_EQ(code, use == WeightUse::kInPlace ? ErrorCode::kUnsupported : ErrorCode{0});
  }
}

TEST(BalancerErrors, RankThatIsGone_IsThrownOnce_AndForwardsGoOn) {
  const MoeSpec spec = hot_spec();
  const auto source = make_synthetic_source(spec, 11);
  const Tensor hidden = random_tensor(DType::kBF16, 16, 40, 1);
  SecondGroups second(2, 1);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.spare_experts = 1}, rank.in({.ep_size = 2}));
    const Tensor before = forward(layer, hidden);
    Balancer balancer(context, {&layer},
                      {.communicator = second.of(rank).get(), .step_interval = 4});
    if (rank.ep_rank == 1) second.of(rank)->abort("gone");
    int thrown = 0;
    for (int i = 0; i < 30; ++i) {
      EXPECT_TRUE(same_bits(forward(layer, hidden), before));
      if (code_of([&] { balancer.step(); }) != ErrorCode{0}) ++thrown;
    }
    EXPECT_EQ(thrown, 1);
  });
}

}  // namespace
}  // namespace conclave
