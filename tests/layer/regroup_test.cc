// Layers that go from some ranks to others while they live: the ranks give each other what they
// have, no bit of a result changes, and the layer before serves on.
#include "conclave/regroup.h"

#include "layer/moving_layers.h"
#include "layer/split_specs.h"
#include "support/regroup_ranks.h"
#include "support/thread_groups.h"
#include "support/thread_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::ChangingRank;
using testing::make_layer;
using testing::make_spec;
using testing::NamedSpec;
using testing::on_grid;
using testing::random_tensor;
using testing::RankChange;
using testing::RegroupCase;
using testing::run_layer;
using testing::same_bits;
using Group = std::vector<std::unique_ptr<Communicator>>;

// A thread for each rank of a change, with the communicators of its groups.
void on_changing_ranks(const RankChange& change, const testing::ThreadGroups& groups,
                       const std::function<void(const ChangingRank&)>& body) {
  const auto make = [&](size_t ranks) {
    return groups.make({.num_ranks = static_cast<int32_t>(ranks), .timeout = 30s});
  };
  const Group before = make(change.before.size());
  const Group after = make(change.after.size());
  const auto of = [](const Group& group, int32_t place) {
    return place < 0 ? nullptr : group[static_cast<size_t>(place)].get();
  };
  const auto outcomes = testing::run_ranks(
      make(static_cast<size_t>(change.everyone)), [&](int32_t rank, Communicator& everyone) {
        body({.change = change,
              .everyone = everyone,
              .before = of(before, testing::place_in(change.before, rank)),
              .after = of(after, testing::place_in(change.after, rank))});
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

const testing::ThreadGroups& local() { return testing::kThreadGroups[0]; }

TEST(Regroup, EveryFamilyOfWeights_HasTheBitsOfOneRank) {
  const std::vector<RankChange> changes = testing::rank_changes();
  size_t next = 0;
  for (const auto& [name, spec] : testing::weight_families()) {
    // All changes for one family, two of them for each other one.
    for (size_t i = 0; i < (next == 0 ? changes.size() : 2); ++i) {
      SCOPED_TRACE(name);
      const RegroupCase given{.spec = spec, .replicas = static_cast<int32_t>(i % 3)};
      on_changing_ranks(changes[next++ % changes.size()], local(),
                        [&](const ChangingRank& rank) { testing::expect_change(given, rank); });
    }
  }
}

// What every rank has whole comes to those that join: shared experts, projections, routers.
TEST(Regroup, EveryPartOfALayer_ComesToRanksThatJoin) {
  std::vector<NamedSpec> specs = testing::split_specs(24, DType::kBF16);
  MoeSpec hash = make_spec(5, 3, 40, 24, DType::kF32);
  hash.router.logits_dtype = DType::kF32;
  hash.router.has_logit_bias = true;
  hash.router.has_selection_bias = true;
  hash.router.has_expert_scale = true;
  hash.router.has_global_scale = true;
  specs.emplace_back("Biases", hash);
  const std::vector<RankChange> changes = {{"3 to 3, two others", 5, {0, 1, 2}, {4, 0, 3}},
                                           {"1 to another", 2, {0}, {1}}};
  for (const auto& [name, spec] : specs) {
    SCOPED_TRACE(name);
    const RegroupCase given{.spec = spec, .replicas = 1};
    for (const RankChange& change : changes) {
      on_changing_ranks(change, local(),
                        [&](const ChangingRank& rank) { testing::expect_change(given, rank); });
    }
  }
}

TEST(Regroup, OverTcp_HasTheBitsOfOneRank) {
  for (const testing::ThreadGroups& groups : testing::kThreadGroups) {
    SCOPED_TRACE(groups.name);
    const RegroupCase given{.spec = testing::split_specs(24, DType::kBF16)[1].second,
                            .replicas = 1,
                            .regroup = {.piece_bytes = 4096}};
    for (const RankChange& change : testing::rank_changes()) {
      on_changing_ranks(change, groups,
                        [&](const ChangingRank& rank) { testing::expect_change(given, rank); });
    }
  }
}

// Experts are taken from the places that they have moved to, and spare places are there afterwards.
TEST(Regroup, ExpertsThatHaveMoved_AreTakenFromWhereTheyLie) {
  const MoeSpec spec = make_spec(7, 3, 40, 24, DType::kBF16);
  const RegroupCase given{.spec = spec,
                          .options = {.max_tokens = 32, .spare_experts = 2},
                          .replicas = 1,
                          .prepare = [&](MoeLayer& layer) {
                            testing::SlotDealer dealer(
                                7,
                                testing::counts_of(7, {.ep_size = layer.parallel().ep_size,
                                                       .num_redundant_experts = 1}),
                                1, 3);
                            layer.update_placement(dealer.deal());
                            ASSERT_GT(layer.placement_epoch(), 0U);
                          }};
  on_changing_ranks({"3 to 2, one other", 4, {0, 1, 2}, {3, 1}}, local(),
                    [&](const ChangingRank& rank) { testing::expect_change(given, rank); });
}

// Uneven: all on one rank but one expert, and a replica of that.
TEST(Regroup, SplitThatIsGiven_IsTaken) {
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  const RankChange change{"2 to 3", 3, {0, 1}, {0, 1, 2}};
  on_changing_ranks(change, local(), [&](const ChangingRank& rank) {
    RegroupCase given{.spec = spec};
    given.regroup.parallel = ParallelSpec{.ep_size = 3,
                                          .ep_rank = rank.next_rank(),
                                          .placement = PlacementStrategy::kCustom,
                                          .rank_of = {2, 2, 2, 0, 2, 2, 2},
                                          .num_redundant_experts = 1,
                                          .replica_of = {3}};
    testing::expect_change(given, rank);
  });
}

// Which experts a rank reads of a source.
class NotedSource final : public WeightSource {
 public:
  explicit NotedSource(const WeightSource& inner) : inner_(inner) {}
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  void read(WeightId id, int64_t index, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    {
      const std::lock_guard lock(mutex_);
      if (id.mlp() != WeightMlp::kRouted) ++others_;
      if (std::ranges::find(experts_, index) == experts_.end()) experts_.push_back(index);
    }
    inner_.read(id, index, block, destination);
  }
  std::vector<int64_t> experts() const { return experts_; }
  int others() const { return others_; }

 private:
  const WeightSource& inner_;
  mutable std::mutex mutex_;
  mutable std::vector<int64_t> experts_;
  mutable int others_ = 0;
};

// A rank that has died is replaced: only what it had is read, by those that are to have it.
TEST(Regroup, ExpertsThatNobodyHas_AreTheOnlyOnesRead) {
  const MoeSpec spec = make_spec(9, 3, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const Tensor hidden = random_tensor(DType::kBF16, 21, 40, 5);
  const Tensor expected = run_layer(make_layer(spec).layer, hidden.view(), DType::kBF16).out;
  const Group next = make_local_group({.num_ranks = 3, .timeout = 30s});
  std::vector<std::unique_ptr<Context>> old_contexts(3);
  std::vector<std::optional<MoeLayer>> old(3);
  const auto made = testing::run_ranks(
      make_local_group({.num_ranks = 3, .timeout = 30s}), [&](int32_t rank, Communicator& ranks) {
        const auto at = static_cast<size_t>(rank);
        old_contexts[at] =
            std::make_unique<Context>(ContextOptions{.num_threads = 1, .communicator = &ranks});
        old[at].emplace(MoeLayer::create(*old_contexts[at], spec, *source, {},
                                         {.ep_size = 3, .ep_rank = rank}));
      });
  EXPECT_EQ(testing::first_failure(made), "");
  old[1].reset();
  std::mutex mutex;
  std::vector<int64_t> read;
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = 3, .timeout = 30s}),
      [&](int32_t rank, Communicator& everyone) {
        const auto at = static_cast<size_t>(rank);
        const Context context({.num_threads = 1, .communicator = next[at].get()});
        const NotedSource noted(*source);
        RegroupOptions options{.everyone = &everyone};
        const auto go = [&] {
          return old[at] ? regroup(*old[at], context, options)
                         : join_layer(context, spec, {}, options);
        };
        try {
          go();
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kTensorMissing);
          EXPECT_NE(std::string(error.what()).find("expert 3"), std::string::npos) << error.what();
        }
        // All have seen that, and their communicator still serves.
        options.source = &noted;
        const MoeLayer after = go();
        EXPECT_TRUE(same_bits(run_layer(after, hidden.view(), DType::kBF16).out, expected));
        EXPECT_EQ(noted.others(), 0);
        const std::lock_guard lock(mutex);
        for (const int64_t expert : noted.experts()) read.push_back(expert);
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
  std::ranges::sort(read);
  EXPECT_EQ(read, (std::vector<int64_t>{3, 4, 5}));
}

// Ranks forward with the layer before on one thread while another takes it to more ranks; then all
// take up the new one at the same forward.
TEST(Regroup, ForwardsGoOnBeside) {
  const MoeSpec spec = testing::split_specs(24, DType::kBF16)[1].second;
  const auto source = make_synthetic_source(spec, 11);
  const Tensor hidden = random_tensor(DType::kBF16, 9, 40, 5);
  const Tensor expected = run_layer(make_layer(spec).layer, hidden.view(), DType::kBF16).out;
  const Group old = make_local_group({.num_ranks = 2, .timeout = 30s});
  const Group next = make_local_group({.num_ranks = 3, .timeout = 30s});
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = 3, .timeout = 30s}), [&](int32_t rank, Communicator& world) {
        const auto at = static_cast<size_t>(rank);
        const Context context({.num_threads = 1, .communicator = next[at].get()});
        const RegroupOptions options{
            .everyone = &world, .processor_share = 0.5, .piece_bytes = 4096};
        if (rank == 2) {
          const MoeLayer after = join_layer(context, spec, {}, options);
          EXPECT_TRUE(same_bits(run_layer(after, hidden.view(), DType::kBF16).out, expected));
          return;
        }
        const Context narrow({.num_threads = 1, .communicator = old[at].get()});
        const MoeLayer before =
            MoeLayer::create(narrow, spec, *source, {}, {.ep_size = 2, .ep_rank = rank});
        std::optional<MoeLayer> after;
        std::atomic<bool> is_there{false};
        std::thread beside([&] {
          after.emplace(regroup(before, context, options));
          is_there = true;
        });
        // Ranks say in turn whether they are ready, as an application would in its own step.
        int64_t all_ready = 0;
        int forwards = 0;
        while (all_ready == 0) {
          EXPECT_TRUE(same_bits(run_layer(before, hidden.view(), DType::kBF16).out, expected));
          ++forwards;
          const int64_t waits = is_there ? 0 : 1;
          int64_t most = 0;
          old[at]->all_reduce(std::as_bytes(std::span(&waits, 1)),
                              std::as_writable_bytes(std::span(&most, 1)), DType::kI64,
                              ReduceOp::kMax, "ready");
          all_ready = most == 0 ? 1 : 0;
        }
        beside.join();
        EXPECT_GT(forwards, 0);
        EXPECT_TRUE(same_bits(run_layer(*after, hidden.view(), DType::kBF16).out, expected));
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

// Slices stay: two groups of everyone, one for each, and both have the layer or none.
TEST(Regroup, TensorParallelRanks_ChangeSliceBySlice) {
  const MoeSpec spec = testing::split_specs(24, DType::kBF16)[1].second;
  const auto source = make_synthetic_source(spec, 11);
  const Tensor hidden = random_tensor(DType::kBF16, 9, 40, 5);
  Tensor expected;
  on_grid(1, 2, [&](const testing::GridRank& rank) {
    const Context context(rank.context_options());
    const MoeLayer layer = MoeLayer::create(context, spec, *source, {}, rank.in({.tp_size = 2}));
    Tensor out = run_layer(layer, hidden.view(), DType::kBF16).out;
    if (rank.tp_rank == 0) expected = std::move(out);
  });
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails ? "one rank fails" : "all go");
    Group everyone[2];
    for (Group& group : everyone) group = make_local_group({.num_ranks = 3, .timeout = 30s});
    const Group slices = make_local_group({.num_ranks = 2, .timeout = 30s});
    on_grid(3, 2, [&](const testing::GridRank& rank) {
      const auto tp = static_cast<size_t>(rank.tp_rank);
      const Context context(rank.context_options());
      RegroupOptions options{.everyone = everyone[tp][static_cast<size_t>(rank.ep_rank)].get()};
      // This rank alone is asked for what it cannot do.
      if (fails && rank.ep_rank == 1 && rank.tp_rank == 1) options.processor_share = -1;
      std::optional<Context> alone;
      std::optional<MoeLayer> before;
      if (rank.ep_rank == 0) {
        alone.emplace(ContextOptions{.num_threads = 1, .tensor_communicator = slices[tp].get()});
        before.emplace(
            MoeLayer::create(*alone, spec, *source, {}, {.tp_size = 2, .tp_rank = rank.tp_rank}));
      }
      const auto begin = std::chrono::steady_clock::now();
      std::optional<MoeLayer> after;
      try {
        after.emplace(before ? regroup(*before, context, options)
                             : join_layer(context, spec, {}, options));
        EXPECT_FALSE(fails);
      } catch (const Error& error) {
        EXPECT_TRUE(fails) << error.what();
        EXPECT_NE(error.code(), ErrorCode::kCommTimeout) << error.what();
      }
      EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
      for (const auto& layer : {&before, &after}) {
        if (!*layer) continue;
        EXPECT_TRUE(same_bits(run_layer(**layer, hidden.view(), DType::kBF16).out, expected));
      }
    });
  }
}

}  // namespace
}  // namespace conclave
