// Which code a driver takes for a device, and what a device without any is told.
#include "cuda/architecture.h"

#include "cuda/device_info.h"

#include "conclave/version.h"

#include <gtest/gtest.h>

#include <array>
#include <span>
#include <string>

namespace conclave::cuda {
namespace {

constexpr Architecture kExact90{{9, 0}, CodeKind::kExact};
constexpr Architecture kBinary80{{8, 0}, CodeKind::kBinary};
constexpr Architecture kPtx80{{8, 0}, CodeKind::kPtx};
constexpr Architecture kBinary100{{10, 0}, CodeKind::kBinary};
constexpr Architecture kPtx100{{10, 0}, CodeKind::kPtx};
constexpr std::array kHopperOnly = {kExact90};
constexpr std::array kWithAmpere = {kExact90, kBinary80, kPtx80};
constexpr std::array kWithAll = {kPtx80, kBinary80, kPtx100, kBinary100, kExact90};

std::string code_on(const Capability& device, std::span<const Architecture> compiled) {
  const Architecture* const code = code_for(device, compiled);
  return code == nullptr ? "none" : to_string(*code);
}

DeviceInfo device(const std::string& name, const Capability& capability,
                  std::span<const Architecture> compiled) {
  return {.name = name, .capability = capability, .plain_code = compiled};
}

TEST(Architecture, ExactCode_RunsOnItsCapabilityOnly) {
  EXPECT_EQ(code_on({9, 0}, kHopperOnly), "90a");
  for (const Capability& other : {Capability{8, 0}, {8, 9}, {10, 0}, {12, 0}}) {
    EXPECT_EQ(code_on(other, kHopperOnly), "none") << to_string(other);
  }
}

TEST(Architecture, Binary_ServesLaterMinorNumbers_PtxAllLaterOnes) {
  EXPECT_EQ(code_on({7, 5}, kWithAmpere), "none");
  EXPECT_EQ(code_on({8, 0}, kWithAmpere), "80-real");
  EXPECT_EQ(code_on({8, 6}, kWithAmpere), "80-real");
  EXPECT_EQ(code_on({9, 0}, kWithAmpere), "90a");
  EXPECT_EQ(code_on({10, 0}, kWithAmpere), "80-virtual");
  EXPECT_EQ(code_on({12, 0}, kWithAmpere), "80-virtual");
}

TEST(Architecture, LaterCode_IsTakenFirst) {
  EXPECT_EQ(code_on({8, 9}, kWithAll), "80-real");
  EXPECT_EQ(code_on({10, 0}, kWithAll), "100-real");
  EXPECT_EQ(code_on({10, 3}, kWithAll), "100-real");
  EXPECT_EQ(code_on({12, 0}, kWithAll), "100-virtual");
  EXPECT_EQ(code_on({9, 0}, kWithAll), "90a");
}

TEST(Architecture, DeviceWithoutCode_IsToldWhatWasCompiled) {
  EXPECT_TRUE(runs_plain_kernels(device("NVIDIA H200", {9, 0}, kHopperOnly)));
  EXPECT_TRUE(runs_plain_kernels(device("NVIDIA B200", {10, 0}, kWithAmpere)));
  EXPECT_EQ(runs_plain_kernels(device("NVIDIA A100", {8, 0}, kHopperOnly)).reason(),
            "NVIDIA A100 has compute capability 8.0; kernels are compiled for 90a: "
            "CONCLAVE_CUDA_ARCHITECTURES of the build adds others");
  EXPECT_EQ(runs_plain_kernels(device("Tesla T4", {7, 5}, kWithAmpere)).reason(),
            "Tesla T4 has compute capability 7.5; kernels are compiled for 90a, 80-real, "
            "80-virtual: CONCLAVE_CUDA_ARCHITECTURES of the build adds others");
  EXPECT_FALSE(runs_plain_kernels(device("NVIDIA H200", {9, 0}, {})));
}

TEST(Architecture, Clusters_NeedCodeThatKnowsThem) {
  EXPECT_EQ(most_cluster_blocks(device("NVIDIA B200", {10, 0}, kWithAll)), 8);
  EXPECT_EQ(most_cluster_blocks(device("NVIDIA B200", {10, 0}, kWithAmpere)), 1);
  EXPECT_EQ(most_cluster_blocks(device("NVIDIA A100", {8, 0}, kWithAll)), 1);
  DeviceInfo large = device("NVIDIA H200", {9, 0}, kHopperOnly);
  large.cluster_blocks = 16;
  EXPECT_EQ(most_cluster_blocks(large), 16);
}

TEST(Architecture, Build_SaysWhatItsKernelsAreFor) {
  const std::string features = build_info().features;
  EXPECT_EQ(plain_architectures().empty(), features.find("cuda") == std::string::npos);
  for (const Architecture& code : plain_architectures()) {
    EXPECT_NE(features.find("cuda_sm" + std::to_string(code.capability.major) +
                            std::to_string(code.capability.minor)),
              std::string::npos)
        << features;
  }
}

}  // namespace
}  // namespace conclave::cuda
