// Tests plans for GPUs that are no Hopper, which any machine can make: the plain rows serve where
// they were compiled for the device, and the reasons of all others say what they need.

#include "experts/catalog.h"
#include "layer/cuda/h200_plan.h"
#include "layer/cuda/plan.h"
#include "support/layer_fixture.h"

#include "conclave/format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>

namespace conclave {
namespace {

using cuda::Architecture;
using cuda::CodeKind;
using testing::code_of;
using testing::h200;

constexpr std::array kHopperOnly = {Architecture{{9, 0}, CodeKind::kExact}};
constexpr std::array kWithAmpere = {Architecture{{9, 0}, CodeKind::kExact},
                                    Architecture{{8, 0}, CodeKind::kBinary},
                                    Architecture{{8, 0}, CodeKind::kPtx}};
constexpr std::array kWithBlackwell = {Architecture{{9, 0}, CodeKind::kExact},
                                       Architecture{{10, 0}, CodeKind::kBinary},
                                       Architecture{{12, 0}, CodeKind::kBinary}};

cuda::DeviceInfo device(const std::string& name, const cuda::Capability& capability,
                        int64_t shared_kib, std::span<const Architecture> compiled) {
  cuda::DeviceInfo info = h200();
  info.name = name;
  info.capability = capability;
  info.shared_bytes_per_block = shared_kib << 10;
  info.cluster_blocks = 8;
  info.plain_code = compiled;
  return info;
}

MoeSpec qwen3() { return find_preset("qwen3-30b-a3b")->spec; }

CudaPlan plan_on(const cuda::DeviceInfo& info, const MoeSpec& spec) {
  return plan_cuda_layer(
      {.spec = spec, .options = {.max_tokens = 16384}, .parallel = {}, .device = info});
}

const PlanRow& verdict(const Plan& plan, const std::string& table, const std::string& name) {
  const auto row = std::find_if(plan.rows.begin(), plan.rows.end(), [&](const PlanRow& candidate) {
    return candidate.table == table && candidate.name == name;
  });
  if (row == plan.rows.end()) throw std::runtime_error("no verdict on " + name);
  return *row;
}

// A row of Hopper says this reason, or that the build leaves it out.
std::string hopper_reason(const std::string& reason) {
  const auto left_out = experts::left_out_kernels();
  return left_out.empty() ? reason : left_out.front().supports({}).reason();
}

int32_t largest_cluster(const CudaPlan& plan) {
  int32_t largest = 1;
  for (const auto& rung : plan.routed.grouping) {
    largest = std::max(largest, rung.launches.shape.cluster);
  }
  for (const RouteGroupRung& rung : plan.routing) {
    largest = std::max(largest, rung.shape.cluster);
  }
  return largest;
}

TEST(OtherDevices, PlainRows_ServeEveryFormatThatIsCompiledForThem) {
  const std::array devices = {device("NVIDIA A100", {8, 0}, 163, kWithAmpere),
                              device("NVIDIA L40S", {8, 9}, 99, kWithAmpere),
                              device("NVIDIA B200", {10, 0}, 227, kWithAmpere),
                              device("NVIDIA B200", {10, 0}, 227, kWithBlackwell),
                              device("NVIDIA RTX PRO 6000", {12, 0}, 99, kWithBlackwell)};
  for (const cuda::DeviceInfo& info : devices) {
    for (const WeightForm& form : weight_forms()) {
      MoeSpec spec = qwen3();
      spec.weight_dtype = form.dtype;
      spec.quant = form.quant;
      SCOPED_TRACE(info.name + " " + std::string(form.name));
      if (!gpu_rows_support(spec.weight_dtype, spec.quant)) spec = with_plain_rows(spec);
      const CudaPlan made = plan_on(info, spec);
      ASSERT_EQ(made.routed.ladder.size(), 1U);
      EXPECT_EQ(made.routed.ladder.front().row->name, "cuda.reference");
      EXPECT_EQ(made.routed.ladder.front().reason, "least by the cost model");
      EXPECT_EQ(made.decode_tokens, 0);
      EXPECT_EQ(made.summary.rows.empty(), false);
    }
  }
}

TEST(OtherDevices, RowsOfHopper_SayThatTheyNeedIt) {
  const auto info = device("NVIDIA A100", {8, 0}, 163, kWithAmpere);
  const Plan summary = plan_on(info, qwen3()).summary;
  for (const char* name : {"cuda.decode_sm90", "cuda.stream_sm90", "cuda.stream_fp8_sm90",
                           "cuda.tile_sm90", "cuda.tile_fp8_sm90"}) {
    const PlanRow& row = verdict(summary, "kernel", name);
    EXPECT_FALSE(row.chosen) << name;
    EXPECT_EQ(row.reason, hopper_reason("needs compute capability 9.0; found 8.0")) << name;
  }
  EXPECT_TRUE(verdict(summary, "kernel", "cuda.reference").chosen);
}

TEST(OtherDevices, WithoutCode_TheLayerIsRefusedWithWhatWasCompiled) {
  const LayerOptions options;
  const ParallelSpec parallel;
  const MoeSpec spec = qwen3();
  for (const cuda::Capability& capability : {cuda::Capability{8, 0}, {10, 0}, {12, 0}}) {
    const auto info = device("NVIDIA GPU", capability, 227, kHopperOnly);
    const CudaPlanRequest request{
        .spec = spec, .options = options, .parallel = parallel, .device = info};
    EXPECT_EQ(code_of([&] { static_cast<void>(plan_cuda_layer(request)); }),
              ErrorCode::kUnsupported);
    const PlanRow row = verdict(summarise_cuda_plan(request), "kernel", "cuda.reference");
    EXPECT_EQ(row.reason, "NVIDIA GPU has compute capability " + to_string(capability) +
                              "; kernels are compiled for 90a: CONCLAVE_CUDA_ARCHITECTURES of "
                              "the build adds others");
  }
}

TEST(OtherDevices, Clusters_AreUsedWhereTheCodeHasThem) {
  const auto cluster = [](const cuda::DeviceInfo& info) {
    return largest_cluster(plan_on(info, qwen3()));
  };
  EXPECT_EQ(cluster(h200()), experts::left_out_kernels().empty() ? 16 : 1);
  EXPECT_EQ(cluster(device("NVIDIA B200", {10, 0}, 227, kWithBlackwell)), 8);
  EXPECT_EQ(cluster(device("NVIDIA B200", {10, 0}, 227, kWithAmpere)), 1);
  const auto ampere = device("NVIDIA A100", {8, 0}, 163, kWithAmpere);
  EXPECT_EQ(cluster(ampere), 1);
  EXPECT_EQ(verdict(plan_on(ampere, qwen3()).summary, "group", "cuda.group_cluster").reason,
            "needs clusters of 8 blocks; the device's code has 1");
}

TEST(OtherDevices, SharedMemory_IsAskedFor) {
  MoeSpec spec = qwen3();
  spec.num_experts = 1024;
  const auto small = device("NVIDIA RTX PRO 6000", {12, 0}, 99, kWithBlackwell);
  EXPECT_EQ(code_of([&] { static_cast<void>(plan_on(small, spec)); }), ErrorCode::kUnsupported);
  const LayerOptions options;
  const ParallelSpec parallel;
  const Plan refused = summarise_cuda_plan(
      {.spec = spec, .options = options, .parallel = parallel, .device = small});
  EXPECT_EQ(verdict(refused, "group", "cuda.group_counted_wide").reason,
            "needs 152064 bytes of shared memory for 1024 experts; a block has 101376");
  EXPECT_FALSE(
      plan_on(device("NVIDIA B200", {10, 0}, 227, kWithBlackwell), spec).routed.grouping.empty());
  // The kernels of Hopper ask for more than a block here may have.
  const auto narrow = device("NVIDIA GPU", {9, 0}, 99, kHopperOnly);
  EXPECT_EQ(verdict(plan_on(narrow, qwen3()).summary, "kernel", "cuda.tile_sm90").reason,
            hopper_reason("needs 232448 bytes of shared memory; a block has 101376"));
  const auto least = device("NVIDIA GPU", {8, 0}, 64, kWithAmpere);
  EXPECT_EQ(verdict(plan_on(least, qwen3()).summary, "gate product", "cuda.gate_many").reason,
            "needs 98304 bytes of shared memory; a block has 65536");
}

}  // namespace
}  // namespace conclave
