// Tensor-parallel slices over 1, 2, 3, 4 and 8 thread ranks, alone and with expert parallelism.

#include "layer/split_specs.h"
#include "support/layer_fixture.h"
#include "support/rank_grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::GridRank;
using testing::make_spec;
using testing::on_grid;
using testing::random_tensor;
using testing::run_grid;
using testing::run_layer;
using testing::same_bits;

struct TpCase {
  int32_t ep_size;
  int32_t tp_size;
  int64_t inner;
  DType dtype;
};

std::string name_of(const ::testing::TestParamInfo<TpCase>& info) {
  const TpCase& c = info.param;
  return "Ep" + std::to_string(c.ep_size) + "Tp" + std::to_string(c.tp_size) + "I" +
         std::to_string(c.inner) + (c.dtype == DType::kF32 ? "F32" : "BF16");
}

std::vector<TpCase> all_cases() {
  std::vector<TpCase> cases;
  for (const auto& [ep, tp] : std::vector<std::pair<int32_t, int32_t>>{
           {1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 8}, {2, 2}, {2, 3}, {3, 2}}) {
    // No size but 3 divides 45; with 5 columns, some of 8 ranks have none.
    for (const int64_t inner : {45, 5}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) cases.push_back({ep, tp, inner, dtype});
    }
  }
  return cases;
}

void expect_whole(const TpCase& c, const MoeSpec& spec) {
  const int64_t tokens = 13;
  const auto source = make_synthetic_source(spec, 11);
  // There is one output per rank; each expert-parallel rank has tokens of its own.
  const auto hidden_of = [&](int32_t ep_rank) {
    return random_tensor(c.dtype, tokens, 40, 1 + static_cast<uint64_t>(ep_rank));
  };
  std::vector<Tensor> outputs(static_cast<size_t>(c.ep_size * c.tp_size));
  on_grid(c.ep_size, c.tp_size, [&](const GridRank& rank) {
    const Tensor hidden = hidden_of(rank.ep_rank);
    const Context context(rank.context_options());
    const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 4},
                                            rank.in({.ep_size = c.ep_size, .tp_size = c.tp_size}));
    Tensor out(c.dtype, {tokens, 40});
    layer.forward({.hidden = hidden.view(), .out = out.view()});
    outputs[static_cast<size_t>(rank.ep_rank * c.tp_size + rank.tp_rank)] = std::move(out);
  });
  const Context plain({.num_threads = 1});
  for (int32_t ep = 0; ep < c.ep_size; ++ep) {
    const Tensor& first = outputs[static_cast<size_t>(ep * c.tp_size)];
    for (int32_t tp = 1; tp < c.tp_size; ++tp) {
      EXPECT_TRUE(same_bits(first, outputs[static_cast<size_t>(ep * c.tp_size + tp)])) << tp;
    }
    const Tensor hidden = hidden_of(ep);
    const ReferenceResult reference =
        reference_forward(plain, spec, *source, {.hidden = hidden.view()});
    EXPECT_LE(worst(token_errors(first.view(), reference.output)), accuracy_bar(c.dtype, c.dtype));
  }
}

class TensorParallel : public ::testing::TestWithParam<TpCase> {};

TEST_P(TensorParallel, Slices_AddUpToTheWholeWithinTheBarAndInTheSameBits) {
  for (const auto& [name, spec] : testing::split_specs(GetParam().inner, GetParam().dtype)) {
    SCOPED_TRACE(name);
    expect_whole(GetParam(), spec);
  }
}

INSTANTIATE_TEST_SUITE_P(Splits, TensorParallel, ::testing::ValuesIn(all_cases()), name_of);

TEST(TensorParallelCalls, NoTokensAndSharedOutput_WorkOnEveryRank) {
  MoeSpec spec = make_spec(5, 3, 40, 7, DType::kF32);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 9};
  const auto source = make_synthetic_source(spec, 3);
  const Context plain({.num_threads = 1});
  const MoeLayer whole = MoeLayer::create(plain, spec, *source, {.max_tokens = 4});
  const Tensor hidden = random_tensor(DType::kF32, 6, 40, 1);
  Tensor expected_shared(DType::kF32, {6, 40});
  const auto expected =
      run_layer(whole, hidden.view(), DType::kF32, {.shared_out = expected_shared.view()});
  on_grid(1, 3, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    const MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.max_tokens = 4}, rank.in({.tp_size = 3}));
    const Tensor none(DType::kF32, {0, 40});
    EXPECT_EQ(run_layer(layer, none.view(), DType::kF32).out.shape()[0], 0);
    Tensor shared(DType::kF32, {6, 40});
    const auto output = run_layer(layer, hidden.view(), DType::kF32, {.shared_out = shared.view()});
    for (const auto& [a, b] :
         {std::pair{&output.out, &expected.out}, {&shared, &expected_shared}}) {
      for (int64_t i = 0; i < 6 * 40; ++i) {
        EXPECT_NEAR(a->as<float>()[i], b->as<float>()[i], 1e-5);
      }
    }
  });
}

ErrorCode code_of(const std::exception_ptr& error) {
  if (!error) return ErrorCode{0};
  return testing::code_of([&] { std::rethrow_exception(error); });
}

// Covers the other exchanges of expert parallelism, with slices.
TEST(TensorParallelCalls, EveryExchangeOfExperts_AddsUpToTheWhole) {
  const MoeSpec spec = make_spec(5, 3, 40, 9, DType::kF32);
  const auto source = make_synthetic_source(spec, 3);
  const Tensor hidden = random_tensor(DType::kF32, 11, 40, 1);
  const Context plain({.num_threads = 1});
  const ReferenceResult reference =
      reference_forward(plain, spec, *source, {.hidden = hidden.view()});
  for (const EpTransport transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    for (const EpCombine combine : {EpCombine::kUnreduced, EpCombine::kReducedPerRank}) {
      on_grid(2, 2, [&](const GridRank& rank) {
        const Context context(rank.context_options());
        const MoeLayer layer =
            MoeLayer::create(context, spec, *source,
                             {.max_tokens = 4, .transport = transport, .ep_combine = combine},
                             rank.in({.ep_size = 2, .num_redundant_experts = 2, .tp_size = 2}));
        const auto output = run_layer(layer, hidden.view(), DType::kF32);
        EXPECT_LE(worst(token_errors(output.out.view(), reference.output)),
                  accuracy_bar(DType::kF32, DType::kF32));
      });
    }
  }
}

TEST(TensorParallelPlan, Explain_NamesThePartAndTheReduction) {
  const MoeSpec spec = make_spec(5, 2, 16, 45, DType::kF32);
  const auto group = make_local_group({.num_ranks = 2});
  const Context context({.num_threads = 1, .tensor_communicator = group[0].get()});
  const ParallelSpec slices{.num_redundant_experts = 3, .tp_size = 2};
  const std::string text = explain(make_plan(context, spec, {}, slices));
  EXPECT_NE(text.find("8 of 8 experts (5 and 3 replicas); columns 0 to 22 of 45 on rank 0 of 2"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("tensor.all_reduce"), std::string::npos) << text;
  const Context alone({.num_threads = 1});
  const Plan missing = make_plan(alone, spec, {}, slices);
  EXPECT_EQ(missing.rows.back().name, "tensor.all_reduce");
  EXPECT_FALSE(missing.rows.back().chosen);
  const ParallelSpec part{.ep_size = 4, .ep_rank = 3, .reduce = Reduce::kPartial};
  EXPECT_EQ(make_plan(alone, spec, {}, part).part,
            "1 of 5 experts on rank 3 of 4; the caller adds up");
}

// Such ranks would exchange data without a complaint and add up parts of different layers.
TEST(TensorParallelErrors, RanksWithAnotherRuleOrFormula_AllGetAMismatchNamingIt) {
  const struct {
    const char* name;
    void (*change)(MoeSpec& spec);
  } cases[] = {
      {"router.scale", [](MoeSpec& s) { s.router.scale = 2; }},
      {"router.renormalize", [](MoeSpec& s) { s.router.renormalize = Renormalize::kNone; }},
      {"activation.name", [](MoeSpec& s) { s.activation.name = "gelu"; }},
      {"output_scale", [](MoeSpec& s) { s.output_scale = 2; }},
      {"has_output_bias", [](MoeSpec& s) { s.has_output_bias = true; }},
      {"weight_on", [](MoeSpec& s) { s.weight_on = WeightOn::kInput; }}};
  for (const auto& c : cases) {
    MoeSpec spec = make_spec(4, 1, 16, 9, DType::kF32);
    MoeSpec other = spec;
    c.change(other);
    const auto errors = run_grid(1, 2, [&](const GridRank& rank) {
      const MoeSpec& mine = rank.tp_rank == 1 ? other : spec;
      const auto source = make_synthetic_source(mine, 1);
      const Context context(rank.context_options());
      MoeLayer::create(context, mine, *source, {}, rank.in({.tp_size = 2}));
    });
    for (const auto& error : errors) {
      ASSERT_EQ(code_of(error), ErrorCode::kCommMismatch) << c.name;
      try {
        std::rethrow_exception(error);
      } catch (const Error& mismatch) {
        EXPECT_NE(std::string(mismatch.what()).find(c.name), std::string::npos) << mismatch.what();
      }
    }
  }
}

// Every rank sees the mismatch, unless another one saw it first and closed the communicator.
void expect_mismatch(const std::vector<std::exception_ptr>& errors) {
  int mismatches = 0;
  for (const auto& error : errors) {
    const ErrorCode code = code_of(error);
    mismatches += code == ErrorCode::kCommMismatch ? 1 : 0;
    EXPECT_TRUE(code == ErrorCode::kCommMismatch || code == ErrorCode::kCommAborted)
        << static_cast<int>(code);
  }
  EXPECT_GE(mismatches, 1);
}

TEST(TensorParallelErrors, RanksWithOtherTokens_AllGetAMismatch) {
  const MoeSpec spec = make_spec(4, 2, 16, 9, DType::kF32);
  const auto source = make_synthetic_source(spec, 1);
  for (const auto& [ep, tp] : {std::pair{1, 3}, {2, 2}}) {
    const auto errors = run_grid(ep, tp, [&](const GridRank& rank) {
      const Context context(rank.context_options());
      const MoeLayer layer =
          MoeLayer::create(context, spec, *source, {}, rank.in({.ep_size = ep, .tp_size = tp}));
      const Tensor hidden = random_tensor(DType::kF32, rank.tp_rank == 1 ? 5 : 4, 16, 1);
      run_layer(layer, hidden.view(), DType::kF32);
    });
    expect_mismatch(errors);
  }
}

// Slices of one rank's tokens are given one list.
TEST(TensorParallelErrors, RanksWithOtherTokensOfRanks_AllGetAMismatch) {
  const MoeSpec spec = make_spec(4, 2, 16, 9, DType::kF32);
  const auto source = make_synthetic_source(spec, 1);
  for (const auto& [ep, tp] : {std::pair{1, 3}, {2, 2}}) {
    for (const bool differ : {false, true}) {
      const auto errors = run_grid(ep, tp, [&](const GridRank& rank) {
        const Context context(rank.context_options());
        const MoeLayer layer =
            MoeLayer::create(context, spec, *source, {}, rank.in({.ep_size = ep, .tp_size = tp}));
        std::vector<int64_t> tokens(static_cast<size_t>(ep), 4);
        if (differ && rank.tp_rank == 1) tokens.clear();
        const Tensor hidden = random_tensor(DType::kF32, 4, 16, 1);
        run_layer(layer, hidden.view(), DType::kF32, {.rank_tokens = tokens});
      });
      if (differ) {
        expect_mismatch(errors);
      } else {
        for (const std::exception_ptr& error : errors) {
          try {
            if (error) std::rethrow_exception(error);
          } catch (const std::exception& unexpected) {
            ADD_FAILURE() << unexpected.what();
          }
        }
      }
    }
  }
}

class ThrowingRouter final : public Router {
 public:
  explicit ThrowingRouter(bool throws) : throws_(throws) {}
  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor&) const override {
    if (throws_) throw Error(ErrorCode::kInvalidArgument, "the router has had enough");
    std::fill_n(output.topk_ids, input.num_tokens * 2, 0);
    std::fill_n(output.topk_weights, input.num_tokens * 2, 0.5F);
    return {};
  }

 private:
  bool throws_;
};

// Ranks of both groups learn of it at once, not when their deadline is over.
TEST(TensorParallelErrors, ErrorOnOneRank_EndsTheCallsOfAllOthers) {
  MoeSpec spec = make_spec(4, 2, 16, 9, DType::kF32);
  spec.router.name = "throwing";
  const auto source = make_synthetic_source(spec, 1);
  for (const auto& [ep, tp] : {std::pair{1, 3}, {2, 2}}) {
    const auto begun = std::chrono::steady_clock::now();
    const auto errors = run_grid(ep, tp, [&, ep = ep, tp = tp](const GridRank& rank) {
      Context context(rank.context_options());
      const bool throws = rank.ep_rank == 0 && rank.tp_rank == 0;
      context.add_router("throwing", [throws](const MoeSpec&) {
        return std::make_unique<ThrowingRouter>(throws);
      });
      const MoeLayer layer =
          MoeLayer::create(context, spec, *source, {}, rank.in({.ep_size = ep, .tp_size = tp}));
      const Tensor hidden = random_tensor(DType::kF32, 4, 16, 1);
      run_layer(layer, hidden.view(), DType::kF32);
    });
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(30));
    for (size_t i = 0; i < errors.size(); ++i) {
      ASSERT_TRUE(errors[i]) << i;
      try {
        std::rethrow_exception(errors[i]);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), i == 0 ? ErrorCode::kInvalidArgument : ErrorCode::kCommAborted)
            << i << ": " << error.what();
      }
    }
  }
}

// Each of these would later send rows astray, or hang.
TEST(ExpertParallelErrors, RanksWithOtherSplits_AllGetAMismatch) {
  const MoeSpec spec = make_spec(4, 2, 16, 9, DType::kF32);
  const auto source = make_synthetic_source(spec, 1);
  constexpr auto kCustom = PlacementStrategy::kCustom;
  const std::vector<std::pair<ParallelSpec, ParallelSpec>> pairs = {
      {{.num_redundant_experts = 2}, {.num_redundant_experts = 3}},
      {{.num_redundant_experts = 1, .replica_of = {2}},
       {.num_redundant_experts = 1, .replica_of = {3}}},
      {{.placement = kCustom, .rank_of = {0, 1, 0, 1}},
       {.placement = kCustom, .rank_of = {1, 0, 0, 1}}},
      {{.placement = PlacementStrategy::kLinear}, {.placement = PlacementStrategy::kRoundRobin}}};
  for (const auto& [usual, other] : pairs) {
    const auto errors = run_grid(2, 1, [&, usual = usual, other = other](const GridRank& rank) {
      ParallelSpec parallel = rank.ep_rank == 1 ? other : usual;
      parallel.ep_size = 2;
      const Context context(rank.context_options());
      MoeLayer::create(context, spec, *source, {.max_tokens = 4}, rank.in(parallel));
    });
    expect_mismatch(errors);
  }
}

TEST(TensorParallelErrors, RanksWithOtherPlans_AllGetAMismatch) {
  const auto errors = run_grid(1, 3, [&](const GridRank& rank) {
    const MoeSpec spec = make_spec(4, 2, 16, 9, DType::kF32);
    const auto source = make_synthetic_source(spec, 1);
    const Context context(rank.context_options());
    MoeLayer::create(context, spec, *source, {.max_tokens = rank.tp_rank == 2 ? 8 : 4},
                     rank.in({.tp_size = 3}));
  });
  expect_mismatch(errors);
}

TEST(TensorParallelErrors, MissingOrOtherCommunicator_IsUnsupportedByName) {
  const MoeSpec spec = make_spec(4, 2, 16, 9, DType::kF32);
  const auto source = make_synthetic_source(spec, 1);
  const auto message = [&](Communicator* communicator) {
    const Context context({.num_threads = 1, .tensor_communicator = communicator});
    try {
      MoeLayer::create(context, spec, *source, {}, {.tp_size = 2, .tp_rank = 1});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(message(nullptr).find("tensor_communicator"), std::string::npos);
  const auto group = make_local_group({.num_ranks = 3});
  EXPECT_NE(message(group[1].get()).find("rank 1 of 3"), std::string::npos);
}

TEST(TensorParallelErrors, RankOutsideItsGroup_IsAnInvalidArgument) {
  const MoeSpec spec = make_spec(4, 2, 16, 9, DType::kF32);
  const auto source = make_synthetic_source(spec, 1);
  const Context context({.num_threads = 1});
  for (const auto& [size, rank] : {std::pair{0, 0}, {2, 2}, {2, -1}, {-3, 0}}) {
    EXPECT_EQ(testing::code_of([&] {
                MoeLayer::create(context, spec, *source, {}, {.tp_size = size, .tp_rank = rank});
              }),
              ErrorCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace conclave
