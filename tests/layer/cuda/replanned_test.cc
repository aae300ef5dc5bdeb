// MoeLayer::with_max_tokens on a GPU: another plan on the same device memory, and workspaces sized
// for the tokens of a call.

#include "cuda/check.h"
#include "cuda/stream.h"
#include "device_layer.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::CountingAllocator;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::make_spec;
using testing::NumberForm;
using testing::random_tensor;
using testing::same_bits;

class CudaReplanned : public testing::CudaLayerTest {};

// Shared experts with launches of their own, for which a plan needs ids for every token.
MoeSpec spec_of(const NumberForm& form) {
  MoeSpec spec = testing::with_form(make_spec(10, 3, 256, 128, form.dtype), form);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 192};
  return spec;
}

Tensor run(DeviceLayer& owned, const MoeLayer& layer, const Tensor& hidden, DType dtype) {
  Workspace workspace(owned.context, layer.workspace_bytes(hidden.shape()[0]),
                      owned.queue.stream());
  DeviceForward forward(owned, hidden.view(), dtype);
  forward.args.workspace = &workspace;
  layer.forward(forward.args);
  return forward.out();
}

TEST_F(CudaReplanned, EveryForm_AgreesWithALayerPlannedForThat) {
  for (const NumberForm& form : testing::number_forms()) {
    SCOPED_TRACE(form.name);
    const DType dtype = testing::row_dtype(form);
    DeviceLayer small(spec_of(form), {.max_tokens = 64});
    DeviceLayer exact(spec_of(form), {.max_tokens = 1024});
    const MoeLayer grown = small.layer.with_max_tokens(1024);
    EXPECT_EQ(grown.plan().max_tokens, 1024);
    ASSERT_EQ(grown.plan().ladder.size(), exact.layer.plan().ladder.size());
    for (const int64_t tokens : {1, 9, 64, 65, 700, 1024, 1500}) {
      const Tensor hidden = random_tensor(dtype, tokens, 256, 3);
      EXPECT_TRUE(
          same_bits(run(small, grown, hidden, dtype), run(exact, exact.layer, hidden, dtype)))
          << tokens;
    }
  }
}

TEST_F(CudaReplanned, NoDeviceMemoryIsAskedFor_UpToThePromisedTokens) {
  const Context plain({.device = "cuda:0", .num_threads = 1});
  CountingAllocator allocator(*plain.device_allocator());
  const Context context({.device = "cuda:0", .num_threads = 1, .device_allocator = &allocator});
  const MoeSpec spec = spec_of({"bf16", DType::kBF16});
  const auto source = make_synthetic_source(spec, 3);
  const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 64});
  const int64_t calls = allocator.calls;
  const MoeLayer larger = layer.with_max_tokens(MoeLayer::kReplannedTokens);
  EXPECT_EQ(allocator.calls, calls);
  const MoeLayer largest = larger.with_max_tokens(2 * MoeLayer::kReplannedTokens);
  EXPECT_GT(allocator.calls, calls);
  EXPECT_EQ(largest.plan().max_tokens, 2 * MoeLayer::kReplannedTokens);
}

TEST_F(CudaReplanned, InsideACapture_TheGraphAndEarlierOnesStayRight) {
  const MoeSpec spec = spec_of({"bf16", DType::kBF16});
  DeviceLayer owned(spec, {.max_tokens = 64});
  const Tensor few = random_tensor(DType::kBF16, 40, 256, 3);
  const Tensor many = random_tensor(DType::kBF16, 600, 256, 4);
  DeviceForward small(owned, few.view(), DType::kBF16);
  small.enqueue();  // loads the kernels
  const Tensor expected_few = small.out();
  const cuda::OwnedGraph before =
      cuda::capture(to_cuda(owned.queue.stream()), [&] { small.enqueue(); });
  Workspace workspace(owned.context, owned.layer.with_max_tokens(1024).workspace_bytes(600));
  DeviceForward large(owned, many.view(), DType::kBF16);
  large.args.workspace = &workspace;
  std::optional<MoeLayer> grown;
  const cuda::OwnedGraph after = cuda::capture(to_cuda(owned.queue.stream()), [&] {
    grown.emplace(owned.layer.with_max_tokens(1024));
    grown->forward(large.args);
  });
  const auto launch = [&](const cuda::OwnedGraph& graph) {
    cuda::check(cudaGraphLaunch(graph.get(), to_cuda(owned.queue.stream())), "cudaGraphLaunch");
  };
  DeviceLayer exact(spec, {.max_tokens = 1024});
  const Tensor expected_many = run(exact, exact.layer, many, DType::kBF16);
  for (int round = 0; round < 2; ++round) {
    launch(after);
    launch(before);
    EXPECT_TRUE(same_bits(large.out(), expected_many));
    EXPECT_TRUE(same_bits(small.out(), expected_few));
  }
}

TEST_F(CudaReplanned, Reload_OfOneIsOfAll) {
  const MoeSpec spec = spec_of({"bf16", DType::kBF16});
  const Tensor hidden = random_tensor(DType::kBF16, 100, 256, 3);
  for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
    DeviceLayer owned(spec, {.max_tokens = 64});
    DeviceLayer other(spec, {.max_tokens = 1024}, {}, 99);
    const Tensor expected = run(other, other.layer, hidden, DType::kBF16);
    const MoeLayer grown = owned.layer.with_max_tokens(1024);
    { const MoeLayer gone = owned.layer.with_max_tokens(512); }
    owned.layer.reload(*other.source, mode);
    EXPECT_TRUE(same_bits(run(owned, grown, hidden, DType::kBF16), expected));
    EXPECT_EQ(grown.status().forwards, owned.layer.status().forwards);
  }
}

TEST_F(CudaReplanned, WorkspaceOfTheCallsTokens_IsEnoughAndNoMore) {
  for (const NumberForm& form : testing::number_forms()) {
    SCOPED_TRACE(form.name);
    const DType dtype = testing::row_dtype(form);
    DeviceLayer owned(spec_of(form), {.max_tokens = 1024});
    for (const int64_t tokens : {1, 2, 9, 100, 513, 1024}) {
      const Tensor hidden = random_tensor(dtype, tokens, 256, 3);
      DeviceForward whole(owned, hidden.view(), dtype);
      whole.enqueue();
      EXPECT_TRUE(same_bits(run(owned, owned.layer, hidden, dtype), whole.out())) << tokens;
      const size_t bytes = owned.layer.workspace_bytes(tokens);
      EXPECT_LE(bytes, owned.layer.workspace_bytes());
      Workspace small(owned.context, bytes - 1);
      whole.args.workspace = &small;
      EXPECT_EQ(code_of([&] { whole.enqueue(); }), ErrorCode::kWorkspaceTooSmall) << tokens;
    }
  }
}

}  // namespace
}  // namespace conclave
