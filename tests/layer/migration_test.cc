// Experts that move while forwards go on: every forward has the bits of a layer whose experts stay,
// all ranks take up new places at the same one, and whatever goes wrong the old places serve.
#include "layer/faulty_communicator.h"
#include "layer/moving_layers.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::by_rank;
using testing::code_of;
using testing::counts_of;
using testing::FaultyCommunicator;
using testing::forward;
using testing::GridRank;
using testing::make_layer;
using testing::make_spec;
using testing::NamedSpec;
using testing::on_grid;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::same_bits;
using testing::SecondGroups;
using testing::SlotDealer;

constexpr auto kCustom = PlacementStrategy::kCustom;

// The epoch of each forward of each rank.
class EpochLog {
 public:
  explicit EpochLog(size_t ranks) : epochs_(ranks) {}
  void add(size_t rank, uint64_t epoch) {
    const std::lock_guard lock(mutex_);
    epochs_[rank].push_back(epoch);
  }
  void expect_equal() const {
    for (const auto& of_rank : epochs_) EXPECT_EQ(of_rank, epochs_.front());
  }

 private:
  std::mutex mutex_;
  std::vector<std::vector<uint64_t>> epochs_;
};

struct StreamCase {
  const char* name;
  ParallelSpec parallel;
  int32_t spare = 1;
  ChunkOrder order = ChunkOrder::kInTurn;
  bool from_source = false;
};

void PrintTo(const StreamCase& c, std::ostream* out) { *out << c.name; }

const StreamCase kStreams[] = {
    {"TwoRanks", {.ep_size = 2}},
    {"ThreeRanksReplicas", {.ep_size = 3, .num_redundant_experts = 2}},
    {"ThreeRanksByTwos", {.ep_size = 3, .num_redundant_experts = 2}, 2, ChunkOrder::kByTwos},
    {"FourRanksOneEmpty", {.ep_size = 4, .placement = kCustom, .rank_of = {0, 1, 3, 0, 1, 3}}, 2},
    {"FromSource", {.ep_size = 2, .num_redundant_experts = 1}, 1, ChunkOrder::kInTurn, true},
    {"Slices", {.ep_size = 2, .num_redundant_experts = 1, .tp_size = 2}},
};

class ForwardsUnderMigration : public ::testing::TestWithParam<StreamCase> {};

// Forwards until all ranks have the last epoch: they know by the same forward.
void forward_until(uint64_t epoch, const MoeLayer& layer, const Tensor& hidden,
                   const Tensor& expected, const std::function<void()>& after) {
  const auto until = std::chrono::steady_clock::now() + 60s;
  while (layer.placement_epoch() < epoch && std::chrono::steady_clock::now() < until) {
    ASSERT_TRUE(same_bits(forward(layer, hidden), expected));
    after();
  }
  ASSERT_EQ(layer.placement_epoch(), epoch);
}

void run_stream(const NamedSpec& named, const StreamCase& c) {
  SCOPED_TRACE(named.first);
  const MoeSpec& spec = named.second;
  // Ranks have tokens of their own, one of them none.
  constexpr std::array<int64_t, 4> kTokens = {11, 0, 5, 3};
  const auto source = make_synthetic_source(spec, 11);
  SecondGroups second(c.parallel.ep_size, c.parallel.tp_size);
  EpochLog log(static_cast<size_t>(c.parallel.ep_size * c.parallel.tp_size));
  on_grid(c.parallel.ep_size, c.parallel.tp_size, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = MoeLayer::create(
        context, spec, *source, {.max_tokens = 4, .chunk_order = c.order, .spare_experts = c.spare},
        rank.in(c.parallel));
    const Tensor hidden = random_tensor(DType::kBF16, kTokens[static_cast<size_t>(rank.ep_rank)],
                                        spec.hidden_size, 1);
    const Tensor expected = forward(layer, hidden);
    SlotDealer dealer(spec.num_experts, counts_of(spec.num_experts, c.parallel),
                      c.parallel.num_redundant_experts, 9);
    const MigrationOptions options{.communicator = second.of(rank).get(),
                                   .source = c.from_source ? source.get() : nullptr,
                                   .processor_share = 1,
                                   .piece_bytes = 4096};
    const auto place = static_cast<size_t>(rank.ep_rank * c.parallel.tp_size + rank.tp_rank);
    for (int step = 0; step < 4; ++step) {
      const ExpertSlots slots = dealer.deal();
      const uint64_t first = layer.placement_epoch();
      Migration migration(layer, slots, options);
      const auto last = first + static_cast<uint64_t>(migration.status().rounds);
      forward_until(last, layer, hidden, expected,
                    [&] { log.add(place, layer.placement_epoch()); });
      if (migration.status().rounds == 0) migration.finish();
      migration.check();
      EXPECT_TRUE(migration.status().is_done);
      EXPECT_EQ(migration.status().rounds_done, migration.status().rounds);
      EXPECT_EQ(by_rank(layer.slots()), by_rank(slots));
    }
  });
  log.expect_equal();
}

TEST_P(ForwardsUnderMigration, EveryForward_HasTheBitsOfBefore_AndAllRanksSwitchAtOne) {
  for (const NamedSpec& named : testing::weight_families()) run_stream(named, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Splits, ForwardsUnderMigration, ::testing::ValuesIn(kStreams),
                         [](const auto& c) { return std::string(c.param.name); });

// Two ranks with six experts of a plain layer, and a way on which three change ranks.
class MigrationOfTwo : public ::testing::Test {
 protected:
  static constexpr int64_t kHidden = 40;
  const MoeSpec spec_ = make_spec(6, 2, kHidden, 24, DType::kBF16);
  const std::unique_ptr<WeightSource> source_ = make_synthetic_source(spec_, 11);
  const Tensor hidden_ = random_tensor(DType::kBF16, 11, kHidden, 1);
  const ExpertSlots wanted_{
      .num_experts = 6, .logical_of = {5, 1, 4, 3, 0, 2}, .first_of = {0, 3, 6}};

  MoeLayer make(const Context& context, const GridRank& rank, int32_t spare = 1) const {
    return MoeLayer::create(context, spec_, *source_, {.max_tokens = 4, .spare_experts = spare},
                            rank.in({.ep_size = 2}));
  }
};

TEST_F(MigrationOfTwo, Finish_MovesAllWithoutForwards) {
  SecondGroups second(2, 1);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = make(context, rank);
    const Tensor before = forward(layer, hidden_);
    const MoeLayer sharing = layer.with_max_tokens(32);
    Migration migration(layer, wanted_, {.communicator = second.of(rank).get()});
    EXPECT_EQ(code_of([&] { layer.reload(*source_, ReloadMode::kStaged); }), ErrorCode::kState);
    EXPECT_EQ(code_of([&] { layer.update_placement(wanted_); }), ErrorCode::kState);
    EXPECT_EQ(code_of([&] {
                const Migration other(layer, wanted_, {.communicator = second.of(rank).get()});
              }),
              ErrorCode::kState);
    // Some of the rounds by forwards, the others by finish.
    for (int32_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(forward(layer, hidden_), before));
    migration.finish();
    EXPECT_TRUE(migration.status().is_done);
    EXPECT_EQ(by_rank(layer.slots()), by_rank(wanted_));
    EXPECT_TRUE(same_bits(forward(layer, hidden_), before));
    EXPECT_TRUE(same_bits(forward(sharing, hidden_), before));
  });
}

TEST_F(MigrationOfTwo, SameSlots_AreDoneAtOnce) {
  SecondGroups second(2, 1);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = make(context, rank);
    Migration migration(layer, layer.slots(), {.communicator = second.of(rank).get()});
    migration.finish();
    EXPECT_EQ(migration.status().rounds, 0);
    EXPECT_EQ(layer.placement_epoch(), 0U);
  });
}

TEST_F(MigrationOfTwo, WhatCannotBe_IsRefusedAtOnce) {
  SecondGroups second(2, 1);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = make(context, rank, 0);
    Communicator* const own = second.of(rank).get();
    const auto refusal = [&](const ExpertSlots& slots, const MigrationOptions& options) {
      return code_of([&] { const Migration migration(layer, slots, options); });
    };
    EXPECT_EQ(refusal(wanted_, {.communicator = own}), ErrorCode::kUnsupported) << "no free place";
    EXPECT_EQ(refusal(wanted_, {}), ErrorCode::kInvalidArgument) << "no communicator";
    EXPECT_EQ(refusal({.num_experts = 6, .logical_of = {0}, .first_of = {0, 1, 1}},
                      {.communicator = own}),
              ErrorCode::kInvalidArgument);
    EXPECT_EQ(refusal(layer.slots(), {.communicator = own, .processor_share = 0}),
              ErrorCode::kInvalidArgument);
    EXPECT_EQ(refusal(layer.slots(), {.communicator = own, .piece_bytes = 1}),
              ErrorCode::kInvalidArgument);
    auto alone = make_local_group({.num_ranks = 1});
    EXPECT_EQ(refusal(layer.slots(), {.communicator = alone.front().get()}),
              ErrorCode::kInvalidArgument);
    const Context single({.num_threads = 1});
    MoeLayer partial = MoeLayer::create(single, spec_, *source_, {.spare_experts = 1},
                                        rank.in({.ep_size = 2, .reduce = Reduce::kPartial}));
    EXPECT_EQ(code_of([&] { const Migration m(partial, wanted_, {.communicator = own}); }),
              ErrorCode::kUnsupported);
    forward(layer, hidden_);
  });
}

TEST_F(MigrationOfTwo, RequestsThatDiffer_AreMismatches_AndForwardsGoOn) {
  SecondGroups second(2, 1);
  ExpertSlots other = wanted_;
  other.logical_of = {3, 1, 4, 5, 0, 2};
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = make(context, rank);
    const Tensor before = forward(layer, hidden_);
    {
      Migration migration(layer, rank.ep_rank == 0 ? wanted_ : other,
                          {.communicator = second.of(rank).get()});
      EXPECT_EQ(code_of([&] { migration.finish(); }), ErrorCode::kCommMismatch);
      EXPECT_TRUE(migration.status().has_failed);
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(forward(layer, hidden_), before));
    }
    EXPECT_EQ(layer.placement_epoch(), 0U);
    layer.update_placement(wanted_);
    EXPECT_TRUE(same_bits(forward(layer, hidden_), before));
  });
}

// One bit of one piece is damaged on its way.
TEST_F(MigrationOfTwo, DamagedCopy_IsAMismatchOnEveryRank_AndTheNextTryMoves) {
  SecondGroups second(2, 1);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = make(context, rank);
    const Tensor before = forward(layer, hidden_);
    std::atomic<int> pieces{0};
    FaultyCommunicator damaging(
        *second.of(rank), [&](std::string_view phase, std::span<std::byte> received) {
          const bool is_copy = phase == "migration: copy experts" && !received.empty();
          if (is_copy && rank.ep_rank == 1 && pieces++ == 1)
            received[received.size() / 2] ^= std::byte{4};
        });
    const MigrationOptions options{.communicator = &damaging, .piece_bytes = 4096};
    for (const bool is_synchronous : {false, true}) {
      pieces = 0;
      const uint64_t epoch = layer.placement_epoch();
      EXPECT_EQ(code_of([&] {
                  if (is_synchronous) return layer.update_placement(wanted_, options);
                  Migration migration(layer, wanted_, options);
                  migration.finish();
                }),
                ErrorCode::kCommMismatch);
      EXPECT_EQ(layer.placement_epoch(), epoch);
      EXPECT_TRUE(same_bits(forward(layer, hidden_), before));
    }
    pieces = 100;
    Migration again(layer, wanted_, options);
    again.finish();
    EXPECT_EQ(by_rank(layer.slots()), by_rank(wanted_));
    EXPECT_TRUE(same_bits(forward(layer, hidden_), before));
  });
}

// Without spare places a copy that is damaged may leave an expert in a temporary place.
TEST_F(MigrationOfTwo, DamagedCopyWithoutSparePlaces_StopsForwardsUntilTheNextUpdate) {
  on_grid(2, 1, [&](const GridRank& rank) {
    for (int damaged = 0; damaged < 24; damaged += 3) {
      const Context context(rank.context_options());
      MoeLayer layer = make(context, rank, 0);
      const Tensor before = forward(layer, hidden_);
      int pieces = 0;
      FaultyCommunicator damaging(
          *rank.communicator, [&](std::string_view phase, std::span<std::byte> received) {
            const bool is_copy = phase == "migration: copy experts" && !received.empty();
            if (is_copy && rank.ep_rank == 1 && pieces++ == damaged) received[0] ^= std::byte{1};
          });
      const MigrationOptions options{.communicator = &damaging, .piece_bytes = 4096};
      const ErrorCode code = code_of([&] { layer.update_placement(wanted_, options); });
      if (code != ErrorCode{0}) {
        EXPECT_EQ(code, ErrorCode::kCommMismatch);
        const ErrorCode after = code_of([&] { forward(layer, hidden_); });
        EXPECT_TRUE(after == ErrorCode{0} || after == ErrorCode::kState);
        pieces = 1000;
        layer.update_placement(wanted_, options);
      }
      EXPECT_EQ(by_rank(layer.slots()), by_rank(wanted_));
      EXPECT_TRUE(same_bits(forward(layer, hidden_), before)) << damaged;
    }
  });
}

// A rank that ends its migration tells the others, whose layers stay as they are.
TEST_F(MigrationOfTwo, MigrationDestroyedOnOneRank_IsAnAbortOnTheOther_AndForwardsGoOn) {
  SecondGroups second(2, 1);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = make(context, rank);
    const Tensor before = forward(layer, hidden_);
    std::optional<Migration> migration;
    migration.emplace(
        layer, wanted_,
        MigrationOptions{
            .communicator = second.of(rank).get(), .processor_share = 1e-6, .piece_bytes = 4096});
    if (rank.ep_rank == 0) migration.reset();
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(same_bits(forward(layer, hidden_), before));
    if (rank.ep_rank == 1) {
      const auto until = std::chrono::steady_clock::now() + 30s;
      while (!migration->status().has_failed && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(5ms);
      }
      EXPECT_EQ(code_of([&] { migration->check(); }), ErrorCode::kCommAborted);
    }
    EXPECT_TRUE(same_bits(forward(layer, hidden_), before));
  });
}

// The layer goes first: what the worker copies lives as long as the migration.
TEST_F(MigrationOfTwo, LayerDestroyedBeforeItsMigration_IsNoDanger) {
  SecondGroups second(2, 1);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    std::optional<MoeLayer> layer(make(context, rank));
    Migration migration(
        *layer, wanted_,
        {.communicator = second.of(rank).get(), .source = source_.get(), .processor_share = 1});
    layer.reset();
    std::this_thread::sleep_for(20ms);
    static_cast<void>(migration.status());
  });
}

// Names where in a migration a rank dies: in the n-th operation of a phase of its own communicator.
struct DeathCase {
  const char* phase;
  int operation;
};

class RankDiesInMigration : public ::testing::TestWithParam<DeathCase> {};

// The second communicator is lost, by which the other ranks know at once; the layer's own still
// serves, so that its forwards go on in the epoch that all ranks are in.
TEST_P(RankDiesInMigration, Peers_HaveATypedErrorInTime_AndForwardsGoOn) {
  constexpr int32_t kRanks = 3;
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const Tensor hidden = random_tensor(DType::kBF16, 11, 40, 1);
  const ExpertSlots wanted{
      .num_experts = 6, .logical_of = {2, 4, 0, 5, 1, 3}, .first_of = {0, 2, 4, 6}};
  SecondGroups second(kRanks, 1, 2s);
  on_grid(kRanks, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = MoeLayer::create(context, spec, *source, {.spare_experts = 1},
                                      rank.in({.ep_size = kRanks}));
    const Tensor before = forward(layer, hidden);
    int seen = 0;
    FaultyCommunicator dying(*second.of(rank), [&](std::string_view phase, std::span<std::byte>) {
      if (rank.ep_rank != 1 || phase != GetParam().phase) return;
      if (seen++ == GetParam().operation) {
        // What a rank that dies leaves behind: nothing, and its communicator gone.
        second.of(rank)->abort("gone");
        throw std::runtime_error("this rank dies");
      }
    });
    Migration migration(layer, wanted, {.communicator = &dying, .piece_bytes = 4096});
    const auto start = std::chrono::steady_clock::now();
    // All ranks make as many forwards: until the last of them knows.
    double all = 0;
    while (all < kRanks && std::chrono::steady_clock::now() - start < 20s) {
      ASSERT_TRUE(same_bits(forward(layer, hidden), before));
      const double failed = migration.status().has_failed ? 1 : 0;
      rank.communicator->all_reduce(std::as_bytes(std::span(&failed, 1)),
                                    std::as_writable_bytes(std::span(&all, 1)), DType::kF64,
                                    ReduceOp::kSum, "test: who has failed");
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
    EXPECT_TRUE(migration.status().has_failed);
    if (rank.ep_rank != 1) {
      const ErrorCode code = code_of([&] { migration.check(); });
      EXPECT_EQ(code, ErrorCode::kCommAborted);
    }
    EXPECT_TRUE(same_bits(forward(layer, hidden), before));
  });
}

INSTANTIATE_TEST_SUITE_P(Moments, RankDiesInMigration,
                         ::testing::Values(DeathCase{"migration: agree on the slots", 0},
                                           DeathCase{"migration: agree on the slots", 1},
                                           DeathCase{"migration: copy experts", 0},
                                           DeathCase{"migration: copy experts", 3},
                                           DeathCase{"migration: compare the hashes", 0},
                                           DeathCase{"migration: compare the hashes", 1}),
                         [](const auto& c) {
                           std::string name = c.param.phase;
                           std::erase_if(name, [](char letter) { return !std::isalpha(letter); });
                           return name + std::to_string(c.param.operation);
                         });

// A rank that never begins is a timeout for those that do.
TEST_F(MigrationOfTwo, RankThatNeverBegins_IsATimeoutWithinTheDeadline) {
  SecondGroups second(2, 1, 500ms);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = make(context, rank);
    const Tensor before = forward(layer, hidden_);
    if (rank.ep_rank == 0) {
      Migration migration(layer, wanted_, {.communicator = second.of(rank).get()});
      const auto start = std::chrono::steady_clock::now();
      while (!migration.status().has_failed && std::chrono::steady_clock::now() - start < 20s) {
        std::this_thread::sleep_for(5ms);
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
      EXPECT_EQ(code_of([&] { migration.check(); }), ErrorCode::kCommTimeout);
    }
    EXPECT_TRUE(same_bits(forward(layer, hidden_), before));
  });
}

}  // namespace
}  // namespace conclave
