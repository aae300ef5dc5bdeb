// Layers whose ranks are processes: the bits of one rank over any number of expert-parallel ranks,
// and over any grid the bits of the same grid of threads.
#include "layer/split_specs.h"
#include "support/layer_fixture.h"
#include "support/rank_grid.h"

#include "conclave/comm.h"
#include "conclave/migration.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::gather_rows;
using testing::GridRank;
using testing::make_layer;
using testing::NamedSpec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

constexpr int64_t kTokens = 45;

// The place of this process in a grid, with its two communicators.
class ProcessRank {
 public:
  ProcessRank(int32_t rank, int32_t tp_size) : ep_rank_(rank / tp_size), tp_rank_(rank % tp_size) {
    experts_ = connect("mpi", {.group = tp_rank_, .timeout = 60s});
    slices_ = connect("mpi", {.group = ep_rank_, .timeout = 60s});
  }
  GridRank place() const {
    return {.ep_rank = ep_rank_,
            .tp_rank = tp_rank_,
            .communicator = experts_->size() > 1 ? experts_.get() : nullptr,
            .tensor_communicator = slices_->size() > 1 ? slices_.get() : nullptr};
  }

 private:
  int32_t ep_rank_;
  int32_t tp_rank_;
  std::unique_ptr<Communicator> experts_, slices_;
};

// Calls body(ep_size, tp_size, place) for each grid of as many ranks as there are.
void on_every_grid(const auto& body) {
  const auto all = connect("mpi", {.timeout = 60s});
  for (int32_t tp_size = 1; tp_size <= all->size(); ++tp_size) {
    if (all->size() % tp_size != 0) continue;
    const int32_t ep_size = all->size() / tp_size;
    SCOPED_TRACE("EP " + std::to_string(ep_size) + " x TP " + std::to_string(tp_size));
    const ProcessRank rank(all->rank(), tp_size);
    body(ep_size, tp_size, rank.place());
  }
}

// The rows of one expert-parallel rank: uneven, or all of them on the last rank.
std::vector<int64_t> rows_of(int32_t ep_rank, int32_t ep_size, bool one_rank_only) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < kTokens; ++row) {
    const int64_t owner = one_rank_only ? ep_size - 1 : row * row % ep_size;
    if (owner == ep_rank) rows.push_back(row);
  }
  return rows;
}

struct SplitCase {
  LayerOptions options;
  ParallelSpec parallel;
  bool one_rank_only = false;
};

Tensor run_split(const MoeSpec& spec, const SplitCase& split, const GridRank& place,
                 const Tensor& hidden) {
  const Context context(place.context_options());
  const auto source = make_synthetic_source(spec, 11);
  const MoeLayer layer =
      MoeLayer::create(context, spec, *source, split.options, place.in(split.parallel));
  const Tensor mine =
      gather_rows(hidden, rows_of(place.ep_rank, split.parallel.ep_size, split.one_rank_only));
  Tensor first = run_layer(layer, mine.view(), DType::kBF16).out;
  const Tensor second = run_layer(layer, mine.view(), DType::kBF16).out;
  EXPECT_TRUE(same_bits(first, second)) << "two runs";
  return first;
}

// The thread at the same place of a grid of threads computes this.
Tensor run_by_threads(const MoeSpec& spec, const SplitCase& split, const GridRank& mine,
                      const Tensor& hidden) {
  Tensor result;
  testing::on_grid(split.parallel.ep_size, split.parallel.tp_size, [&](const GridRank& place) {
    Tensor out = run_split(spec, split, place, hidden);
    if (place.ep_rank == mine.ep_rank && place.tp_rank == mine.tp_rank) result = std::move(out);
  });
  return result;
}

void expect_bits(const NamedSpec& named, const SplitCase& split, const GridRank& place,
                 const Tensor& hidden, const Tensor& one_rank) {
  SCOPED_TRACE(named.first + (split.one_rank_only ? ", tokens on one rank" : ""));
  const Tensor out = run_split(named.second, split, place, hidden);
  EXPECT_TRUE(same_bits(out, run_by_threads(named.second, split, place, hidden))) << "threads";
  if (split.parallel.tp_size > 1) return;  // other addends: within bar N1 only
  const auto rows = rows_of(place.ep_rank, split.parallel.ep_size, split.one_rank_only);
  EXPECT_TRUE(same_bits(out, gather_rows(one_rank, rows))) << "one rank";
}

TEST(MpiLayers, EveryPartOfALayer_HasTheBitsOfThreadsAndOfOneRank) {
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, 40, 1);
  on_every_grid([&](int32_t ep_size, int32_t tp_size, const GridRank& place) {
    for (const NamedSpec& named : testing::split_specs(24, DType::kBF16)) {
      const OwnedLayer one = make_layer(named.second);
      const Tensor expected = run_layer(one.layer, hidden.view(), DType::kBF16).out;
      for (const bool one_rank_only : {false, true}) {
        const SplitCase split{.options = {.max_tokens = 8},
                              .parallel = {.ep_size = ep_size, .tp_size = tp_size},
                              .one_rank_only = one_rank_only};
        expect_bits(named, split, place, hidden, expected);
      }
    }
  });
}

TEST(MpiLayers, EveryExchange_HasTheBitsOfThreadsAndOfOneRank) {
  NamedSpec named{"Shared", testing::make_spec(7, 3, 40, 24, DType::kBF16)};
  named.second.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 16};
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, 40, 1);
  const OwnedLayer one = make_layer(named.second);
  const Tensor expected = run_layer(one.layer, hidden.view(), DType::kBF16).out;
  on_every_grid([&](int32_t ep_size, int32_t tp_size, const GridRank& place) {
    for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
      for (const auto order :
           {ChunkOrder::kInTurn, ChunkOrder::kByTwos, ChunkOrder::kMicroBatches}) {
        for (const int32_t replicas : {0, 4}) {
          const SplitCase split{
              .options = {.max_tokens = order == ChunkOrder::kMicroBatches ? 64 : 8,
                          .transport = transport,
                          .chunk_order = order,
                          .micro_batch_tokens = order == ChunkOrder::kMicroBatches ? 2 : 0},
              .parallel = {.ep_size = ep_size,
                           .placement = PlacementStrategy::kRoundRobin,
                           .num_redundant_experts = replicas,
                           .tp_size = tp_size}};
          expect_bits(named, split, place, hidden, expected);
        }
      }
    }
  });
}

// Experts move between processes: at once, and beside forwards over groups of their own.
TEST(MpiLayers, ExpertsThatMove_KeepEveryBit) {
  const MoeSpec spec = testing::make_spec(7, 3, 40, 24, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, 9, 40, 1);
  const auto source = make_synthetic_source(spec, 11);
  on_every_grid([&](int32_t ep_size, int32_t tp_size, const GridRank& place) {
    if (ep_size == 1) return;
    const auto second = connect("mpi", {.group = place.tp_rank, .timeout = 60s});
    const Context context(place.context_options());
    const ParallelSpec linear{.ep_size = ep_size, .num_redundant_experts = 2, .tp_size = tp_size};
    ParallelSpec turned = linear;
    turned.placement = PlacementStrategy::kRoundRobin;
    turned.replica_of = {4, 6};
    MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.spare_experts = 1}, place.in(linear));
    const Tensor before = run_layer(layer, hidden.view(), DType::kBF16).out;
    layer.update_placement(place.in(turned));
    EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kBF16).out, before));
    Migration back(layer, slots_of(7, linear),
                   {.communicator = second.get(), .processor_share = 1, .piece_bytes = 4096});
    for (int32_t i = 0; i < 10; ++i) {
      EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kBF16).out, before));
    }
    back.finish();
    EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kBF16).out, before));
  });
}

// A call threw this on this rank.
struct Thrown {
  std::string code = "nothing";
  int32_t peer = -1;
  std::string text;
};
Thrown thrown_by(const auto& call) {
  try {
    call();
  } catch (const CommError& error) {
    return {std::string(to_string(error.code())), error.peer(), error.what()};
  } catch (const Error& error) {
    return {std::string(to_string(error.code())), -1, error.what()};
  }
  return {};
}

TEST(MpiLayers, RankWithAnotherSpec_IsAMismatchOnEveryRankThatNamesTheField) {
  const auto all = connect("mpi", {.timeout = 60s});
  if (all->size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  MoeSpec spec = testing::make_spec(8, all->rank() == 1 ? 3 : 2, 40, 24, DType::kBF16);
  const Context context({.num_threads = 1, .communicator = all.get()});
  const auto source = make_synthetic_source(spec, 11);
  const Thrown thrown = thrown_by([&] {
    MoeLayer::create(context, spec, *source, {}, {.ep_size = all->size(), .ep_rank = all->rank()});
  });
  EXPECT_EQ(thrown.code, "kCommMismatch") << thrown.text;
  EXPECT_NE(thrown.text.find("top_k"), std::string::npos) << thrown.text;
}

TEST(MpiLayers, BadInputOnOneRank_EndsTheForwardOnEveryRank) {
  const auto all = connect("mpi", {.timeout = 60s});
  if (all->size() == 1) GTEST_SKIP() << "there are no others to be told";
  const MoeSpec spec = testing::make_spec(8, 2, 40, 24, DType::kBF16);
  const Context context({.num_threads = 1, .communicator = all.get()});
  const auto source = make_synthetic_source(spec, 11);
  const MoeLayer layer = MoeLayer::create(context, spec, *source, {},
                                          {.ep_size = all->size(), .ep_rank = all->rank()});
  const Tensor hidden = random_tensor(DType::kBF16, 5, all->rank() == 1 ? 39 : 40, 1);
  const auto start = std::chrono::steady_clock::now();
  const Thrown thrown = thrown_by([&] { run_layer(layer, hidden.view(), DType::kBF16); });
  // Before anything is exchanged a rank may correct its call: that it will not is its own word.
  if (thrown.code == "kShape") all->abort(thrown.text);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
  if (all->rank() == 1) {
    EXPECT_EQ(thrown.code, "kShape") << thrown.text;
  } else {
    EXPECT_EQ(thrown.code, "kCommAborted") << thrown.text;
    EXPECT_EQ(thrown.peer, 1);
  }
}

}  // namespace
}  // namespace conclave
