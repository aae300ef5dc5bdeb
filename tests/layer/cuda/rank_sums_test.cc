// Plans of tensor-parallel layers that add up on their devices: the stage, its buffers, and the
// reasons where they cannot. Needs no GPU.
#include "layer/cuda/book_workspace.h"
#include "layer/cuda/h200_plan.h"
#include "layer/cuda/on_devices.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::h200;
using testing::make_spec;
using testing::OnDevices;

MoeSpec spec_of() { return make_spec(8, 2, 258, 256, DType::kBF16); }

CudaPlan plan_with(const MoeSpec& spec, const ParallelSpec& parallel, Communicator* communicator) {
  const cuda::DeviceInfo device = h200();
  const LayerOptions options{.max_tokens = 64};
  return plan_cuda_layer({.spec = spec,
                          .options = options,
                          .parallel = parallel,
                          .device = device,
                          .tensor_communicator = communicator});
}

std::string refusal(const MoeSpec& spec, const ParallelSpec& parallel, Communicator* communicator) {
  try {
    static_cast<void>(plan_with(spec, parallel, communicator));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    return error.what();
  }
  return "planned";
}

TEST(CudaRankSums, TheLastStages_AddUpAndRound) {
  OnDevices ranks;
  MoeSpec spec = spec_of();
  spec.has_output_bias = true;
  const CudaPlan made = plan_with(spec, {.tp_size = 2}, &ranks);
  const std::vector<std::string>& stages = made.summary.stages;
  ASSERT_GE(stages.size(), 2U);
  EXPECT_EQ(stages.back(), "round");
  EXPECT_EQ(*(stages.end() - 2), "sum over 2 ranks");
  EXPECT_EQ(made.part.tensor_communicator, &ranks);
  EXPECT_TRUE(made.part.adds_rest);
  OnDevices second(1);
  EXPECT_FALSE(plan_with(spec, {.tp_size = 2, .tp_rank = 1}, &second).part.adds_rest);
}

TEST(CudaRankSums, Buffers_HoldWholeRowsOfFloats) {
  OnDevices ranks;
  MoeSpec spec = spec_of();
  const auto bytes = [&](const CudaPlan& made, CudaBuffer buffer) {
    return book_workspace(made, {.first = 1, .last = 64}).slices[static_cast<size_t>(buffer)].bytes;
  };
  const CudaPlan plain = plan_with(spec, {.tp_size = 2}, &ranks);
  EXPECT_GE(bytes(plain, CudaBuffer::kRankPart), 64U * 260 * 4);
  EXPECT_GE(bytes(plain, CudaBuffer::kRankSum), 64U * 260 * 4);
  EXPECT_EQ(bytes(plain, CudaBuffer::kRankSharedPart), 0U) << "there are no shared experts";
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 64};
  const CudaPlan shared = plan_with(spec, {.tp_size = 2}, &ranks);
  EXPECT_GE(bytes(shared, CudaBuffer::kRankSharedPart), 64U * 260 * 4);
  EXPECT_GE(bytes(shared, CudaBuffer::kRankSharedSum), 64U * 260 * 4);
  const CudaPlan alone = plan_with(spec, {}, nullptr);
  EXPECT_EQ(bytes(alone, CudaBuffer::kRankPart), 0U);
  EXPECT_FALSE(alone.stages.has(CudaStage::kSumRanks));
}

TEST(CudaRankSums, PartialSums_NeedNoCommunicator) {
  const CudaPlan made = plan_with(spec_of(), {.tp_size = 2, .reduce = Reduce::kPartial}, nullptr);
  EXPECT_FALSE(made.stages.has(CudaStage::kSumRanks));
}

TEST(CudaRankSums, WhatCannotAddUp_IsRefusedWithTheReason) {
  const ParallelSpec two{.tp_size = 2};
  OnDevices ranks;
  EXPECT_NE(refusal(spec_of(), two, nullptr).find("no tensor_communicator"), std::string::npos);
  OnDevices other(1);
  EXPECT_NE(refusal(spec_of(), two, &other).find("rank 1 of 2"), std::string::npos);
  OnDevices on_host(0, 2, CommFeature::kDeviceMemory);
  EXPECT_NE(refusal(spec_of(), two, &on_host).find("devices cannot carry memory of a device"),
            std::string::npos);
  OnDevices waits(0, 2, CommFeature::kStreamOrder);
  EXPECT_NE(refusal(spec_of(), two, &waits).find("order its operations by a stream"),
            std::string::npos);
  MoeSpec latent = spec_of();
  latent.latent = {.size = 128, .has_norm = true};
  EXPECT_NE(refusal(latent, two, &ranks).find("has_norm"), std::string::npos);
  latent.latent.has_norm = false;
  EXPECT_EQ(refusal(latent, two, &ranks), "planned");
}

}  // namespace
}  // namespace conclave
