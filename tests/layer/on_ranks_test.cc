// A layer made anew on other ranks: fewer after a failure, or more; with experts that are there,
// and with experts that are read.
#include "layer/coded_specs.h"
#include "layer/split_specs.h"
#include "support/layer_fixture.h"
#include "support/thread_ranks.h"

#include "conclave/balance.h"
#include "conclave/migration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::make_layer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

// Counts what is read of each expert.
class CountingSource final : public WeightSource {
 public:
  explicit CountingSource(const WeightSource& inner) : inner_(inner) {}
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  void read(WeightId id, int64_t index, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (id.mlp() == WeightMlp::kRouted) {
      const std::lock_guard lock(mutex_);
      ++reads_[index];
    }
    inner_.read(id, index, block, destination);
  }
  std::vector<int64_t> experts_read() const {
    std::vector<int64_t> experts;
    for (const auto& [expert, reads] : reads_) experts.push_back(expert);
    return experts;
  }

 private:
  const WeightSource& inner_;
  mutable std::mutex mutex_;
  mutable std::map<int64_t, int> reads_;
};

MoeSpec shared_spec() {
  MoeSpec spec = testing::make_spec(10, 3, 64, 48, DType::kBF16);
  spec.shared.mode = SharedMode::kSigmoidGate;
  spec.shared.count = 1;
  spec.shared.intermediate_size = 32;
  spec.router.has_selection_bias = true;
  return spec;
}

ParallelSpec surviving_split(const MoeSpec& spec, int32_t ranks, int32_t rank) {
  const std::vector<double> load(static_cast<size_t>(spec.num_experts), 1.0);
  return with_slots(
      {.ep_size = ranks, .ep_rank = rank},
      balance_experts(load, {.rule = "surviving",
                             .num_ranks = ranks,
                             .num_redundant_experts = static_cast<int32_t>(spec.num_experts)}));
}

// Rank `victim` of `ranks` leaves; the others go on and each calls body(its layer, context of the
// new group, its split there).
void with_a_rank_less(
    const MoeSpec& spec, const WeightSource& source, int32_t ranks, int32_t victim, bool replicas,
    const std::function<void(const MoeLayer&, const Context&, const ParallelSpec&)>& body) {
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = ranks, .timeout = 30s}), [&](int32_t rank, auto& comm) {
        const Context context({.num_threads = 1, .communicator = &comm});
        const ParallelSpec split = replicas ? surviving_split(spec, ranks, rank)
                                            : ParallelSpec{.ep_size = ranks, .ep_rank = rank};
        const MoeLayer layer = MoeLayer::create(context, spec, source, {.max_tokens = 32}, split);
        if (rank == victim) return;
        const Survivors left = survivors(comm);
        const Context fewer({.num_threads = 2, .communicator = left.communicator.get()});
        body(layer, fewer,
             without_ranks(spec.num_experts, split, left.old_ranks, left.communicator->rank()));
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

class OnRanks : public ::testing::Test {
 protected:
  OnRanks()
      : spec_(shared_spec()),
        source_(make_synthetic_source(spec_, 11)),
        hidden_(random_tensor(DType::kBF16, 50, 64, 5)) {
    expected_ =
        run_layer(make_layer(spec_, {.max_tokens = 32}).layer, hidden_.view(), DType::kBF16).out;
  }
  void expect_right(const MoeLayer& layer) const {
    EXPECT_TRUE(same_bits(run_layer(layer, hidden_.view(), DType::kBF16).out, expected_));
  }

  MoeSpec spec_;
  std::unique_ptr<WeightSource> source_;
  Tensor hidden_;
  Tensor expected_;
};

TEST_F(OnRanks, Replicas_NeedNoSource) {
  for (int32_t ranks = 2; ranks <= 4; ++ranks) {
    for (int32_t victim = 0; victim < ranks; ++victim) {
      SCOPED_TRACE(std::to_string(victim) + " of " + std::to_string(ranks));
      with_a_rank_less(spec_, *source_, ranks, victim, true,
                       [&](const MoeLayer& layer, const Context& fewer, const ParallelSpec& split) {
                         const MoeLayer next = layer.on_ranks(fewer, split);
                         expect_right(next);
                         EXPECT_EQ(next.status().forwards, 1);
                         EXPECT_EQ(next.parallel().ep_size, ranks - 1);
                       });
    }
  }
}

TEST_F(OnRanks, ExpertsOfTheDeadRank_AreTheOnlyOnesRead) {
  constexpr int32_t kVictim = 1;
  const ParallelSpec before{.ep_size = 3};
  const ExpertPlacement placement = make_placement(spec_.num_experts, before);
  std::mutex mutex;
  std::vector<int64_t> read;
  with_a_rank_less(spec_, *source_, 3, kVictim, false,
                   [&](const MoeLayer& layer, const Context& fewer, const ParallelSpec& split) {
                     const CountingSource counted(*source_);
                     const MoeLayer next = layer.on_ranks(fewer, split, &counted);
                     expect_right(next);
                     const std::lock_guard lock(mutex);
                     for (const int64_t expert : counted.experts_read()) read.push_back(expert);
                   });
  std::ranges::sort(read);
  const auto& lost = placement.experts_of[kVictim];
  EXPECT_EQ(read, std::vector<int64_t>(lost.begin(), lost.end()));
}

TEST_F(OnRanks, ExpertThatNobodyHolds_IsNamedOnEveryRank) {
  std::atomic<int> named{0};
  with_a_rank_less(spec_, *source_, 3, 0, false,
                   [&](const MoeLayer& layer, const Context& fewer, const ParallelSpec& split) {
                     try {
                       layer.on_ranks(fewer, split);
                       ADD_FAILURE() << "no error";
                     } catch (const Error& error) {
                       EXPECT_EQ(error.code(), ErrorCode::kTensorMissing);
                       EXPECT_NE(std::string(error.what()).find("expert "), std::string::npos);
                       ++named;
                     }
                     // The layer is as before, and can be taken to the same ranks with a source.
                     expect_right(layer.on_ranks(fewer, split, source_.get()));
                   });
  EXPECT_EQ(named, 2);
}

TEST_F(OnRanks, SomeWithASourceAndSomeWithout_Disagree) {
  with_a_rank_less(spec_, *source_, 3, 2, true,
                   [&](const MoeLayer& layer, const Context& fewer, const ParallelSpec& split) {
                     try {
                       layer.on_ranks(fewer, split, split.ep_rank == 0 ? source_.get() : nullptr);
                       ADD_FAILURE() << "no error";
                     } catch (const CommError& error) {
                       EXPECT_EQ(error.code(), ErrorCode::kCommMismatch);
                       EXPECT_NE(std::string(error.what()).find("source"), std::string::npos);
                     }
                   });
}

// What lies in a place after a move is another expert than the one that was packed there.
TEST_F(OnRanks, ExpertsThatHaveMoved_AreTakenFromWhereTheyLie) {
  constexpr int32_t kRanks = 3;
  constexpr int32_t kVictim = 2;
  std::vector<double> load(static_cast<size_t>(spec_.num_experts));
  for (size_t i = 0; i < load.size(); ++i) load[i] = static_cast<double>(1 + i * i % 7);
  const ExpertSlots moved =
      balance_experts(load, {.rule = "surviving",
                             .num_ranks = kRanks,
                             .num_redundant_experts = static_cast<int32_t>(spec_.num_experts)});
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = kRanks, .timeout = 30s}), [&](int32_t rank, auto& comm) {
        const Context context({.num_threads = 1, .communicator = &comm});
        const ParallelSpec split = surviving_split(spec_, kRanks, rank);
        MoeLayer layer = MoeLayer::create(context, spec_, *source_, {.max_tokens = 32}, split);
        layer.update_placement(moved);
        ASSERT_NE(layer.slots().logical_of, slots_of(spec_.num_experts, split).logical_of);
        if (rank == kVictim) return;
        const Survivors left = survivors(comm);
        const Context fewer({.num_threads = 2, .communicator = left.communicator.get()});
        const ParallelSpec next =
            without_ranks(spec_.num_experts, with_slots(layer.parallel(), layer.slots()),
                          left.old_ranks, left.communicator->rank());
        expect_right(layer.on_ranks(fewer, next));
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

// Counts the bytes of blocks.
class CountingAllocator final : public HostAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    bytes_ += bytes;
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  void deallocate(void* data, size_t bytes) noexcept override {
    bytes_ -= bytes;
    std::free(data);
  }
  size_t bytes() const { return bytes_; }

 private:
  std::atomic<size_t> bytes_{0};
};

TEST_F(OnRanks, ExpertsThatARankKeeps_AreNotCopied) {
  CountingAllocator allocator;
  const Context context({.num_threads = 1, .host_allocator = &allocator});
  MoeLayer layer = MoeLayer::create(context, spec_, *source_, {.max_tokens = 32});
  const size_t before = allocator.bytes();
  MoeLayer next = layer.on_ranks(context, {});
  // The router's matrix is; experts, shared ones too, are most of the rest.
  EXPECT_LT(allocator.bytes() - before, layer.plan().packed_bytes / 8);
  expect_right(next);
  {
    const MoeLayer once_more = next.on_ranks(context, {});
    expect_right(once_more);
  }
  next = MoeLayer::create(context, spec_, *source_, {.max_tokens = 32});
  expect_right(layer);
  // From another allocator, which may end earlier, everything is copied.
  CountingAllocator other;
  const Context elsewhere({.num_threads = 1, .host_allocator = &other});
  const MoeLayer moved = layer.on_ranks(elsewhere, {});
  EXPECT_GE(other.bytes(), layer.plan().packed_bytes);
  expect_right(moved);
}

TEST_F(OnRanks, LayerThatOverwrites_LeavesTheOtherItsOwn) {
  constexpr uint64_t kSeed = 99;
  const auto other = make_synthetic_source(spec_, kSeed);
  const Tensor of_other = run_layer(make_layer(spec_, {.max_tokens = 32}, {}, kSeed).layer,
                                    hidden_.view(), DType::kBF16)
                              .out;
  const Context context({.num_threads = 1});
  for (const bool overwrites_old : {true, false}) {
    MoeLayer old = MoeLayer::create(context, spec_, *source_, {.max_tokens = 32});
    MoeLayer next = old.on_ranks(context, {});
    MoeLayer& overwritten = overwrites_old ? old : next;
    overwritten.reload(*other, ReloadMode::kInPlace);
    expect_right(overwrites_old ? next : old);
    EXPECT_TRUE(same_bits(run_layer(overwritten, hidden_.view(), DType::kBF16).out, of_other));
  }
}

TEST_F(OnRanks, LayersThatShareExperts_MoveThemApart) {
  auto second = make_local_group({.num_ranks = 2, .timeout = 30s});
  with_a_rank_less(
      spec_, *source_, 3, 2, true,
      [&](const MoeLayer& layer, const Context& fewer, const ParallelSpec& split) {
        MoeLayer next = layer.on_ranks(fewer, split);
        const MoeLayer same = next.on_ranks(fewer, split);
        std::vector<double> load(static_cast<size_t>(spec_.num_experts), 1.0);
        load[0] = 50;
        const ExpertSlots slots =
            balance_experts(load, {.rule = "global",
                                   .num_ranks = 2,
                                   .num_redundant_experts = split.num_redundant_experts});
        try {
          const Migration beside(
              next, slots, {.communicator = second[static_cast<size_t>(split.ep_rank)].get()});
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
          EXPECT_NE(std::string(error.what()).find("same memory"), std::string::npos);
        }
        next.update_placement(slots);
        EXPECT_GT(next.placement_epoch(), 0U);
        expect_right(next);
        expect_right(same);
      });
}

// The old layer, its context and its communicator may go first.
TEST_F(OnRanks, NewLayer_OutlivesTheOldOne) {
  auto context = std::make_unique<Context>(ContextOptions{.num_threads = 1});
  auto old =
      std::make_unique<MoeLayer>(MoeLayer::create(*context, spec_, *source_, {.max_tokens = 32}));
  const Context other({.num_threads = 1});
  const MoeLayer next = old->on_ranks(other, {});
  expect_right(*old);
  old.reset();
  context.reset();
  expect_right(next);
}

// Ranks join with nothing: they create what the others take over.
TEST_F(OnRanks, MoreRanks_ServeTogether) {
  constexpr int32_t kBefore = 2;
  constexpr int32_t kAfter = 4;
  auto small = make_local_group({.num_ranks = kBefore, .timeout = 30s});
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = kAfter, .timeout = 30s}), [&](int32_t rank, auto& comm) {
        const Context wide({.num_threads = 1, .communicator = &comm});
        const ParallelSpec split{.ep_size = kAfter, .ep_rank = rank};
        const LayerOptions options{.max_tokens = 32};
        if (rank >= kBefore) {
          expect_right(MoeLayer::create(wide, spec_, *source_, options, split));
          return;
        }
        Communicator& before = *small[static_cast<size_t>(rank)];
        const Context narrow({.num_threads = 1, .communicator = &before});
        const MoeLayer layer = MoeLayer::create(narrow, spec_, *source_, options,
                                                {.ep_size = kBefore, .ep_rank = rank});
        expect_right(layer);
        const CountingSource counted(*source_);
        expect_right(layer.on_ranks(wide, split, &counted));
        // Rank 0 keeps a part of what it has; rank 1 gets one that it lacks.
        const ExpertPlacement had = make_placement(spec_.num_experts, layer.parallel());
        for (const int64_t expert : counted.experts_read()) {
          EXPECT_NE(had.rank_of[static_cast<size_t>(expert)], rank) << "read twice";
        }
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

TEST_F(OnRanks, ColumnsThatChange_AreReadAnew) {
  const Context alone({.num_threads = 1});
  const MoeLayer whole = MoeLayer::create(alone, spec_, *source_, {.max_tokens = 32});
  const ParallelSpec half{.tp_size = 2, .tp_rank = 1, .reduce = Reduce::kPartial};
  try {
    whole.on_ranks(alone, half);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTensorMissing);
    EXPECT_EQ(error.detail().tensor, "source");
  }
  const MoeLayer taken = whole.on_ranks(alone, half, source_.get());
  const MoeLayer made = MoeLayer::create(alone, spec_, *source_, {.max_tokens = 32}, half);
  EXPECT_TRUE(same_bits(run_layer(taken, hidden_.view(), DType::kF32).out,
                        run_layer(made, hidden_.view(), DType::kF32).out));
}

// Whatever parts a layer has, and in whichever form its weights are.
TEST(OnRanksOfAnySpec, EveryPart_ComesAlong) {
  std::vector<testing::NamedSpec> specs = testing::split_specs(24, DType::kBF16);
  for (const DType dtype : testing::types_without_zeros()) {
    specs.emplace_back(
        std::string(to_string(dtype)),
        testing::coded_spec(dtype, 6, 2, 64, 64, {.weights = WeightScale::kChannel}));
  }
  const auto context = std::make_unique<Context>(ContextOptions{.num_threads = 2});
  for (const auto& [name, spec] : specs) {
    SCOPED_TRACE(name);
    const Tensor hidden = random_tensor(DType::kBF16, 21, spec.hidden_size, 3);
    const auto source = make_synthetic_source(spec, 5);
    auto old =
        std::make_unique<MoeLayer>(MoeLayer::create(*context, spec, *source, {.max_tokens = 32}));
    ForwardArgs args;
    const bool has_gate = spec.has_gate;
    Tensor logits = random_tensor(DType::kF32, 21, num_logits(spec), 4);
    if (!has_gate) args.router_logits = logits.view();
    const Tensor expected = run_layer(*old, hidden.view(), DType::kBF16, args).out;
    const Context other({.num_threads = 1});
    const MoeLayer next = old->on_ranks(other, {});
    old.reset();
    EXPECT_TRUE(same_bits(run_layer(next, hidden.view(), DType::kBF16, args).out, expected));
  }
}

TEST(WithoutRanks, KeepsExpertsWhereTheyAre) {
  constexpr int64_t kExperts = 6;
  const ParallelSpec before{.ep_size = 3, .ep_rank = 2, .tp_size = 2, .tp_rank = 1};
  const std::vector<int32_t> left = {0, 2};
  const ParallelSpec after = without_ranks(kExperts, before, left, 1);
  EXPECT_EQ(after.ep_size, 2);
  EXPECT_EQ(after.ep_rank, 1);
  EXPECT_EQ(after.tp_size, 2);
  EXPECT_EQ(after.tp_rank, 1);
  EXPECT_EQ(after.num_redundant_experts, 0);
  // Experts 2 and 3 were on rank 1: one goes to each.
  EXPECT_EQ(after.rank_of, (std::vector<int32_t>{0, 0, 0, 1, 1, 1}));
}

TEST(WithoutRanks, RankWithTwoOfAnExpert_KeepsOne) {
  const ExpertSlots slots{
      .num_experts = 3, .logical_of = {0, 0, 1, 2, 1, 2}, .first_of = {0, 3, 6}};
  const ParallelSpec after =
      without_ranks(3, with_slots({.ep_size = 2}, slots), std::vector<int32_t>{0}, 0);
  const ExpertSlots held = slots_of(3, after);
  EXPECT_EQ(std::vector<int32_t>(held.of_rank(0).begin(), held.of_rank(0).end()),
            (std::vector<int32_t>{0, 1, 2}));
}

TEST(WithoutRanks, RanksThatCannotBe_AreRefused) {
  const ParallelSpec before{.ep_size = 3};
  const std::vector<std::pair<std::vector<int32_t>, int32_t>> wrong = {
      {{}, 0}, {{0, 0}, 0}, {{1, 0}, 0}, {{3}, 0}, {{-1, 1}, 0}, {{0, 1}, 2}, {{0, 1}, -1}};
  for (const auto& [ranks, rank] : wrong) {
    try {
      without_ranks(4, before, ranks, rank);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    }
  }
}

}  // namespace
}  // namespace conclave
