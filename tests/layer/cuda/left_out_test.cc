// Tests what a build says of kernels that it leaves out, and that plans do without them. A build
// with every kernel leaves out none.

#include "experts/catalog.h"
#include "layer/cuda/h200_plan.h"

#include "conclave/device.h"
#include "conclave/synthetic.h"
#include "conclave/version.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>

namespace conclave {
namespace {

using cuda::Architecture;
using cuda::CodeKind;
using testing::h200;

constexpr std::array kAmpere = {Architecture{{8, 0}, CodeKind::kBinary},
                                Architecture{{8, 0}, CodeKind::kPtx}};

// Hopper with the plain code of a build for Ampere, which its driver compiles.
CudaPlan plan_by_plain_code(const LayerOptions& options) {
  cuda::DeviceInfo device = h200();
  device.plain_code = kAmpere;
  const MoeSpec spec = find_preset("qwen3-30b-a3b")->spec;
  return plan_cuda_layer({.spec = spec, .options = options, .parallel = {}, .device = device});
}

TEST(LeftOutKernels, AreThoseThatTheArchitecturesOfTheBuildLack) {
  const std::string features = build_info().features;
  EXPECT_EQ(experts::left_out_kernels().empty(), features.find("cuda_sm90a") != std::string::npos);
  for (const experts::KernelRow& row : experts::left_out_kernels()) {
    EXPECT_EQ(row.supports({}).reason(),
              "left out of this build, whose CONCLAVE_CUDA_ARCHITECTURES lacks 90a");
    EXPECT_EQ(experts::find_device_row(row.name).name, row.name);
    for (const experts::DeviceKernelRow& built : experts::device_kernels().rows()) {
      EXPECT_NE(built.name, row.name);
    }
  }
}

TEST(LeftOutKernels, PlansListThem_AndTakeThePlainRow) {
  if (experts::left_out_kernels().empty()) GTEST_SKIP() << "this build has every kernel";
  const CudaPlan made = plan_by_plain_code({.max_tokens = 256});
  ASSERT_EQ(made.routed.ladder.size(), 1U);
  EXPECT_EQ(made.routed.ladder.front().row->name, "cuda.reference");
  EXPECT_EQ(made.decode_tokens, 0);
  for (const experts::KernelRow& row : experts::left_out_kernels()) {
    const auto is_verdict = [&](const PlanRow& verdict) {
      return verdict.table == "kernel" && verdict.name == row.name && !verdict.chosen;
    };
    EXPECT_EQ(std::ranges::count_if(made.summary.rows, is_verdict), 1) << row.name;
  }
}

TEST(LeftOutKernels, OneThatIsForced_IsRefusedWithTheReason) {
  if (experts::left_out_kernels().empty()) GTEST_SKIP() << "this build has every kernel";
  try {
    static_cast<void>(plan_by_plain_code({.max_tokens = 256, .kernel = "cuda.tile_sm90"}));
    FAIL() << "a kernel that is not there was planned";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("CONCLAVE_CUDA_ARCHITECTURES lacks 90a"),
              std::string::npos)
        << error.what();
  }
}

TEST(LeftOutKernels, Backends_NameThem) {
  for (const BackendInfo& backend : backends()) {
    const bool named = backend.reason.find("lacks 90a: cuda.decode_sm90") != std::string::npos;
    const bool expected = backend.name == "cuda" && !experts::left_out_kernels().empty();
    EXPECT_EQ(named, expected) << backend.name << ": " << backend.reason;
  }
}

}  // namespace
}  // namespace conclave
