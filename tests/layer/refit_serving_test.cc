// Refits beside forwards, over ranks, and of experts that have moved; which memory stays.
#include "layer/moving_layers.h"
#include "layer/refit_sources.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::FailsAtRead;
using testing::forward;
using testing::GridRank;
using testing::make_spec;
using testing::on_grid;
using testing::random_tensor;
using testing::same_bits;

constexpr std::array kModes = {RefitMode::kStaged, RefitMode::kStagedCopy, RefitMode::kInPlace};

// Forwards of several threads see the weights of one of two sources, in every mode that lets them
// run, with commits that no stream of forwards can keep waiting.
TEST(RefitBesideForwards, EveryOutput_IsOfOldOrNewWeights) {
  const MoeSpec spec = make_spec(6, 2, 83, 45, DType::kBF16);
  const Context context({.num_threads = 2});
  const auto first = make_synthetic_source(spec, 3);
  const auto second = make_synthetic_source(spec, 4);
  MoeLayer layer = MoeLayer::create(context, spec, *first);
  const Tensor hidden = random_tensor(DType::kBF16, 5, spec.hidden_size, 5);
  const Tensor of_first = forward(layer, hidden);
  const Tensor of_second = forward(MoeLayer::create(context, spec, *second), hidden);
  std::atomic<bool> stopped{false};
  std::atomic<int64_t> mixtures{0};
  std::array<std::atomic<int64_t>, 2> seen{};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      Workspace workspace(context, layer.workspace_bytes());
      while (!stopped.load()) {
        Tensor out(DType::kBF16, {5, spec.hidden_size});
        layer.forward({.hidden = hidden.view(), .out = out.view(), .workspace = &workspace});
        const bool is_first = same_bits(out, of_first);
        if (!is_first && !same_bits(out, of_second)) mixtures.fetch_add(1);
        seen[is_first ? 0 : 1].fetch_add(1);
      }
    });
  }
  constexpr uint64_t kCommits = 30;
  for (uint64_t commit = 1; commit <= kCommits; ++commit) {
    const bool to_second = commit % 2 == 1;
    Refit refit(layer, {.mode = commit % 3 == 0 ? RefitMode::kStagedCopy : RefitMode::kStaged});
    refit.stage(to_second ? *second : *first);
    refit.commit();
    const int64_t before = seen[to_second ? 1 : 0].load();
    while (seen[to_second ? 1 : 0].load() == before) std::this_thread::yield();
    EXPECT_EQ(layer.status().refit_epoch, commit);
  }
  stopped = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mixtures.load(), 0);
}

// Forwards between the first stage in place and commit are refused, those under way end first.
TEST(RefitBesideForwards, InPlace_RefusesForwardsUntilCommit) {
  const testing::OwnedLayer owned = testing::make_layer(make_spec(6, 2, 40, 24, DType::kF32));
  auto& layer = const_cast<MoeLayer&>(owned.layer);
  const Tensor hidden = random_tensor(DType::kBF16, 5, 40, 5);
  Refit refit(layer, {.mode = RefitMode::kInPlace, .scope = {.experts = {1, 2}}});
  EXPECT_NO_THROW(forward(layer, hidden));
  refit.stage(*owned.source, {.experts = {1}});
  EXPECT_EQ(code_of([&] { forward(layer, hidden); }), ErrorCode::kState);
  refit.stage(*owned.source, {.experts = {2}});
  refit.commit();
  EXPECT_NO_THROW(forward(layer, hidden));
}

// Keeps account of large blocks.
class BlockAllocator final : public HostAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    void* const block = ::operator new(bytes, std::align_val_t(alignment));
    const std::lock_guard lock(mutex_);
    blocks_[block] = {bytes, alignment};
    return block;
  }
  void deallocate(void* block, size_t) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    ::operator delete(block, std::align_val_t(found->second.second));
    blocks_.erase(found);
  }
  std::vector<const void*> blocks_of(size_t least_bytes) const {
    const std::lock_guard lock(mutex_);
    std::vector<const void*> large;
    for (const auto& [block, size] : blocks_) {
      if (size.first >= least_bytes) large.push_back(block);
    }
    return large;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const void*, std::pair<size_t, size_t>> blocks_;
};

TEST(RefitMemory, StaysWhereItIsPromised) {
  const MoeSpec spec = make_spec(6, 2, 64, 64, DType::kF32);
  constexpr size_t kSlabs = size_t{6} * 64 * 64 * 4;  // down has the smaller ones
  BlockAllocator allocator;
  {
    const Context context({.num_threads = 2, .host_allocator = &allocator});
    const auto source = make_synthetic_source(spec, 3);
    MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 4});
    const auto at_first = allocator.blocks_of(kSlabs);
    for (const RefitMode mode : kModes) {
      Refit refit(layer, {.mode = mode});
      refit.stage(*source);
      const size_t held = allocator.blocks_of(kSlabs).size();
      EXPECT_EQ(held, at_first.size() + (mode == RefitMode::kInPlace ? 0 : 2));
      refit.commit();
      const auto now = allocator.blocks_of(kSlabs);
      EXPECT_EQ(now.size(), at_first.size());
      // One expert is held beside the others, and nothing stays when it is rolled back.
      Refit one(layer, {.mode = mode, .scope = {.experts = {2}}});
      EXPECT_EQ(allocator.blocks_of(kSlabs), now);
      one.stage(*source);
      one.rollback();
      EXPECT_EQ(allocator.blocks_of(kSlabs), now);
    }
    for (const RefitMode mode : {RefitMode::kStaged, RefitMode::kStagedCopy}) {
      std::vector<const void*> kept;
      for (int i = 0; i < 3; ++i) {
        Refit refit(layer, {.mode = mode, .keeps_memory = true});
        if (i == 0) kept = allocator.blocks_of(kSlabs);
        EXPECT_EQ(kept.size(), at_first.size() + 2);
        EXPECT_EQ(allocator.blocks_of(kSlabs), kept);
        refit.stage(*make_synthetic_source(spec, 4 + static_cast<uint64_t>(i)));
        if (i != 1) refit.commit();
      }
    }
    const auto sixth = make_synthetic_source(spec, 6);
    const uint64_t of_sixth =
        Refit::content_hash(MoeLayer::create(context, spec, *sixth, {.max_tokens = 4}));
    EXPECT_EQ(Refit::content_hash(layer), of_sixth);
    { const Refit last(layer, {.mode = RefitMode::kInPlace}); }
    EXPECT_EQ(allocator.blocks_of(kSlabs).size(), at_first.size());
    const auto before = allocator.blocks_of(kSlabs);
    for (const RefitMode mode : {RefitMode::kStagedCopy, RefitMode::kInPlace}) {
      Refit refit(layer, {.mode = mode});
      refit.stage(*source);
      refit.commit();
      EXPECT_EQ(allocator.blocks_of(kSlabs), before);
    }
  }
  EXPECT_TRUE(allocator.blocks_of(1).empty());
}

// Steps of a trainer over ranks: EP, TP and both; experts move in between.
TEST(RefitOverRanks, EveryRankGoesToTheNewWeights) {
  MoeSpec spec = make_spec(6, 2, 40, 48, DType::kBF16);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 16};
  const auto second = make_synthetic_source(spec, 4);
  const auto third = make_synthetic_source(spec, 6);
  const Tensor hidden = random_tensor(DType::kBF16, 5, 40, 5);
  for (const auto& [ep_size, tp_size] : {std::pair(2, 1), std::pair(1, 2), std::pair(2, 2)}) {
    for (const RefitMode mode : kModes) {
      on_grid(ep_size, tp_size, [&, mode, ep = ep_size, tp = tp_size](const GridRank& rank) {
        const Context context(rank.context_options());
        const ParallelSpec parallel = rank.in({.ep_size = ep, .tp_size = tp});
        const auto make = [&](const WeightSource& source) {
          return MoeLayer::create(context, spec, source, {.spare_experts = ep > 1 ? 1 : 0},
                                  parallel);
        };
        MoeLayer layer = make(*make_synthetic_source(spec, 3));
        if (ep > 1) {
          layer.update_placement(
              {.num_experts = 6, .logical_of = {3, 1, 5, 0, 2, 4}, .first_of = {0, 3, 6}});
        }
        const auto refit_to = [&](const WeightSource& source, const RefitScope& scope) {
          Refit refit(layer, {.mode = mode, .scope = scope});
          refit.stage(source);
          refit.commit();
        };
        refit_to(*second, {});
        const MoeLayer of_second = make(*second);
        EXPECT_TRUE(same_bits(forward(layer, hidden), forward(of_second, hidden)));
        const RefitScope scope{.experts = {1, 5}};
        const testing::MergedSource merged(spec, *second, *third, scope);
        refit_to(testing::NamedSource(spec, *third, scope), scope);
        MoeLayer fresh = make(merged);
        EXPECT_TRUE(same_bits(forward(layer, hidden), forward(fresh, hidden)));
        if (ep > 1) fresh.update_placement(layer.slots());
        EXPECT_EQ(Refit::content_hash(layer), Refit::content_hash(fresh));
        EXPECT_EQ(layer.status().refit_epoch, 2U);
      });
    }
  }
}

// What one rank cannot commit none does; all serve on with the old weights.
TEST(RefitOverRanks, OneRankFails_NoneChanges) {
  const MoeSpec spec = make_spec(6, 2, 40, 48, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, 5, 40, 5);
  enum class Fault : uint8_t { kRead, kUnstaged, kScope, kEpoch };
  for (const Fault fault : {Fault::kRead, Fault::kUnstaged, Fault::kScope, Fault::kEpoch}) {
    on_grid(2, 2, [&, fault](const GridRank& rank) {
      SCOPED_TRACE(static_cast<int>(fault));
      const Context context(rank.context_options());
      const ParallelSpec parallel = rank.in({.ep_size = 2, .tp_size = 2});
      const auto first = make_synthetic_source(spec, 3);
      const auto second = make_synthetic_source(spec, 4);
      MoeLayer layer = MoeLayer::create(context, spec, *first, {}, parallel);
      const Tensor before = forward(layer, hidden);
      const bool is_faulty = rank.ep_rank == 1 && rank.tp_rank == 0;
      RefitOptions options{.scope = {.experts = {0, 5}}};
      if (is_faulty && fault == Fault::kScope) options.scope.experts = {0, 4};
      if (is_faulty && fault == Fault::kEpoch) options.epoch = 7;
      Refit refit(layer, options);
      const FailsAtRead failing(*second, 1);
      if (is_faulty && fault == Fault::kRead) {
        EXPECT_EQ(code_of([&] { refit.stage(failing); }), ErrorCode::kFileRead);
      } else if (!is_faulty || fault != Fault::kUnstaged) {
        refit.stage(*second);
      }
      const ErrorCode code = code_of([&] { refit.commit(); });
      if (is_faulty && fault == Fault::kRead) {
        EXPECT_EQ(code, ErrorCode::kFileRead);
      } else if (is_faulty && fault == Fault::kUnstaged) {
        EXPECT_EQ(code, ErrorCode::kState);
      } else {
        EXPECT_EQ(code, ErrorCode::kCommMismatch);
      }
      refit.rollback();
      EXPECT_EQ(layer.status().refit_epoch, 0U);
      EXPECT_TRUE(same_bits(forward(layer, hidden), before));
    });
  }
}

// A rank that gives up is named to the others at once, long before their deadline.
TEST(RefitOverRanks, OneRankWithdraws_TheOthersLearnWho) {
  const MoeSpec spec = make_spec(6, 2, 40, 48, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, 5, 40, 5);
  for (const auto& [ep_size, tp_size] : {std::pair(3, 1), std::pair(2, 2)}) {
    on_grid(ep_size, tp_size, [&, ep = ep_size, tp = tp_size](const GridRank& rank) {
      const Context context(rank.context_options());
      const ParallelSpec parallel = rank.in({.ep_size = ep, .tp_size = tp});
      const auto first = make_synthetic_source(spec, 3);
      const auto second = make_synthetic_source(spec, 4);
      MoeLayer layer = MoeLayer::create(context, spec, *first, {}, parallel);
      const Tensor before = forward(layer, hidden);
      Refit refit(layer);
      refit.stage(*second);
      if (rank.ep_rank == 1 && rank.tp_rank == 0) {
        refit.withdraw();
        EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kState);
        refit.withdraw();
      } else {
        try {
          refit.commit();
          ADD_FAILURE() << "committed without a rank";
        } catch (const CommError& error) {
          EXPECT_EQ(error.code(), ErrorCode::kCommMismatch);
          if (tp == 1) {
            EXPECT_EQ(error.peer(), 1);
            EXPECT_NE(std::string(error.what()).find("has withdrawn"), std::string::npos)
                << error.what();
          }
        }
        refit.rollback();
      }
      EXPECT_TRUE(same_bits(forward(layer, hidden), before));
      Refit again(layer);
      again.stage(*second);
      again.commit();
      EXPECT_EQ(layer.status().refit_epoch, 1U);
      EXPECT_FALSE(same_bits(forward(layer, hidden), before));
    });
  }
}

// One that is refused where it begins is named too, whatever the reason; so is one that says it
// later, from where it may use the communicator. All of them go on.
TEST(RefitOverRanks, OneRankIsRefused_TheOthersLearnWho) {
  const MoeSpec spec = make_spec(6, 2, 40, 48, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, 5, 40, 5);
  enum class Refused : uint8_t { kExpert, kTensor, kEpoch, kSecond, kSilent, kNeverBegun };
  for (const auto refused : {Refused::kExpert, Refused::kTensor, Refused::kEpoch, Refused::kSecond,
                             Refused::kSilent, Refused::kNeverBegun}) {
    for (const auto& [ep_size, tp_size] : {std::pair(3, 1), std::pair(1, 2), std::pair(2, 2)}) {
      on_grid(ep_size, tp_size, [&, ep = ep_size, tp = tp_size](const GridRank& rank) {
        SCOPED_TRACE(static_cast<int>(refused));
        const Context context(rank.context_options());
        const ParallelSpec parallel = rank.in({.ep_size = ep, .tp_size = tp});
        const auto first = make_synthetic_source(spec, 3);
        const auto second = make_synthetic_source(spec, 4);
        MoeLayer layer = MoeLayer::create(context, spec, *first, {}, parallel);
        const Tensor before = forward(layer, hidden);
        const auto begun = std::chrono::steady_clock::now();
        if (rank.ep_rank == ep - 1 && rank.tp_rank == tp - 1) {
          std::optional<Refit> open;
          if (refused == Refused::kSecond) open.emplace(layer);
          RefitOptions options;
          if (refused == Refused::kTensor) {
            options.scope.tensors = {refit_tensor("shared_down")};
          } else if (refused == Refused::kEpoch) {
            options.epoch = UINT64_MAX;
          } else if (refused != Refused::kSecond) {
            options.scope.experts = {6};
          }
          if (refused == Refused::kSilent) options.refusal = RefitRefusal::kSilent;
          if (refused != Refused::kNeverBegun) {
            EXPECT_EQ(code_of([&] { const Refit refit(layer, options); }),
                      open ? ErrorCode::kState : ErrorCode::kInvalidArgument);
          }
          if (refused >= Refused::kSilent) Refit::withdraw(layer);
        } else {
          Refit refit(layer);
          refit.stage(*second);
          try {
            refit.commit();
            ADD_FAILURE() << "committed without a rank";
          } catch (const CommError& error) {
            EXPECT_EQ(error.code(), ErrorCode::kCommMismatch);
            if (ep == 1 || tp == 1) {
              EXPECT_EQ(error.peer(), ep * tp - 1) << error.what();
            }
          }
        }
        EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
        EXPECT_TRUE(same_bits(forward(layer, hidden), before));
        Refit again(layer);
        again.stage(*second);
        again.commit();
        EXPECT_EQ(layer.status().refit_epoch, 1U);
      });
    }
  }
}

// Refused alike on every rank, each has its own error, and a layer of one rank asks nobody.
TEST(RefitOverRanks, AllAreRefused_EachHasItsOwnError) {
  const MoeSpec spec = make_spec(6, 2, 40, 48, DType::kBF16);
  on_grid(2, 2, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    const auto source = make_synthetic_source(spec, 3);
    MoeLayer layer =
        MoeLayer::create(context, spec, *source, {}, rank.in({.ep_size = 2, .tp_size = 2}));
    const RefitOptions options{.scope = {.experts = {rank.ep_rank == 0 ? 6 : -1}}};
    EXPECT_EQ(code_of([&] { const Refit refit(layer, options); }), ErrorCode::kInvalidArgument);
    EXPECT_EQ(layer.status().refit_epoch, 0U);
  });
}

}  // namespace
}  // namespace conclave
