// Reduce::kPartial: each rank computes its part without a communicator; the parts add up to the
// whole.

#include "layer/split_specs.h"
#include "support/guarded_allocator.h"
#include "support/layer_fixture.h"

#include "conclave/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::GuardedAllocator;
using testing::GuardSide;
using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

constexpr int64_t kTokens = 17;
constexpr int64_t kHidden = 40;

// The sum of the outputs of every rank of `parallel`, one after another.
Tensor sum_of_parts(const MoeSpec& spec, const WeightSource& source, ParallelSpec parallel,
                    const ConstTensorView& hidden, Tensor* shared_sum = nullptr) {
  const Context context({.num_threads = 1});
  parallel.reduce = Reduce::kPartial;
  Tensor sum(DType::kF32, {kTokens, kHidden});
  for (parallel.ep_rank = 0; parallel.ep_rank < parallel.ep_size; ++parallel.ep_rank) {
    for (parallel.tp_rank = 0; parallel.tp_rank < parallel.tp_size; ++parallel.tp_rank) {
      const MoeLayer layer = MoeLayer::create(context, spec, source, {.max_tokens = 5}, parallel);
      Tensor shared(DType::kF32, {kTokens, kHidden});
      std::fill_n(shared.as<float>(), kTokens * kHidden, 99.0F);
      ForwardArgs args;
      if (shared_sum != nullptr) args.shared_out = shared.view();
      Tensor part(DType::kF32, {kTokens, kHidden});
      args.hidden = hidden;
      args.out = part.view();
      layer.forward(args);
      for (int64_t i = 0; i < kTokens * kHidden; ++i) {
        sum.as<float>()[i] += part.as<float>()[i];
        if (shared_sum != nullptr) shared_sum->as<float>()[i] += shared.as<float>()[i];
      }
    }
  }
  return sum;
}

struct PartialCase {
  std::string name;
  ParallelSpec parallel;
};

std::vector<PartialCase> all_cases() {
  constexpr auto kCustom = PlacementStrategy::kCustom;
  return {
      {"Ep1", {}},
      {"Ep3", {.ep_size = 3}},
      {"Ep9RoundRobin", {.ep_size = 9, .placement = PlacementStrategy::kRoundRobin}},
      {"Ep2Custom", {.ep_size = 2, .placement = kCustom, .rank_of = {1, 0, 0, 1, 1}}},
      {"Ep3Idle", {.ep_size = 3, .placement = kCustom, .rank_of = {2, 2, 2, 2, 2}}},
      {"Ep3Replicas", {.ep_size = 3, .num_redundant_experts = 4}},
      {"Tp3", {.tp_size = 3}},
      {"Tp8", {.tp_size = 8}},
      {"Ep2Tp3", {.ep_size = 2, .tp_size = 3}},
  };
}

class PartialSums : public ::testing::TestWithParam<PartialCase> {};

TEST_P(PartialSums, EveryRanksPart_AddUpToTheWhole) {
  for (const auto& [name, spec] : testing::split_specs(13, DType::kF32)) {
    SCOPED_TRACE(name);
    if (spec.latent.has_norm) continue;  // refused: see LatentNorm below
    const auto source = make_synthetic_source(spec, 7);
    const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 3);
    const Context context({.num_threads = 1});
    const ReferenceResult reference =
        reference_forward(context, spec, *source, {.hidden = hidden.view()});
    const Tensor sum = sum_of_parts(spec, *source, GetParam().parallel, hidden.view());
    EXPECT_LE(worst(token_errors(sum.view(), reference.output)),
              accuracy_bar(DType::kF32, DType::kF32));
  }
}

TEST_P(PartialSums, SharedOutputsOfAllRanks_AddUpToTheSharedExperts) {
  MoeSpec spec = make_spec(5, 3, kHidden, 13, DType::kF32);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 11};
  const auto source = make_synthetic_source(spec, 7);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 3);
  const Context context({.num_threads = 1});
  const MoeLayer whole = MoeLayer::create(context, spec, *source);
  Tensor expected(DType::kF32, {kTokens, kHidden});
  run_layer(whole, hidden.view(), DType::kF32, {.shared_out = expected.view()});
  Tensor sum(DType::kF32, {kTokens, kHidden});
  sum_of_parts(spec, *source, GetParam().parallel, hidden.view(), &sum);
  for (int64_t i = 0; i < kTokens * kHidden; ++i) {
    EXPECT_NEAR(sum.as<float>()[i], expected.as<float>()[i], 2e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(Splits, PartialSums, ::testing::ValuesIn(all_cases()),
                         [](const auto& row) { return row.param.name; });

// Experts that a map leaves out contribute nothing, as if their slots named no expert.
TEST(PartialExpertMap, ExpertsOnNoRank_ContributeNothing) {
  const MoeSpec spec = make_spec(6, 2, kHidden, 13, DType::kBF16);
  const auto source = make_synthetic_source(spec, 7);
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, kHidden, 3);
  const Context context({.num_threads = 1});
  const std::vector<int32_t> map = {-1, 1, 0, -1, -1, 2};
  const MoeLayer whole = MoeLayer::create(context, spec, *source);
  auto routed = run_layer(whole, hidden.view(), DType::kBF16);
  int32_t* ids = routed.ids.as<int32_t>();
  for (int64_t i = 0; i < kTokens * 2; ++i) {
    if (map[static_cast<size_t>(ids[i])] < 0) ids[i] = -1;
  }
  const auto expected =
      run_layer(whole, hidden.view(), DType::kBF16,
                {.topk_ids = routed.ids.const_view(), .topk_weights = routed.weights.const_view()});
  for (const ParallelSpec& parallel :
       {from_expert_map(map), from_expert_mask(std::vector<int32_t>{0, 1, 1, 0, 0, 1, 0}, 6)}) {
    const MoeLayer part = MoeLayer::create(context, spec, *source, {.max_tokens = 4}, parallel);
    EXPECT_EQ(part.plan().num_local_experts, 3);
    EXPECT_EQ(part.plan().dispatcher, "local");
    EXPECT_TRUE(same_bits(run_layer(part, hidden.view(), DType::kBF16).out, expected.out));
  }
}

TEST(PartialExpertMap, NoExpertHere_GivesTheSharedPartOrZeros) {
  MoeSpec spec = make_spec(3, 2, kHidden, 13, DType::kF32);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 3);
  const Context context({.num_threads = 1});
  const ParallelSpec none = from_expert_map(std::vector<int32_t>{-1, -1, -1});
  const auto source = make_synthetic_source(spec, 7);
  const MoeLayer zeros = MoeLayer::create(context, spec, *source, {}, none);
  const auto output = run_layer(zeros, hidden.view(), DType::kF32);
  for (int64_t i = 0; i < kTokens * kHidden; ++i) EXPECT_EQ(output.out.as<float>()[i], 0.0F);

  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 11};
  const auto with_shared = make_synthetic_source(spec, 7);
  const MoeLayer layer = MoeLayer::create(context, spec, *with_shared, {}, none);
  Tensor shared(DType::kF32, {kTokens, kHidden});
  const auto apart = run_layer(layer, hidden.view(), DType::kF32, {.shared_out = shared.view()});
  EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kF32).out, shared));
  for (int64_t i = 0; i < kTokens * kHidden; ++i) EXPECT_EQ(apart.out.as<float>()[i], 0.0F);
}

// Slices without columns and ranks without experts, with every buffer next to an unmapped page.
TEST(PartialMemory, NarrowAndEmptySlices_StayWithinTheirBuffers) {
  for (const std::string& isa : testing::usable_isas()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const auto& [name, spec] : testing::split_specs(5, dtype)) {
        if (spec.latent.has_norm) continue;
        SCOPED_TRACE(isa + " " + name);
        const auto source = make_synthetic_source(spec, 7);
        const Tensor hidden = random_tensor(dtype, 7, kHidden, 3);
        GuardedAllocator allocator(GuardSide::kEnd);
        for (const ParallelSpec& split :
             {ParallelSpec{.ep_size = 7, .ep_rank = 6, .tp_size = 8, .tp_rank = 0},
              ParallelSpec{.ep_size = 2, .ep_rank = 0, .tp_size = 8, .tp_rank = 1},
              ParallelSpec{.num_redundant_experts = 3, .tp_size = 8, .tp_rank = 0}}) {
          ParallelSpec parallel = split;
          parallel.reduce = Reduce::kPartial;
          const Context context({.num_threads = 2, .isa = isa, .host_allocator = &allocator});
          const MoeLayer layer =
              MoeLayer::create(context, spec, *source, {.max_tokens = 5}, parallel);
          Tensor out(DType::kF32, {7, kHidden});
          layer.forward({.hidden = hidden.view(), .out = out.view()});
        }
        EXPECT_TRUE(allocator.gaps_intact());
        EXPECT_EQ(allocator.live_blocks(), 0U);
      }
    }
  }
}

TEST(PartialErrors, CustomPlacementsThatDoNotFit_AreInvalidArguments) {
  const MoeSpec spec = make_spec(3, 2, kHidden, 13, DType::kF32);
  const auto source = make_synthetic_source(spec, 7);
  const Context context({.num_threads = 1});
  const auto code = [&](const ParallelSpec& parallel) {
    return testing::code_of([&] { MoeLayer::create(context, spec, *source, {}, parallel); });
  };
  constexpr auto kCustom = PlacementStrategy::kCustom;
  constexpr auto kPartial = Reduce::kPartial;
  EXPECT_EQ(code({.placement = kCustom, .rank_of = {0, 0, 0}}), ErrorCode{0});
  EXPECT_EQ(code({.placement = kCustom, .rank_of = {0, 0}, .reduce = kPartial}),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({.placement = kCustom, .rank_of = {0, 0, -1}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({.placement = kCustom, .rank_of = {0, 0, 1}, .reduce = kPartial}),
            ErrorCode::kInvalidArgument);
}

TEST(PartialSum, LatentNorm_IsRefusedWhereSumsAreNotWhole) {
  for (const auto& [name, spec] : testing::split_specs(13, DType::kF32)) {
    if (!spec.latent.has_norm) continue;
    const auto source = make_synthetic_source(spec, 7);
    const Context context({.num_threads = 1});
    const auto create = [&](const ParallelSpec& parallel) {
      return testing::code_of([&] { MoeLayer::create(context, spec, *source, {}, parallel); });
    };
    EXPECT_EQ(create({.tp_size = 2, .reduce = Reduce::kPartial}), ErrorCode::kUnsupported);
    EXPECT_EQ(create({.ep_size = 2, .reduce = Reduce::kPartial}), ErrorCode::kUnsupported);
    EXPECT_EQ(create({.reduce = Reduce::kPartial}), ErrorCode{0});
  }
}

}  // namespace
}  // namespace conclave
