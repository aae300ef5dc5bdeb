// Plans of expert-parallel layers whose rows gather on devices: stages, ladders, buffers, and the
// reasons where they cannot. Needs no GPU.
#include "dispatch/cuda/group.h"
#include "layer/cuda/book_workspace.h"
#include "layer/cuda/gathered_row.h"
#include "layer/cuda/h200_plan.h"
#include "layer/cuda/on_devices.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace conclave {
namespace {

using testing::h200;
using testing::make_spec;
using testing::OnDevices;
using testing::OneLaunchOnDevices;

MoeSpec spec_of() { return make_spec(8, 2, 258, 256, DType::kBF16); }

struct Ranks {
  Communicator* experts = nullptr;
  Communicator* slices = nullptr;
};

CudaPlan plan_with(const MoeSpec& spec, const ParallelSpec& parallel, const Ranks& ranks,
                   int64_t max_tokens = 64) {
  const cuda::DeviceInfo device = h200();
  const LayerOptions options{.max_tokens = max_tokens};
  return plan_cuda_layer({.spec = spec,
                          .options = options,
                          .parallel = parallel,
                          .device = device,
                          .tensor_communicator = ranks.slices,
                          .communicator = ranks.experts});
}

std::string refusal(const ParallelSpec& parallel, const Ranks& ranks) {
  try {
    static_cast<void>(plan_with(spec_of(), parallel, ranks));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    return error.what();
  }
  return "planned";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

bool has_stage(const CudaPlan& plan, const char* name) {
  const std::vector<std::string>& stages = plan.summary.stages;
  return std::find(stages.begin(), stages.end(), name) != stages.end();
}

TEST(CudaGatherPlan, RowsGoOut_AndSumsComeHome) {
  OnDevices experts(1, 4);
  MoeSpec spec = spec_of();
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 256};
  const CudaPlan made = plan_with(spec, {.ep_size = 4, .ep_rank = 1}, {.experts = &experts});
  EXPECT_EQ(made.summary.dispatcher, "cuda.gather");
  EXPECT_TRUE(has_stage(made, "gather rows of 4 ranks"));
  EXPECT_TRUE(has_stage(made, "bring home sums of 4 ranks"));
  EXPECT_FALSE(has_stage(made, "sum over 4 ranks"));
  EXPECT_TRUE(made.part.adds_rest) << "each rank finishes its own tokens";
  EXPECT_EQ(made.fused.slots(), 0) << "shared experts have this rank's tokens only";
  EXPECT_TRUE(made.shared.has_value());
  EXPECT_EQ(made.decode_tokens, 0);
}

TEST(CudaGatherPlan, ExchangesOfOneLaunch_SaySo) {
  OneLaunchOnDevices experts;
  OneLaunchOnDevices slices;
  const CudaPlan made =
      plan_with(spec_of(), {.ep_size = 2, .tp_size = 2}, {.experts = &experts, .slices = &slices});
  EXPECT_TRUE(has_stage(made, "gather rows of 2 ranks, in one launch"));
  EXPECT_TRUE(has_stage(made, "bring home sums of 2 ranks, in one launch"));
  EXPECT_TRUE(has_stage(made, "sum over 2 ranks, in one launch"));
  slices.one_launch = Support::no("no windows");
  experts.one_launch = Support::no("no windows");
  const CudaPlan without =
      plan_with(spec_of(), {.ep_size = 2, .tp_size = 2}, {.experts = &experts, .slices = &slices});
  EXPECT_TRUE(has_stage(without, "gather rows of 2 ranks"));
  EXPECT_TRUE(has_stage(without, "sum over 2 ranks"));
}

TEST(CudaGatherPlan, TensorParallelRanks_AddUpWhatHasComeHome) {
  OnDevices experts(0, 2);
  OnDevices slices(1, 3);
  const CudaPlan made = plan_with(spec_of(), {.ep_size = 2, .tp_size = 3, .tp_rank = 1},
                                  {.experts = &experts, .slices = &slices});
  EXPECT_TRUE(has_stage(made, "bring home sums of 2 ranks"));
  EXPECT_TRUE(has_stage(made, "sum over 3 ranks"));
  EXPECT_FALSE(made.part.adds_rest) << "what is not split is the first slice's";
}

TEST(CudaGatherPlan, Ladders_ReachTheTokensOfAllRanks) {
  OnDevices experts(0, 4);
  const CudaPlan made = plan_with(spec_of(), {.ep_size = 4}, {.experts = &experts}, 1000);
  EXPECT_EQ(made.routed.ladder.back().last_tokens, 4000);
  // Even choices bring a rank's experts as many rows as its own tokens have choices.
  const CudaPlan shard = plan_with(make_spec(2, 2, 258, 256, DType::kBF16), {}, {}, 1000);
  ASSERT_EQ(made.routed.ladder.size(), shard.routed.ladder.size());
  for (size_t rung = 0; rung < shard.routed.ladder.size(); ++rung) {
    EXPECT_EQ(made.routed.ladder[rung].last_tokens, 4 * shard.routed.ladder[rung].last_tokens);
  }
  EXPECT_EQ(made.routed.grouping.back().last_tokens, 4000);
  EXPECT_EQ(made.summary.ladder.back().last_tokens, 1000) << "calls are counted in own tokens";
  EXPECT_EQ(made.summary.max_tokens, 1000);
  const CudaPlan partial = plan_with(spec_of(), {.ep_size = 4, .reduce = Reduce::kPartial}, {});
  EXPECT_EQ(partial.summary.dispatcher, "cuda.local");
  EXPECT_EQ(partial.routed.ladder.back().last_tokens, 64);
}

TEST(CudaGatherPlan, Buffers_HoldTheRowsOfAllRanks) {
  OnDevices experts(0, 4);
  const CudaPlan made = plan_with(spec_of(), {.ep_size = 4}, {.experts = &experts});
  const auto bytes = [](const WorkspaceBooking& booking, CudaBuffer buffer) {
    return static_cast<int64_t>(booking.slices[static_cast<size_t>(buffer)].bytes);
  };
  const WorkspaceBooking all = book_workspace(made, {.first = 1, .last = 64});
  constexpr int64_t kSumBytes = 260 * 4;
  EXPECT_GE(bytes(all, CudaBuffer::kGatheredRows), 256 * (258 * 2 + 2 * 8));
  EXPECT_GE(bytes(all, CudaBuffer::kExpertPart), 256 * kSumBytes);
  EXPECT_GE(bytes(all, CudaBuffer::kOtherParts), 3 * 64 * kSumBytes);
  EXPECT_GE(bytes(all, CudaBuffer::kExpertSums), 64 * kSumBytes);
  const WorkspaceBooking few = book_gathered(made, 0, 9);
  EXPECT_GE(bytes(few, CudaBuffer::kGatheredRows), 9 * (258 * 2 + 2 * 8));
  EXPECT_LT(few.total_bytes, all.total_bytes);
}

// A rank that counts its own tokens groups these by the tile of their number, which may be narrower
// than that of all; and chunks that follow have fewer tokens, perhaps of another kernel.
TEST(CudaGatherPlan, ABookingForManyTokens_ServesFewer) {
  OnDevices experts(0, 4);
  MoeSpec codes = make_spec(64, 4, 256, 256, DType::kF8E4M3);
  codes.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  for (const MoeSpec& spec : {make_spec(64, 4, 258, 256, DType::kBF16), codes}) {
    const CudaPlan made = plan_with(spec, {.ep_size = 4}, {.experts = &experts}, 2048);
    const experts::ExpertsProblem& problem = made.routed.problem;
    ASSERT_GT(made.routed.ladder.size(), 1U);
    for (const experts::LadderRung& rung : made.routed.ladder) {
      const int64_t own = std::min<int64_t>(rung.last_tokens, 2048);
      const WorkspaceBooking booking = book_gathered(made, own, own + 1);
      EXPECT_LE(booking.total_bytes, workspace_bytes(made, own));
      const WorkspaceSlice& group = booking.slices[static_cast<size_t>(CudaBuffer::kGroup)];
      const int32_t tile = rung_for(made.routed.ladder, own).tile.tokens;
      EXPECT_GE(group.bytes, dispatch::device_group_workspace_bytes(
                                 own, problem.top_k, problem.num_local_experts, tile))
          << own;
      const WorkspaceBooking fewer = book_gathered(made, own, own);
      for (size_t buffer = 0; buffer < kCudaBuffers; ++buffer) {
        EXPECT_LE(fewer.slices[buffer].bytes, booking.slices[buffer].bytes) << buffer;
      }
    }
  }
}

MoeSpec coded_spec(DType weights, ActivationScale activations) {
  MoeSpec spec = make_spec(8, 2, 264, 128, weights);
  spec.quant = {.weights = weights == DType::kF8E4M3 ? WeightScale::kBlock : WeightScale::kChannel,
                .activations = activations};
  return spec;
}

// Half of the bytes of bf16, and the same whatever the caller has.
TEST(CudaGatherPlan, RowsTravelAsCodes_WhereTheyAreMadeOfTheRowAlone) {
  OnDevices experts(0, 2);
  for (const auto& [weights, activations, scales] :
       {std::tuple{DType::kF8E4M3, ActivationScale::kGroup, 3},
        std::tuple{DType::kI8, ActivationScale::kToken, 1}}) {
    const CudaPlan made =
        plan_with(coded_spec(weights, activations), {.ep_size = 2}, {.experts = &experts});
    EXPECT_TRUE(travels_as_codes(made));
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      const GatheredRow row = gathered_row(made, dtype);
      EXPECT_EQ(row.dtype, weights);
      EXPECT_EQ(row.scales, 272);
      EXPECT_EQ(row.ids, 272 + 4 * scales);
      EXPECT_EQ(row.bytes, (272 + 4 * scales + 2 * 8 + 15) / 16 * 16);
    }
  }
}

TEST(CudaGatherPlan, RowsWhoseCodesDependOnMore_TravelAsTheyAre) {
  OnDevices experts(0, 2);
  const auto travels = [&](const MoeSpec& spec) {
    return travels_as_codes(plan_with(spec, {.ep_size = 2}, {.experts = &experts}));
  };
  MoeSpec weighed = coded_spec(DType::kF8E4M3, ActivationScale::kGroup);
  weighed.weight_on = WeightOn::kInput;
  EXPECT_FALSE(travels(weighed)) << "each slot has a row of its own";
  EXPECT_FALSE(travels(coded_spec(DType::kF8E4M3, ActivationScale::kTensorStatic)))
      << "the step is the experts'";
  EXPECT_FALSE(travels(coded_spec(DType::kF8E4M3, ActivationScale::kNone)));
  EXPECT_FALSE(travels(spec_of()));
}

// Adapters multiply a row as its rank brought it, so that it travels as such, with its mark behind
// it; and what rows with adapters need, the tokens of all ranks need.
TEST(CudaGatherPlan, RowsThatMayHaveAdapters_TravelAsTheyAreWithTheirMark) {
  OnDevices experts(0, 4);
  const cuda::DeviceInfo device = h200();
  const auto with_rank = [&](const MoeSpec& spec, int32_t most_rank) {
    const LayerOptions options{.max_tokens = 64, .max_adapter_rank = most_rank};
    return plan_cuda_layer({.spec = spec,
                            .options = options,
                            .parallel = {.ep_size = 4},
                            .device = device,
                            .communicator = &experts});
  };
  const MoeSpec codes = coded_spec(DType::kF8E4M3, ActivationScale::kGroup);
  EXPECT_TRUE(travels_as_codes(with_rank(codes, 0)));
  EXPECT_FALSE(travels_as_codes(with_rank(codes, 16)));
  const CudaPlan bare = with_rank(spec_of(), 0);
  const CudaPlan made = with_rank(spec_of(), 16);
  EXPECT_EQ(gathered_row(bare, DType::kF32).dtype, DType::kBF16);
  EXPECT_EQ(gathered_row(bare, DType::kF32).mark, 0);
  const GatheredRow row = gathered_row(made, DType::kF32);
  EXPECT_EQ(row.dtype, DType::kF32);
  EXPECT_EQ(row.mark, row.ids + 2 * 8);
  EXPECT_GE(row.bytes, row.mark + 4);
  const auto bytes = [](const WorkspaceBooking& booking, CudaBuffer buffer) {
    return static_cast<int64_t>(booking.slices[static_cast<size_t>(buffer)].bytes);
  };
  const WorkspaceBooking all = book_workspace(made, {.first = 1, .last = 64});
  EXPECT_GE(bytes(all, CudaBuffer::kAdapterMarks), 64 * 4);
  EXPECT_GE(bytes(all, CudaBuffer::kGatheredMarks), 256 * 4);
  EXPECT_GE(bytes(all, CudaBuffer::kAdapterIds), 256 * 2 * 4);
  EXPECT_EQ(bytes(book_workspace(bare, {.first = 1, .last = 64}), CudaBuffer::kGatheredMarks), 0);
}

// A rank must not take rows of one type for those of another.
TEST(CudaGatherPlan, RowsOfOtherTypes_HaveOtherSizes) {
  OnDevices experts(0, 2);
  MoeSpec weighed = coded_spec(DType::kF8E4M3, ActivationScale::kGroup);
  weighed.weight_on = WeightOn::kInput;
  const CudaPlan made = plan_with(weighed, {.ep_size = 2}, {.experts = &experts});
  const CudaPlan plain = plan_with(spec_of(), {.ep_size = 2}, {.experts = &experts});
  std::vector<int64_t> sizes;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    sizes.push_back(gathered_row(made, dtype).bytes);
    EXPECT_EQ(sizes.back() % 16, 0);
    EXPECT_LE(sizes.back(), most_gathered_row_bytes(made));
    EXPECT_EQ(gathered_row(made, dtype).dtype, dtype) << "codes are made where they arrive";
    EXPECT_EQ(gathered_row(plain, dtype).dtype, DType::kBF16) << "as the kernels read them";
  }
  std::sort(sizes.begin(), sizes.end());
  EXPECT_EQ(std::unique(sizes.begin(), sizes.end()), sizes.end());
}

TEST(CudaGatherPlan, ThePlan_ReportsTheBytesOfTheExchange) {
  OnDevices experts(0, 2);
  const CudaPlan made = plan_with(spec_of(), {.ep_size = 2}, {.experts = &experts});
  std::string reasons;
  for (const PlanRow& row : made.summary.rows) {
    if (row.table == "exchange") reasons += row.reason + "\n";
  }
  EXPECT_TRUE(has(reasons, "544 bytes of a token to each other rank: BF16, ids and weights"))
      << reasons;
  EXPECT_TRUE(has(reasons, "1040 bytes of a token from each other rank: F32")) << reasons;
}

TEST(CudaGatherPlan, ThePlan_SaysWhetherRanksExchangeInOneLaunch) {
  const auto row_of = [](Communicator& experts) {
    const CudaPlan made = plan_with(spec_of(), {.ep_size = 2}, {.experts = &experts});
    const auto row = std::ranges::find_if(made.summary.rows, [](const PlanRow& it) {
      return it.table == "exchange" && it.name == "one launch";
    });
    return row == made.summary.rows.end() ? PlanRow() : *row;
  };
  OnDevices other(0, 2);
  EXPECT_FALSE(row_of(other).chosen);
  EXPECT_TRUE(has(row_of(other).reason, "begins each operation on its own"));
  OneLaunchOnDevices able;
  EXPECT_TRUE(row_of(able).chosen);
  EXPECT_FALSE(row_of(able).reason.empty());
  able.one_launch = Support::no("rank 1: NCCL 2.18.5 has no windows");
  EXPECT_FALSE(row_of(able).chosen);
  EXPECT_EQ(row_of(able).reason, "rank 1: NCCL 2.18.5 has no windows");
}

TEST(CudaGatherPlan, ThePlan_SaysSoOfSumsOverSlices) {
  OneLaunchOnDevices slices;
  slices.one_launch = Support::no("2 of 4 ranks reach each other's memory");
  const CudaPlan made = plan_with(spec_of(), {.tp_size = 2}, {.slices = &slices});
  std::string reasons;
  for (const PlanRow& row : made.summary.rows) {
    if (row.table == "reduction" && row.name == "one launch") reasons += row.reason;
  }
  EXPECT_EQ(reasons, "2 of 4 ranks reach each other's memory");
}

TEST(CudaGatherPlan, Sums_TravelInSixteenBitsWhereAskedFor) {
  OnDevices experts(0, 2);
  const auto type_of = [&](DType weights, EpCombine combine) {
    const cuda::DeviceInfo device = h200();
    const LayerOptions options{.max_tokens = 64, .ep_combine = combine};
    const ParallelSpec two{.ep_size = 2};
    const MoeSpec spec = make_spec(8, 2, 256, 256, weights);
    return plan_cuda_layer({.spec = spec,
                            .options = options,
                            .parallel = two,
                            .device = device,
                            .communicator = &experts})
        .part_dtype();
  };
  EXPECT_EQ(type_of(DType::kBF16, EpCombine::kUnreduced), DType::kF32);
  EXPECT_EQ(type_of(DType::kBF16, EpCombine::kReducedPerRank), DType::kF32);
  EXPECT_EQ(type_of(DType::kBF16, EpCombine::kRoundedPerRank), DType::kBF16);
  EXPECT_EQ(type_of(DType::kF16, EpCombine::kRoundedPerRank), DType::kF16);
  EXPECT_EQ(type_of(DType::kF32, EpCombine::kRoundedPerRank), DType::kF32);
}

TEST(CudaGatherPlan, WhatCannotGather_IsRefusedWithTheReason) {
  const ParallelSpec two{.ep_size = 2};
  OnDevices ranks;
  EXPECT_EQ(refusal(two, {.experts = &ranks}), "planned");
  EXPECT_TRUE(has(refusal(two, {}), "the context has no communicator"));
  OnDevices other(1);
  EXPECT_TRUE(has(refusal(two, {.experts = &other}), "rank 1 of 2"));
  OnDevices on_host(0, 2, CommFeature::kDeviceMemory);
  EXPECT_TRUE(has(refusal(two, {.experts = &on_host}), "devices cannot carry memory of a device"));
  OnDevices waits(0, 2, CommFeature::kStreamOrder);
  EXPECT_TRUE(has(refusal(two, {.experts = &waits}), "order its operations by a stream"));
  OnDevices many(0, 130);
  EXPECT_TRUE(has(refusal({.ep_size = 130}, {.experts = &many}), "129 at most"));
}

TEST(CudaGatherPlan, MoreTokensThanKernelsTake_AreRefused) {
  OnDevices experts(0, 2);
  const int64_t most = h200().most_tokens;
  EXPECT_EQ(testing::code_of([&] {
              static_cast<void>(
                  plan_with(spec_of(), {.ep_size = 2}, {.experts = &experts}, most / 2 + 1));
            }),
            ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace conclave
