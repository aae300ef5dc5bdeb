// Weights that one rank sends and the others receive: every byte, in parts, of any source, and what
// every rank learns where one of them fails.
#include "conclave/broadcast_weights.h"

#include "layer/moving_layers.h"
#include "layer/refit/broadcast_table.h"
#include "layer/refit_sources.h"
#include "support/role_sources.h"
#include "support/thread_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
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
using testing::RankOutcome;
using testing::run_ranks;
using testing::same_bits;

std::vector<RankOutcome> on_ranks(
    int32_t count, const std::function<void(int32_t, const Context&, Communicator&)>& body) {
  auto group = make_local_group({.num_ranks = count, .timeout = std::chrono::seconds(60)});
  return run_ranks(std::move(group), [&](int32_t rank, Communicator& communicator) {
    const Context context({.num_threads = 1});
    body(rank, context, communicator);
  });
}

std::vector<std::byte> bytes_of(const WeightSource& source, WeightId id, int64_t expert,
                                const WeightBlock& block) {
  const WeightInfo info = source.describe(id);
  const int64_t row = ((block.col_end - block.col_begin) * bit_size(info.dtype) + 7) / 8;
  std::vector<std::byte> bytes(static_cast<size_t>((block.row_end - block.row_begin) * row));
  source.read(id, expert, block, bytes);
  return bytes;
}

// Whole matrices, and blocks as tensor-parallel ranks read them.
void expect_same(const WeightSource& received, const WeightSource& sent, WeightId id,
                 int64_t expert) {
  const WeightInfo info = sent.describe(id);
  const WeightBlock whole{0, info.rows, 0, info.cols};
  EXPECT_EQ(bytes_of(received, id, expert, whole), bytes_of(sent, id, expert, whole));
  const WeightBlock part{info.rows / 3, info.rows, info.cols / 2, info.cols};
  EXPECT_EQ(bytes_of(received, id, expert, part), bytes_of(sent, id, expert, part));
}

TEST(BroadcastWeights, EveryRank_HasTheBytesOfTheRoot) {
  for (const testing::NamedSpec& named : testing::weight_families()) {
    const MoeSpec& spec = named.second;
    for (const auto& [ranks, root] : {std::pair(1, 0), std::pair(2, 1), std::pair(3, 0)}) {
      SCOPED_TRACE(named.first + " over " + std::to_string(ranks));
      const auto outcomes = on_ranks(ranks, [&, root = root](int32_t rank, const Context& context,
                                                             Communicator& communicator) {
        const auto source = make_synthetic_source(spec, 3);
        for (const int64_t exchange : {int64_t{100}, int64_t{5000}, int64_t{1} << 26}) {
          const BroadcastWeights received(context, communicator,
                                          rank == root ? source.get() : nullptr,
                                          {.root = root, .exchange_bytes = exchange});
          EXPECT_EQ(received.memory(), MemoryKind::kHost);
          for (const WeightId id : weights::kAll) {
            const WeightInfo info = received.describe(id);
            ASSERT_EQ(info.count, source->describe(id).count) << to_string(id);
            for (int64_t expert = 0; expert < info.count; ++expert) {
              expect_same(received, *source, id, expert);
            }
          }
        }
      });
      EXPECT_EQ(testing::first_failure(outcomes), "");
    }
  }
}

// Only what is named travels, with all that is packed together with it.
TEST(BroadcastWeights, Part_IsWhatARefitNeedsOfIt) {
  MoeSpec spec = testing::e4m3_spec(
      6, 2, 96, 64,
      {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic});
  for (const RefitScope& part :
       {RefitScope{.experts = {4, 1}}, RefitScope{.tensors = {weights::kDown}},
        RefitScope{.experts = {2}, .tensors = {weights::kUp}},
        RefitScope{.tensors = {weights::kRouter}}}) {
    const auto outcomes =
        on_ranks(2, [&](int32_t rank, const Context& context, Communicator& communicator) {
          const auto first = make_synthetic_source(spec, 3);
          const auto second = make_synthetic_source(spec, 4);
          const BroadcastWeights received(context, communicator, rank == 0 ? second.get() : nullptr,
                                          {.part = part});
          MoeLayer layer = MoeLayer::create(context, spec, *first);
          Refit refit(layer, {.scope = part});
          refit.stage(received);
          refit.commit();
          MoeLayer direct = MoeLayer::create(context, spec, *first);
          Refit other(direct, {.scope = part});
          other.stage(*second);
          other.commit();
          EXPECT_EQ(Refit::content_hash(layer), Refit::content_hash(direct));
          if (rank == 0) return;
          EXPECT_EQ(code_of([&] { received.view(weights::kGate, 0); }), ErrorCode::kTensorMissing);
        });
    EXPECT_EQ(testing::first_failure(outcomes), "");
  }
}

// Ranks of both kinds of split change their layers from what one of them has.
TEST(BroadcastWeights, RefitOverRanks_IsAsFromASourceOfTheirOwn) {
  MoeSpec spec = make_spec(6, 2, 40, 48, DType::kBF16);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 16};
  const Tensor hidden = random_tensor(DType::kBF16, 5, 40, 5);
  for (const auto& [ep_size, tp_size] : {std::pair(2, 1), std::pair(1, 2)}) {
    on_grid(ep_size, tp_size, [&, ep = ep_size, tp = tp_size](const GridRank& rank) {
      const Context context(rank.context_options());
      const ParallelSpec parallel = rank.in({.ep_size = ep, .tp_size = tp});
      const auto second = make_synthetic_source(spec, 4);
      Communicator& all = ep > 1 ? *rank.communicator : *rank.tensor_communicator;
      MoeLayer layer =
          MoeLayer::create(context, spec, *make_synthetic_source(spec, 3), {}, parallel);
      Refit refit(layer);
      for (const RefitScope& part :
           {RefitScope{.experts = {0, 2, 4}}, RefitScope{.experts = {5, 3, 1}},
            RefitScope{.tensors = {weights::kRouter, weights::kSharedUp, weights::kSharedDown}}}) {
        const BroadcastWeights received(context, all, all.rank() == 1 ? second.get() : nullptr,
                                        {.root = 1, .part = part});
        refit.stage(received, part);
      }
      refit.commit();
      const MoeLayer fresh = MoeLayer::create(context, spec, *second, {}, parallel);
      EXPECT_TRUE(same_bits(forward(layer, hidden), forward(fresh, hidden)));
      EXPECT_EQ(Refit::content_hash(layer), Refit::content_hash(fresh));
    });
  }
}

// A source of the application's own that throws an exception of its own.
class Throws final : public WeightSource {
 public:
  explicit Throws(const WeightSource& inner) : inner_(inner) {}
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  void read(WeightId, int64_t, const WeightBlock&, std::span<std::byte>) const override {
    throw std::runtime_error("not today");
  }

 private:
  const WeightSource& inner_;
};

class Changed final : public WeightSource {
 public:
  explicit Changed(const WeightSource& inner) : inner_(inner) {}
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner_.read(id, expert, block, destination);
  }
  void check_unchanged() const override {
    throw Error(ErrorCode::kFileChanged, {.what = "written meanwhile"});
  }

 private:
  const WeightSource& inner_;
};

void expect_typed(const std::vector<RankOutcome>& outcomes, ErrorCode of_root) {
  ASSERT_EQ(outcomes.size(), 3U);
  EXPECT_EQ(outcomes[1].code, of_root);
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(outcomes[rank].code, ErrorCode::kCommMismatch) << rank;
    EXPECT_EQ(outcomes[rank].peer, 1) << rank;
  }
}

TEST(BroadcastWeights, RootThatFails_IsLearntOfByEveryRank) {
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 3);
  const auto run = [&](const WeightSource* of_root, const RefitScope& part = {}) {
    return on_ranks(3, [&](int32_t rank, const Context& context, Communicator& communicator) {
      const BroadcastWeights received(context, communicator, rank == 1 ? of_root : nullptr,
                                      {.root = 1, .part = part, .exchange_bytes = 3000});
    });
  };
  expect_typed(run(nullptr), ErrorCode::kNullPointer);
  expect_typed(run(source.get(), {.experts = {6}}), ErrorCode::kInvalidArgument);
  expect_typed(run(source.get(), {.tensors = {weights::kSharedUp}}), ErrorCode::kInvalidArgument);
  for (const int64_t read : {0, 5, 18}) {
    const FailsAtRead failing(*source, read);
    expect_typed(run(&failing), ErrorCode::kFileRead);
  }
  const Throws throws(*source);
  expect_typed(run(&throws), ErrorCode::kInternal);
  const Changed changed(*source);
  expect_typed(run(&changed), ErrorCode::kFileChanged);
}

TEST(BroadcastWeights, RanksThatDisagree_AreToldApart) {
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 3);
  for (const bool is_root : {true, false}) {
    const auto outcomes =
        on_ranks(2, [&](int32_t rank, const Context& context, Communicator& communicator) {
          BroadcastOptions options;
          if (is_root) options.root = rank;
          if (!is_root) options.exchange_bytes = 1000 + rank;
          const BroadcastWeights received(context, communicator, source.get(), options);
        });
    for (const RankOutcome& outcome : outcomes) {
      EXPECT_EQ(outcome.code, ErrorCode::kCommMismatch);
    }
  }
  const auto outside =
      on_ranks(2, [&](int32_t, const Context& context, Communicator& communicator) {
        EXPECT_EQ(code_of([&] {
                    const BroadcastWeights none(context, communicator, source.get(), {.root = 2});
                  }),
                  ErrorCode::kInvalidArgument);
        EXPECT_EQ(code_of([&] {
                    const BroadcastWeights none(context, communicator, source.get(),
                                                {.exchange_bytes = 0});
                  }),
                  ErrorCode::kInvalidArgument);
        EXPECT_EQ(code_of([&] {
                    const BroadcastWeights none(context, communicator, source.get(),
                                                {.memory = MemoryKind::kDevice});
                  }),
                  ErrorCode::kInvalidArgument);
      });
  EXPECT_EQ(testing::first_failure(outside), "");
}

// Words of another rank are a list of numbers until they are checked.
TEST(BroadcastTable, DamagedWords_AreRefused) {
  const MoeSpec spec = testing::make_spec(3, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 3);
  const std::vector<int64_t> good = BroadcastTable(*source, {.experts = {2}}).words();
  EXPECT_EQ(BroadcastTable(good).words(), good);
  // The index, the count, and the rows.
  for (const auto& [at, value] : {std::pair<size_t, int64_t>{0, -1}, {1, 0}, {2, -2}}) {
    std::vector<int64_t> damaged = good;
    damaged[at] = value;
    EXPECT_EQ(code_of([&] { BroadcastTable{damaged}; }), ErrorCode::kInvalidArgument) << at;
  }
  std::vector<int64_t> more_than_there_are(good.begin(), good.begin() + 5);
  more_than_there_are.insert(more_than_there_are.end(), {4, 0, 1, 2, 2});
  EXPECT_EQ(code_of([&] { BroadcastTable{more_than_there_are}; }), ErrorCode::kInvalidArgument);
  std::vector<int64_t> cut = good;
  cut.pop_back();
  EXPECT_EQ(code_of([&] { BroadcastTable{cut}; }), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace conclave
