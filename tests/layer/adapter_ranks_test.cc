// Adapters of layers that are split over ranks: as threads, with experts, slices and both.
#include "layer/random_adapter.h"
#include "support/rank_grid.h"

#include <gtest/gtest.h>

#include <mutex>

namespace conclave::testing {
namespace {

MoeSpec split_spec(DType dtype) {
  MoeSpec spec = make_spec(6, 3, 72, 45, dtype);
  spec.has_bias = true;
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 38};
  return spec;
}

struct Split {
  const char* name;
  int32_t ep = 1;
  int32_t tp = 1;
  EpTransport transport = EpTransport::kVariable;
  int32_t redundant = 0;
};

// Rows of one rank: rank r brings tokens r, r + ep, ...
std::vector<int64_t> rows_of(int32_t rank, int32_t ranks, int64_t tokens) {
  std::vector<int64_t> rows;
  for (int64_t t = rank; t < tokens; t += ranks) rows.push_back(t);
  return rows;
}

class AdapterSplits : public ::testing::TestWithParam<Split> {};

TEST_P(AdapterSplits, Results_AreThoseOfOneRank) {
  const Split& split = GetParam();
  constexpr int64_t kTokens = 23;
  const MoeSpec spec = split_spec(DType::kF32);
  const LoraAdapter first = random_adapter(spec, {.rank = 16, .fused = true});
  const LoraAdapter second = random_adapter(spec, {.rank = 5, .every = 2}, 7000);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, 72, 3);
  const Tensor ids = id_tensor(kTokens, {0, 1, -1, 0});
  const LayerOptions options{.max_tokens = 6, .transport = split.transport, .max_adapter_rank = 16};
  OwnedLayer whole = make_layer(spec, options);
  whole.layer.add_adapter(first);
  whole.layer.add_adapter(second);
  const LayerOutput expected =
      run_layer(whole.layer, hidden.view(), DType::kF32, {.adapter_ids = ids.view()});

  std::mutex mutex;
  on_grid(split.ep, split.tp, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    const auto source = make_synthetic_source(spec, 11);
    MoeLayer layer = MoeLayer::create(
        context, spec, *source, options,
        rank.in(
            {.ep_size = split.ep, .num_redundant_experts = split.redundant, .tp_size = split.tp}));
    layer.add_adapter(first);
    layer.add_adapter(second);
    const std::vector<int64_t> rows = rows_of(rank.ep_rank, split.ep, kTokens);
    const Tensor own = gather_rows(hidden, rows);
    Tensor own_ids(DType::kI32, {static_cast<int64_t>(rows.size())});
    for (size_t i = 0; i < rows.size(); ++i) {
      own_ids.as<int32_t>()[i] = ids.as<int32_t>()[rows[i]];
    }
    const LayerOutput output =
        run_layer(layer, own.view(), DType::kF32, {.adapter_ids = own_ids.view()});
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      if (split.tp == 1) {
        EXPECT_EQ(row_bytes(output.out, at), row_bytes(expected.out, rows[i])) << rows[i];
        continue;
      }
      // Slices add other parts of the same sums.
      double difference = 0;
      double size = 0;
      for (int64_t c = 0; c < 72; ++c) {
        const double mine = output.out.as<float>()[at * 72 + c];
        const double theirs = expected.out.as<float>()[rows[i] * 72 + c];
        difference += (mine - theirs) * (mine - theirs);
        size += theirs * theirs;
      }
      EXPECT_LE(std::sqrt(difference / size), accuracy_bar(DType::kF32, DType::kF32));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, AdapterSplits,
    ::testing::Values(Split{.name = "Experts", .ep = 2}, Split{.name = "ThreeRanks", .ep = 3},
                      Split{.name = "FixedSlots", .ep = 2, .transport = EpTransport::kFixedSlots},
                      Split{.name = "Replicas", .ep = 2, .redundant = 2},
                      Split{.name = "ReplicasBesideTheirExperts", .redundant = 4},
                      Split{.name = "ReplicasOnAllRanks", .ep = 2, .redundant = 8},
                      Split{.name = "Slices", .tp = 3}, Split{.name = "Both", .ep = 2, .tp = 2}),
    [](const auto& split) { return std::string(split.param.name); });

// Rows travel to ranks whose own call names no adapter, or whose ids are all -1: they are computed
// with theirs all the same, and calls in which nobody names one have the bits of the layer without.
TEST(AdapterRanksNames, RowsOfOneRank_KeepTheirAdapter) {
  const MoeSpec spec = make_spec(6, 3, 40, 24, DType::kF32);
  const LoraAdapter adapter = random_adapter(spec, {.rank = 8});
  const Tensor hidden = random_tensor(DType::kF32, 5, 40, 3);
  OwnedLayer whole = make_layer(spec, {.max_adapter_rank = 8});
  const LayerOutput plain = run_layer(whole.layer, hidden.view(), DType::kF32);
  const int32_t id = whole.layer.add_adapter(adapter);
  const LayerOutput adapted = run_layer(whole.layer, hidden.view(), DType::kF32, {.adapter = id});
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    const auto source = make_synthetic_source(spec, 11);
    MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.max_adapter_rank = 8}, rank.in({.ep_size = 2}));
    layer.add_adapter(adapter);
    const Tensor none = id_tensor(5, {-1});
    const auto expect = [&](bool first_names, bool others_give_ids) {
      const bool is_first = rank.ep_rank == 0;
      ForwardArgs args;
      if (is_first && first_names) args.adapter = id;
      if (!is_first && others_give_ids) args.adapter_ids = none.view();
      const LayerOutput output = run_layer(layer, hidden.view(), DType::kF32, args);
      const bool has_one = is_first && first_names;
      EXPECT_TRUE(same_bits(output.out, has_one ? adapted.out : plain.out))
          << rank.ep_rank << first_names << others_give_ids;
    };
    for (const bool first_names : {true, false}) {
      expect(first_names, false);
      expect(first_names, true);
    }
  });
}

// Memory of a rank is that of its experts.
TEST(AdapterRanksMemory, EachRank_HoldsItsExperts) {
  const MoeSpec spec = make_spec(6, 3, 72, 45, DType::kF32);
  const LoraAdapter adapter = random_adapter(spec, {.rank = 16});
  OwnedLayer whole = make_layer(spec, {.max_adapter_rank = 16});
  whole.layer.add_adapter(adapter);
  const size_t all = whole.layer.adapters()[0].bytes;
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    const auto source = make_synthetic_source(spec, 11);
    MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.max_adapter_rank = 16}, rank.in({.ep_size = 2}));
    layer.add_adapter(adapter);
    EXPECT_EQ(layer.adapters()[0].bytes, all / 2);
  });
}

// Ranks whose adapters differ learn of it, on each rank.
TEST(AdapterRanksMismatch, DifferentAdapters_AreACommError) {
  const MoeSpec spec = make_spec(6, 3, 40, 24, DType::kF32);
  for (const auto& [ep, tp] : {std::pair{2, 1}, std::pair{1, 2}}) {
    const auto errors = run_grid(ep, tp, [&](const GridRank& rank) {
      const Context context(rank.context_options());
      const auto source = make_synthetic_source(spec, 11);
      MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_adapter_rank = 16},
                                        rank.in({.ep_size = ep, .tp_size = tp}));
      const bool is_first = rank.ep_rank + rank.tp_rank == 0;
      layer.add_adapter(random_adapter(spec, {.rank = is_first ? 8 : 16}));
      const Tensor hidden = random_tensor(DType::kF32, 4, 40, 3);
      run_layer(layer, hidden.view(), DType::kF32);
    });
    for (size_t rank = 0; rank < errors.size(); ++rank) {
      ASSERT_TRUE(errors[rank]);
      try {
        std::rethrow_exception(errors[rank]);
      } catch (const CommError& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCommMismatch) << error.what();
        EXPECT_EQ(error.peer(), 1 - static_cast<int32_t>(rank)) << error.what();
      }
    }
  }
}

// Adapters stay where they are: experts that have some do not move.
TEST(AdapterRanksMoves, ExpertsWithAdapters_Stay) {
  const MoeSpec spec = make_spec(4, 2, 40, 24, DType::kF32);
  on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    const auto source = make_synthetic_source(spec, 11);
    MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.spare_experts = 1, .max_adapter_rank = 8},
                         rank.in({.ep_size = 2}));
    const LoraAdapter adapter = random_adapter(spec, {.rank = 8});
    const Tensor hidden = random_tensor(DType::kF32, 5, 40, 3);
    int32_t id = layer.add_adapter(adapter);
    const LayerOutput before = run_layer(layer, hidden.view(), DType::kF32, {.adapter = id});
    const ParallelSpec next = rank.in({.ep_size = 2, .placement = PlacementStrategy::kRoundRobin});
    EXPECT_EQ(code_of([&] { layer.update_placement(next); }), ErrorCode::kUnsupported);
    layer.remove_adapter(id);
    layer.update_placement(next);
    id = layer.add_adapter(adapter);
    const LayerOutput after = run_layer(layer, hidden.view(), DType::kF32, {.adapter = id});
    EXPECT_TRUE(same_bits(before.out, after.out));
  });
}

}  // namespace
}  // namespace conclave::testing
