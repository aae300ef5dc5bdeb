// What a forward on a GPU refuses, by code and by name.

#include "device_layer.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

using testing::code_of;
using testing::CudaLayerTest;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::make_spec;
using testing::random_tensor;

class CudaArguments : public CudaLayerTest {};

TEST_F(CudaArguments, MissingStreamTimingsAndHostMemory_AreRefused) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  const Tensor hidden = random_tensor(DType::kBF16, 4, 128, 5);
  const auto refusal = [&](const auto& change) {
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    change(forward.args);
    return code_of([&] { forward.enqueue(); });
  };
  StageTimings timings;
  Workspace host_workspace(owned.host, owned.layer.workspace_bytes());
  EXPECT_EQ(refusal([](ForwardArgs& args) { args.stream = {}; }), ErrorCode::kNullPointer);
  EXPECT_EQ(refusal([&](ForwardArgs& args) { args.timings = &timings; }), ErrorCode::kUnsupported);
  EXPECT_EQ(refusal([&](ForwardArgs& args) { args.hidden = hidden.const_view(); }),
            ErrorCode::kDevice);
  EXPECT_EQ(refusal([&](ForwardArgs& args) { args.workspace = &host_workspace; }),
            ErrorCode::kDevice);
  EXPECT_EQ(refusal([](ForwardArgs& args) { args.hidden.shape = {4, 127}; }), ErrorCode::kShape);
}

TEST_F(CudaArguments, WorkspaceOfOneByteLess_IsRefused) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  const Tensor hidden = random_tensor(DType::kBF16, 40, 128, 5);
  DeviceForward forward(owned, hidden.view(), DType::kBF16);
  Workspace small(owned.context, owned.layer.workspace_bytes() - 1);
  forward.args.workspace = &small;
  EXPECT_EQ(code_of([&] { forward.enqueue(); }), ErrorCode::kWorkspaceTooSmall);
}

TEST_F(CudaArguments, Float32Weights_AreRefusedWithTheReason) {
  EXPECT_EQ(code_of([] { const DeviceLayer owned(make_spec(6, 2, 72, 40, DType::kF32)); }),
            ErrorCode::kUnsupported);
}

TEST_F(CudaArguments, PartsThatCudaLacks_AreNamedTogether) {
  MoeSpec spec = make_spec(8, 2, 128, 64, DType::kBF16);
  spec.latent = {.size = 32};
  spec.residual = {.intermediate_size = 32};
  try {
    const DeviceLayer owned(spec);
    ADD_FAILURE() << "was created";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    const std::string text = error.what();
    EXPECT_NE(text.find("latent"), std::string::npos) << text;
    EXPECT_NE(text.find("residual"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace conclave
