// The list of stages on CUDA: every buffer that is booked belongs to a stage, none shares memory
// with another, and the plan says what joins a token's sum.

#include "layer/cuda/book_workspace.h"
#include "layer/cuda/h200_plan.h"
#include "layer/stages/cuda/cuda_stages.h"
#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::make_spec;
using testing::plan;
using testing::SpecDraw;

MoeSpec bf16_spec(int64_t top_k = 2) { return make_spec(8, top_k, 256, 256, DType::kBF16); }

TEST(CudaStages, EveryBufferWithMemory_IsTouchedByAStage) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    const MoeSpec spec = SpecDraw(seed).draw();
    SCOPED_TRACE(testing::parts_text(spec));
    const CudaPlan made = plan(spec, {.max_tokens = 40});
    for (const WorkspaceBooking& booking : book_every_rung(made, 40)) {
      // The counters at the front are there for other layers too.
      const int64_t others = made.stages.has(CudaStage::kOneLaunch) ? 0 : 1;
      const auto booked = std::count_if(booking.slices.begin(), booking.slices.end(),
                                        [](const WorkspaceSlice& it) { return it.bytes > 0; }) -
                          others;
      EXPECT_EQ(static_cast<int64_t>(describe_buffers(made.stages, booking.slices).size()), booked);
    }
  }
}

void expect_apart(const CudaPlan& made) {
  for (const WorkspaceBooking& booking : book_every_rung(made, 64)) {
    for (const WorkspaceSlice& a : booking.slices) {
      EXPECT_LE(a.offset + a.bytes, booking.total_bytes);
      for (const WorkspaceSlice& b : booking.slices) {
        if (&a == &b || a.bytes == 0 || b.bytes == 0) continue;
        EXPECT_TRUE(a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset);
      }
    }
  }
}

TEST(CudaStages, Buffers_NeverShareMemory) {
  MoeSpec spec = bf16_spec();
  expect_apart(plan(spec, {.max_tokens = 64}));
  spec.latent = {.size = 128, .has_norm = true};
  spec.shared = {.mode = SharedMode::kSoftmaxMix, .intermediate_size = 96};
  spec.residual = {.intermediate_size = 64};
  expect_apart(plan(spec, {.max_tokens = 64}));
}

// Blocks of the single launch read the routing when they begin, and others may be writing by then.
TEST(CudaStages, SingleLaunch_HasMemoryOfItsOwnForCallsThatItTakes) {
  const CudaPlan made = plan(bf16_spec(), {.max_tokens = 64});
  const size_t needed = made.decode_row->workspace_bytes(made.routed.problem, made.decode_tokens);
  ASSERT_GT(needed, 0U);
  for (const WorkspaceBooking& booking : book_every_rung(made, 64)) {
    const WorkspaceSlice& own = booking.slices[static_cast<size_t>(CudaBuffer::kOneLaunch)];
    if (booking.calls.first > made.decode_tokens) {
      EXPECT_EQ(own.bytes, 0U) << booking.calls.first;
    } else {
      EXPECT_GE(own.bytes, needed) << booking.calls.first;
    }
  }
}

// A call walks the list, so that a stage without its buffers, or one that is not declared, is seen
// where it runs: in debug builds both end in Error(kInternal).
TEST(CudaStages, AStage_IsGivenItsOwnBuffersOnly) {
  const CudaPlan made = plan(bf16_spec());
  const CudaStages& stages = made.stages;
  const CudaSlices slices{};
  const CudaScratch call(nullptr, slices, {});
  EXPECT_FALSE(call.gives(CudaBuffer::kTopkIds)) << "outside of the stages nothing is given";
  const CudaScratch route = call.only(stages.buffers_of(CudaStage::kRoute));
  EXPECT_TRUE(route.gives(CudaBuffer::kTopkIds));
  EXPECT_FALSE(route.gives(CudaBuffer::kRoutedRows));
  EXPECT_FALSE(route.gives(CudaBuffer::kIdentity)) << "the layer has no zero experts";
  EXPECT_FALSE(stages.has(CudaStage::kLatentDown));
  EXPECT_FALSE(stages.has(CudaStage::kShared));
#if !defined(NDEBUG)
  EXPECT_EQ(testing::code_of([&] { route.at<void>(CudaBuffer::kRoutedRows); }),
            ErrorCode::kInternal);
  EXPECT_EQ(testing::code_of([&] { stages.buffers_of(CudaStage::kShared); }), ErrorCode::kInternal);
#endif
}

TEST(CudaStages, SingleLaunch_IsOneOfTheStages) {
  const CudaPlan made = plan(bf16_spec());
  ASSERT_TRUE(made.stages.has(CudaStage::kOneLaunch));
  const std::vector<std::string>& names = made.summary.stages;
  const auto at = std::find(names.begin(), names.end(), "up to 8 tokens: cuda.decode_sm90");
  ASSERT_NE(at, names.end());
  EXPECT_EQ(*(at - 1), "route and group");
  EXPECT_EQ(*(at + 1), "experts");
  EXPECT_EQ(made.stages.of(CudaStage::kOneLaunch).most_tokens, made.decode_tokens);

  MoeSpec biased = bf16_spec();
  biased.has_output_bias = true;
  EXPECT_FALSE(plan(biased).stages.has(CudaStage::kOneLaunch));
}

// Otherwise the factors are made before: the router's own are its results.
TEST(CudaStages, FactorsOfTheRouter_AreWrittenWhereItRuns) {
  MoeSpec spec = bf16_spec();
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 96};
  const CudaStages before = plan(spec).stages;
  EXPECT_TRUE(before.has(CudaStage::kFactors));
  const auto factor = static_cast<size_t>(CudaBuffer::kSharedFactor);
  EXPECT_FALSE(before.of(CudaStage::kRoute).writes.has(factor));

  spec.router = RouterSpec();
  spec.router.name = "sink_softmax";
  spec.shared.mode = SharedMode::kRouterWeight;
  const CudaStages own = plan(spec).stages;
  EXPECT_FALSE(own.has(CudaStage::kFactors));
  EXPECT_TRUE(own.of(CudaStage::kRoute).writes.has(factor));
}

// Its rows of slots are still there for the sum, which no slot of this rank joins.
TEST(CudaStages, RankWithoutExperts_PreparesNoRows) {
  MoeSpec spec = bf16_spec(1);
  spec.num_experts = 1;
  spec.latent = {.size = 128};
  const CudaPlan made = plan(spec, {}, {.ep_size = 2, .ep_rank = 1, .reduce = Reduce::kPartial});
  for (const CudaStage stage :
       {CudaStage::kLatentDown, CudaStage::kRowsOfSlots, CudaStage::kInput}) {
    EXPECT_FALSE(made.stages.has(stage));
  }
  EXPECT_TRUE(made.stages.has(CudaStage::kExperts));
  EXPECT_TRUE(made.stages.has(CudaStage::kSum));
}

TEST(CudaStages, Plan_ListsBuffersBetweenItsStages) {
  MoeSpec spec = bf16_spec();
  spec.latent = {.size = 128};
  const Plan summary = plan(spec, {.max_tokens = 64}).summary;
  const auto latent = std::find_if(summary.buffers.begin(), summary.buffers.end(),
                                   [](const PlanBuffer& it) { return it.name == "latent rows"; });
  ASSERT_NE(latent, summary.buffers.end());
  EXPECT_EQ(latent->bytes, 64U * 128 * sizeof(float));
  EXPECT_EQ(latent->first_stage, "latent down 128");
  EXPECT_EQ(latent->last_stage, "latent up 256, finish");
}

TEST(CudaStages, SumEnd_SaysWhatJoinsTheSlots) {
  const SumEnd plain = plan(bf16_spec()).end;
  EXPECT_TRUE(plain.only_slots && plain.rounds_sums);
  EXPECT_FALSE(plain.writes_output) << "two slots are added";
  EXPECT_TRUE(plan(bf16_spec(1)).end.writes_output);

  MoeSpec biased = bf16_spec(1);
  biased.has_output_bias = true;
  const SumEnd with_bias = plan(biased).end;
  EXPECT_FALSE(with_bias.only_slots || with_bias.writes_output || with_bias.rounds_sums);

  MoeSpec latent = bf16_spec(1);
  latent.latent = {.size = 128};
  const SumEnd projected = plan(latent).end;
  EXPECT_FALSE(projected.only_slots || projected.writes_output);
  EXPECT_TRUE(projected.rounds_sums);
  latent.hidden_size = 258;
  EXPECT_FALSE(plan(latent).end.rounds_sums) << "sums are read in groups of four";

  MoeSpec averaged = bf16_spec(1);
  averaged.shared = {.mode = SharedMode::kAverage, .intermediate_size = 256};
  EXPECT_FALSE(plan(averaged).end.rounds_sums);
}

}  // namespace
}  // namespace conclave
