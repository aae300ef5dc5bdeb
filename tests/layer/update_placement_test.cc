// Experts that move between two forwards: no bit of a result changes, whatever the weights, the
// split and the way.
#include "layer/moving_layers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::by_rank;
using testing::code_of;
using testing::counts_of;
using testing::forward;
using testing::GridRank;
using testing::make_layer;
using testing::make_spec;
using testing::NamedSpec;
using testing::on_grid;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::same_bits;
using testing::SlotDealer;

constexpr auto kCustom = PlacementStrategy::kCustom;

struct MoveCase {
  const char* name;
  ParallelSpec parallel;  // ranks are filled in
  int32_t spare = 0;
  EpTransport transport = EpTransport::kVariable;
  bool from_source = false;
};

void PrintTo(const MoveCase& c, std::ostream* out) { *out << c.name; }

const MoveCase kCases[] = {
    {"TwoRanks", {.ep_size = 2}},
    {"TwoRanksSpare", {.ep_size = 2}, 1},
    {"ThreeRanksUneven", {.ep_size = 3, .num_redundant_experts = 2}},
    {"ThreeRanksSpare", {.ep_size = 3, .num_redundant_experts = 2}, 2, EpTransport::kFixedSlots},
    {"FourRanksOneEmpty",
     {.ep_size = 4, .placement = kCustom, .rank_of = {0, 1, 3, 0, 1, 3}},
     2,
     EpTransport::kVariable},
    {"FourRanksFixed", {.ep_size = 4, .num_redundant_experts = 3}, 0, EpTransport::kFixedSlots},
    {"FromSource", {.ep_size = 3, .num_redundant_experts = 2}, 1, EpTransport::kVariable, true},
    {"Slices", {.ep_size = 2, .num_redundant_experts = 1, .tp_size = 2}, 1},
    {"SlicesFromSource",
     {.ep_size = 2, .num_redundant_experts = 1, .tp_size = 2},
     0,
     EpTransport::kVariable,
     true},
};

class UpdatePlacement : public ::testing::TestWithParam<MoveCase> {};

// The slots that a walk goes through; ranks that may hold more than at first do so.
std::vector<ExpertSlots> random_walk(const MoeSpec& spec, const MoveCase& c, uint32_t seed) {
  std::vector<int32_t> most = counts_of(spec.num_experts, c.parallel);
  for (int32_t& count : most) count += std::max(c.spare - 1, 0);
  SlotDealer dealer(spec.num_experts, most, c.parallel.num_redundant_experts, seed);
  std::vector<ExpertSlots> walk;
  for (int step = 0; step < 5; ++step) walk.push_back(dealer.deal());
  return walk;
}

void expect_same_bits_on_walk(const NamedSpec& named, const MoveCase& c) {
  SCOPED_TRACE(named.first);
  const MoeSpec& spec = named.second;
  const Tensor hidden = random_tensor(DType::kBF16, 23, spec.hidden_size, 1);
  const OwnedLayer one = make_layer(spec);
  const Tensor expected = forward(one.layer, hidden);
  const std::vector<ExpertSlots> walk = random_walk(spec, c, 5);
  on_grid(c.parallel.ep_size, c.parallel.tp_size, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = MoeLayer::create(
        context, spec, *one.source,
        {.max_tokens = 8, .transport = c.transport, .spare_experts = c.spare}, rank.in(c.parallel));
    const Tensor before = forward(layer, hidden);
    EXPECT_TRUE(c.parallel.tp_size > 1 || same_bits(before, expected));
    for (const ExpertSlots& slots : walk) {
      layer.update_placement(
          slots, {.source = c.from_source ? one.source.get() : nullptr, .piece_bytes = 4096});
      EXPECT_EQ(by_rank(layer.slots()), by_rank(slots));
      EXPECT_TRUE(same_bits(forward(layer, hidden), before)) << "rank " << rank.ep_rank;
    }
    EXPECT_GT(layer.placement_epoch(), 0U);
  });
}

TEST_P(UpdatePlacement, RandomWalk_KeepsTheBitsOfEveryWeightFamily) {
  for (const NamedSpec& named : testing::weight_families()) {
    expect_same_bits_on_walk(named, GetParam());
  }
}

TEST_P(UpdatePlacement, RandomWalk_KeepsTheBitsOfEveryPart) {
  if (!GetParam().parallel.rank_of.empty()) GTEST_SKIP() << "it names the ranks of six experts";
  for (const NamedSpec& named : testing::split_specs(24, DType::kBF16)) {
    expect_same_bits_on_walk(named, GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Splits, UpdatePlacement, ::testing::ValuesIn(kCases),
                         [](const auto& c) { return std::string(c.param.name); });

// Blocks of GGUF and codes of files keep scales of other widths in their panels.
TEST(UpdatePlacementOfFiles, EveryForm_KeepsItsBits) {
  for (const char* name : {"qwen3moe-q4_k_m", "llama-q4_0", "glm4moe-q4_1", "gpt-oss-mxfp4",
                           "qwen3moe-nvfp4", "minimax-m2-iq3", "llama-tq"}) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint =
        Checkpoint::open(std::string("testdata/gguf/") + name + "/model.gguf");
    const CheckpointLayer& file = checkpoint.layers().front();
    const auto source = checkpoint.layer_source(file.index);
    const MoeSpec& spec = file.spec;
    const Tensor hidden = random_tensor(DType::kBF16, 9, spec.hidden_size, 1);
    std::vector<int32_t> backwards;
    for (int64_t e = 0; e < spec.num_experts; ++e) {
      backwards.push_back(e < spec.num_experts / 2 ? 1 : 0);
    }
    on_grid(2, 1, [&](const GridRank& rank) {
      const Context context(rank.context_options());
      MoeLayer layer =
          MoeLayer::create(context, spec, *source, {.spare_experts = 2}, rank.in({.ep_size = 2}));
      const Tensor before = forward(layer, hidden);
      const ParallelSpec next = rank.in({.ep_size = 2, .placement = kCustom, .rank_of = backwards});
      layer.update_placement(next);
      EXPECT_TRUE(same_bits(forward(layer, hidden), before)) << "sent";
      layer.update_placement(rank.in({.ep_size = 2}), {.source = source.get()});
      EXPECT_TRUE(same_bits(forward(layer, hidden), before)) << "read";
    });
  }
}

// Memory that an allocator hands out is full of something else each time, so that bytes which
// nobody has written would differ between ranks.
class DirtyAllocator final : public HostAllocator {
 public:
  explicit DirtyAllocator(int fill) : fill_(fill) {}
  void* allocate(size_t bytes, size_t alignment) override {
    void* const data =
        std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    std::memset(data, fill_, bytes);
    return data;
  }
  void deallocate(void* data, size_t) noexcept override { std::free(data); }

 private:
  int fill_;
};

TEST(UpdatePlacementFromSource, MemoryThatWasNotClean_HashesAlike) {
  for (const NamedSpec& named : testing::weight_families()) {
    SCOPED_TRACE(named.first);
    const auto source = make_synthetic_source(named.second, 11);
    on_grid(2, 1, [&](const GridRank& rank) {
      DirtyAllocator allocator(rank.ep_rank == 0 ? 0x5A : 0xC3);
      ContextOptions options = rank.context_options();
      options.host_allocator = &allocator;
      const Context context(options);
      MoeLayer layer = MoeLayer::create(context, named.second, *source, {.spare_experts = 1},
                                        rank.in({.ep_size = 2}));
      layer.update_placement(
          rank.in({.ep_size = 2, .placement = kCustom, .rank_of = {1, 0, 1, 0, 1, 0}}),
          {.source = source.get()});
    });
  }
}

TEST(UpdatePlacementFromSource, OtherWeights_AreAMismatchOnEveryRank_AndTheOldPlaceServes) {
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const auto other = make_synthetic_source(spec, 12);
  const Tensor hidden = random_tensor(DType::kBF16, 9, 40, 1);
  on_grid(3, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.spare_experts = 1}, rank.in({.ep_size = 3}));
    const Tensor before = forward(layer, hidden);
    const ParallelSpec next =
        rank.in({.ep_size = 3, .placement = kCustom, .rank_of = {1, 0, 2, 1, 0, 2}});
    EXPECT_EQ(code_of([&] { layer.update_placement(next, {.source = other.get()}); }),
              ErrorCode::kCommMismatch);
    EXPECT_EQ(layer.placement_epoch(), 0U);
    EXPECT_TRUE(same_bits(forward(layer, hidden), before));
    layer.update_placement(next, {.source = source.get()});
    EXPECT_TRUE(same_bits(forward(layer, hidden), before));
  });
}

TEST(UpdatePlacementAlone, PartialSums_AreReadFromTheSource) {
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kF32);
  const auto source = make_synthetic_source(spec, 11);
  const Context context({.num_threads = 1});
  const Tensor hidden = random_tensor(DType::kF32, 9, 40, 1);
  const ParallelSpec first{.ep_size = 2, .reduce = Reduce::kPartial};
  const ParallelSpec next{.ep_size = 2,
                          .placement = kCustom,
                          .rank_of = {1, 0, 1, 0, 1, 0},
                          .reduce = Reduce::kPartial};
  MoeLayer layer = MoeLayer::create(context, spec, *source, {}, first);
  EXPECT_EQ(code_of([&] { layer.update_placement(next); }), ErrorCode::kInvalidArgument);
  layer.update_placement(next, {.source = source.get()});
  const MoeLayer fresh = MoeLayer::create(context, spec, *source, {}, next);
  EXPECT_TRUE(same_bits(testing::run_layer(layer, hidden.view(), DType::kF32).out,
                        testing::run_layer(fresh, hidden.view(), DType::kF32).out));
}

// Sums per rank depend on the placement alone, whichever way it came about.
TEST(UpdatePlacementReduced, SumsPerRank_AreThoseOfALayerMadeThere) {
  const MoeSpec spec = make_spec(6, 3, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const Tensor hidden = random_tensor(DType::kBF16, 19, 40, 1);
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    on_grid(3, 1, [&](const GridRank& rank) {
      const Context context(rank.context_options());
      const LayerOptions options{.max_tokens = 8,
                                 .transport = transport,
                                 .ep_combine = EpCombine::kReducedPerRank,
                                 .spare_experts = 1};
      const ParallelSpec next =
          rank.in({.ep_size = 3, .placement = kCustom, .rank_of = {2, 1, 0, 0, 2, 1}});
      MoeLayer layer = MoeLayer::create(context, spec, *source, options, rank.in({.ep_size = 3}));
      layer.update_placement(next);
      const MoeLayer fresh = MoeLayer::create(context, spec, *source, options, next);
      EXPECT_TRUE(same_bits(forward(layer, hidden), forward(fresh, hidden)));
    });
  }
}

// Memory for the one temporary place is all that a move without spare places asks for.
class LimitedAllocator final : public HostAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    if (!allows) return nullptr;
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  void deallocate(void* data, size_t) noexcept override { std::free(data); }
  std::atomic<bool> allows{true};
};

TEST(UpdatePlacementErrors, RankWithoutMemoryForATemporaryPlace_IsKnownToAll_AndLayersGoOn) {
  const MoeSpec spec = make_spec(4, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const Tensor hidden = random_tensor(DType::kBF16, 9, 40, 1);
  on_grid(2, 1, [&](const GridRank& rank) {
    LimitedAllocator allocator;
    ContextOptions options = rank.context_options();
    options.host_allocator = &allocator;
    const Context context(options);
    MoeLayer layer = MoeLayer::create(context, spec, *source, {}, rank.in({.ep_size = 2}));
    const Tensor before = forward(layer, hidden);
    const ParallelSpec next =
        rank.in({.ep_size = 2, .placement = kCustom, .rank_of = {1, 0, 1, 0}});
    allocator.allows = rank.ep_rank != 1;
    EXPECT_EQ(code_of([&] { layer.update_placement(next); }),
              rank.ep_rank == 1 ? ErrorCode::kOutOfMemory : ErrorCode::kCommMismatch);
    allocator.allows = true;
    EXPECT_TRUE(same_bits(forward(layer, hidden), before));
    layer.update_placement(next);
    EXPECT_TRUE(same_bits(forward(layer, hidden), before));
  });
}

TEST(UpdatePlacementAlone, OneRank_TurnsReplicasIntoThoseOfOtherExperts) {
  const MoeSpec spec = make_spec(3, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const Context context({.num_threads = 2});
  const Tensor hidden = random_tensor(DType::kBF16, 19, 40, 1);
  MoeLayer layer =
      MoeLayer::create(context, spec, *source, {.max_tokens = 4}, {.num_redundant_experts = 2});
  const Tensor before = forward(layer, hidden);
  layer.update_placement({.num_experts = 3, .logical_of = {2, 2, 2, 1, 0}, .first_of = {0, 5}});
  EXPECT_EQ(by_rank(layer.slots()), (std::vector<std::vector<int32_t>>{{0, 1, 2, 2, 2}}));
  EXPECT_TRUE(same_bits(forward(layer, hidden), before));
}

TEST(UpdatePlacementLayers, LayersThatShareWeights_ShareThePlacement_AndReloadFollowsIt) {
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, 19, 40, 1);
  const auto first = make_synthetic_source(spec, 11);
  const ParallelSpec split{.ep_size = 2, .num_redundant_experts = 1};
  const OwnedLayer one = make_layer(spec);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = MoeLayer::create(context, spec, *first, {.max_tokens = 4}, rank.in(split));
    const MoeLayer sharing = layer.with_max_tokens(16);
    SlotDealer dealer(6, counts_of(6, split), 1, 3);
    for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
      const uint64_t seed = mode == ReloadMode::kStaged ? 21 : 22;
      const ExpertSlots slots = dealer.deal();
      layer.update_placement(slots);
      EXPECT_EQ(by_rank(sharing.slots()), by_rank(slots));
      EXPECT_EQ(sharing.placement_epoch(), layer.placement_epoch());
      const auto source = make_synthetic_source(spec, seed);
      layer.reload(*source, mode);
      const OwnedLayer fresh = make_layer(spec, {}, {}, seed);
      const Tensor expected = forward(fresh.layer, hidden);
      EXPECT_TRUE(same_bits(forward(layer, hidden), expected)) << "rank " << rank.ep_rank;
      EXPECT_TRUE(same_bits(forward(sharing, hidden), expected)) << "rank " << rank.ep_rank;
      const MoeLayer later = layer.with_max_tokens(2);
      EXPECT_TRUE(same_bits(forward(later, hidden), expected)) << "made after the move";
    }
  });
}

TEST(UpdatePlacementErrors, ExpertsReadInPlace_DoNotMove) {
  const Checkpoint checkpoint =
      Checkpoint::open("testdata/mixtral-tiny", {.access = FileAccess::kMap});
  const CheckpointLayer& file = checkpoint.layers().front();
  const auto source = checkpoint.layer_source(file.index);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = MoeLayer::create(context, file.spec, *source, {.weights = WeightUse::kInPlace},
                                      rank.in({.ep_size = 2}));
    EXPECT_GT(layer.plan().in_place_bytes, 0U);
    const ParallelSpec next = rank.in({.ep_size = 2, .placement = PlacementStrategy::kRoundRobin});
    EXPECT_EQ(code_of([&] { layer.update_placement(next); }), ErrorCode::kUnsupported);
  });
}

// What one rank alone got wrong, each rank learns; then all may go on.
TEST(UpdatePlacementErrors, RanksThatDisagree_AreMismatches_AndNothingHasMoved) {
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const Tensor hidden = random_tensor(DType::kBF16, 9, 40, 1);
  const auto next = [](std::vector<int32_t> ranks) {
    return ParallelSpec{
        .ep_size = 2, .placement = kCustom, .rank_of = std::move(ranks), .tp_size = 2};
  };
  on_grid(2, 2, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    MoeLayer layer = MoeLayer::create(context, spec, *source, {.spare_experts = 1},
                                      rank.in({.ep_size = 2, .tp_size = 2}));
    const Tensor before = forward(layer, hidden);
    const bool odd = rank.ep_rank == 1 && rank.tp_rank == 0;
    const auto update = [&](const ParallelSpec& to, const MigrationOptions& options = {}) {
      return code_of([&] { layer.update_placement(rank.in(to), options); });
    };
    EXPECT_EQ(update(next(odd ? std::vector<int32_t>{1, 0, 1, 0, 1, 0}
                              : std::vector<int32_t>{1, 1, 1, 0, 0, 0})),
              ErrorCode::kCommMismatch);
    EXPECT_EQ(update(next({1, 1, 1, 0, 0, 0}), {.piece_bytes = odd ? size_t{8192} : size_t{4096}}),
              ErrorCode::kCommMismatch);
    EXPECT_EQ(update(next({1, 1, 1, 0, 0, 0}), {.source = odd ? source.get() : nullptr}),
              ErrorCode::kCommMismatch);
    EXPECT_EQ(
        update(next(odd ? std::vector<int32_t>{0, 0} : std::vector<int32_t>{1, 1, 1, 0, 0, 0})),
        odd ? ErrorCode::kInvalidArgument : ErrorCode::kCommMismatch);
    EXPECT_EQ(update(next({1, 1, 1, 1, 0, 0})), ErrorCode::kInvalidArgument);
    EXPECT_EQ(update(next({1, 1, 1, 0, 0, 0}), {.piece_bytes = 1}), ErrorCode::kInvalidArgument);
    EXPECT_EQ(update({.ep_size = 2, .tp_size = 1}), ErrorCode::kInvalidArgument);
    EXPECT_EQ(layer.placement_epoch(), 0U);
    EXPECT_TRUE(same_bits(forward(layer, hidden), before));
    layer.update_placement(rank.in(next({1, 1, 1, 0, 0, 0})));
    EXPECT_TRUE(same_bits(forward(layer, hidden), before));
  });
}

TEST(UpdatePlacementErrors, SpareExperts_HaveARange) {
  const MoeSpec spec = make_spec(4, 2, 40, 24, DType::kF32);
  const auto source = make_synthetic_source(spec, 11);
  const Context context({.num_threads = 1});
  for (const int32_t spare : {-1, 1025}) {
    EXPECT_EQ(code_of([&] { MoeLayer::create(context, spec, *source, {.spare_experts = spare}); }),
              ErrorCode::kInvalidArgument);
  }
}

TEST(UpdatePlacementPlan, SparePlaces_AreBookedAndSaid) {
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  const Context context({.num_threads = 1});
  const ParallelSpec partial{.ep_size = 2, .reduce = Reduce::kPartial};
  const Plan plain = make_plan(context, spec, {}, partial);
  const Plan spare = make_plan(context, spec, {.spare_experts = 3}, partial);
  EXPECT_EQ(spare.packed_bytes, 2 * plain.packed_bytes);
  EXPECT_EQ(spare.num_local_experts, 3);
  EXPECT_EQ(spare.part, "3 of 6 experts on rank 0 of 2, 3 spare; the caller adds up");
}

}  // namespace
}  // namespace conclave
