// Graphs of forwards replayed with other contents, two streams at once, nothing allocated.

#include "device_layer.h"

#include <gtest/gtest.h>

namespace conclave {
namespace {

using testing::CudaLayerTest;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::make_spec;
using testing::random_tensor;

class CudaGraph : public CudaLayerTest {};

TEST_F(CudaGraph, ReplayWithOtherInputs_GivesTheirResults) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  for (const int64_t tokens : {3, 8, 40}) {
    const Tensor first = random_tensor(DType::kBF16, tokens, 128, 5);
    const Tensor second = random_tensor(DType::kBF16, tokens, 128, 6);
    DeviceForward plain(owned, second.view(), DType::kBF16);
    plain.enqueue();
    const Tensor expected = plain.out();

    DeviceForward captured(owned, first.view(), DType::kBF16);
    // The first replay sees the first inputs, the timed one the second: an upload lies in between.
    int32_t replays = 0;
    static_cast<void>(owned.queue.time_ms([&] { captured.enqueue(); }, replays));
    owned.queue.upload(second.const_view(), captured.hidden().view());
    static_cast<void>(owned.queue.time_ms([&] { captured.enqueue(); }, 3));
    EXPECT_TRUE(testing::same_bits(captured.out(), expected)) << tokens;
  }
}

TEST_F(CudaGraph, TwoStreams_DoNotDisturbEachOther) {
  DeviceLayer owned(make_spec(16, 4, 256, 128, DType::kBF16), {.max_tokens = 64});
  const DeviceQueue other_queue(owned.context);
  Workspace other_workspace(owned.context, owned.layer.workspace_bytes());
  const Tensor a = random_tensor(DType::kBF16, 40, 256, 5);
  const Tensor b = random_tensor(DType::kBF16, 7, 256, 6);
  DeviceForward forward_a(owned, a.view(), DType::kBF16);
  DeviceForward forward_b(owned, b.view(), DType::kBF16);
  forward_a.enqueue();
  forward_b.enqueue();
  const Tensor expected_a = forward_a.out();
  const Tensor expected_b = forward_b.out();
  forward_b.args.stream = other_queue.stream();
  forward_b.args.workspace = &other_workspace;
  for (int round = 0; round < 50; ++round) {
    forward_a.enqueue();
    forward_b.enqueue();
  }
  other_queue.synchronize();
  EXPECT_TRUE(testing::same_bits(forward_a.out(), expected_a));
  EXPECT_TRUE(testing::same_bits(forward_b.out(), expected_b));
}

TEST_F(CudaGraph, Forward_AllocatesNothing) {
  const Context plain({.device = "cuda:0", .num_threads = 1});
  testing::CountingAllocator counter(*plain.device_allocator());
  const Context context({.device = "cuda:0", .num_threads = 1, .device_allocator = &counter});
  const MoeSpec spec = make_spec(8, 2, 128, 64, DType::kBF16);
  const auto source = make_synthetic_source(spec, 3);
  const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 64});
  Workspace workspace(context, layer.workspace_bytes());
  EXPECT_GT(counter.calls, 2);
  const DeviceQueue queue(context);
  const Tensor hidden = random_tensor(DType::kBF16, 100, 128, 5);
  const DeviceTensor rows = queue.upload(hidden.const_view());
  DeviceTensor out = queue.allocate(DType::kBF16, {100, 128});
  const int64_t before = counter.calls;
  for (int round = 0; round < 5; ++round) {
    layer.forward({.hidden = rows.const_view(),
                   .out = out.view(),
                   .workspace = &workspace,
                   .stream = queue.stream()});
  }
  queue.synchronize();
  EXPECT_EQ(counter.calls, before);
}

}  // namespace
}  // namespace conclave
