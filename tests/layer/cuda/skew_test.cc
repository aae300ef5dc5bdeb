// Tests layers whose plan has a second kernel for skewed choices: the counts of a batch decide, on
// the device, which of the two has work to do. The bits are the same.

#include "cuda/check.h"
#include "cuda/stream.h"
#include "device_layer.h"
#include "support/cuda/cuda_problem.h"
#include "support/cuda/guarded_device.h"
#include "support/cuda/problem_layer.h"
#include "support/cuda/routings.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cuda_runtime_api.h>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::CudaProblem;
using testing::GuardedDevice;
using testing::RoutingKind;

constexpr int64_t kMostTokens = 1024;
constexpr int64_t kHidden = 4096;

class CudaSkew : public testing::CudaLayerTest {
 protected:
  // These sizes take long enough to read for a second kernel to be planned.
  static testing::CudaProblemOptions options() {
    return {.num_experts = 8,
            .top_k = 2,
            .hidden_size = kHidden,
            .intermediate_size = 14336,
            .num_tokens = 256};
  }
};

struct SkewLayer {
  SkewLayer(const Context& context, CudaProblem& problem, const std::string& kernel)
      : layer(MoeLayer::create(context, testing::layer_spec(problem.options()),
                               *testing::layer_source(problem),
                               {.max_tokens = kMostTokens, .kernel = kernel})),
        workspace(context, layer.workspace_bytes()) {}

  MoeLayer layer;
  Workspace workspace;
};

class SkewRun {
 public:
  SkewRun(CudaProblem& problem, SkewLayer& owned, const DeviceQueue& queue)
      : problem_(problem), owned_(owned), queue_(queue) {}

  void enqueue(void* out, const int32_t* ids) {
    const int64_t tokens = problem_.options().num_tokens;
    const DeviceRows hidden = problem_.hidden();
    owned_.layer.forward({.hidden = {hidden.data, hidden.dtype, {tokens, kHidden}},
                          .topk_ids = {ids, DType::kI32, {tokens, 2}},
                          .topk_weights = {problem_.topk_weights(), DType::kF32, {tokens, 2}},
                          .out = {out, DType::kBF16, {tokens, kHidden}},
                          .workspace = &owned_.workspace,
                          .stream = queue_.stream()});
  }
  // Writes into poisoned memory, using a poisoned workspace.
  std::vector<uint16_t> run() {
    GuardedDevice out(bytes());
    out.poison(to_cuda(queue_.stream()));
    const auto memory = owned_.workspace.memory();
    queue_.fill({.data = memory.data() + 256,
                 .dtype = DType::kU8,
                 .shape = {static_cast<int64_t>(memory.size()) - 256}},
                0xFF);
    enqueue(out.data(), problem_.topk_ids());
    queue_.synchronize();
    EXPECT_EQ(out.damage(), 0);
    const int64_t tokens = problem_.options().num_tokens;
    const testing::RowErrors errors = problem_.check_tokens({.data = out.data(),
                                                             .rows = tokens,
                                                             .cols = kHidden,
                                                             .stride = kHidden,
                                                             .dtype = DType::kBF16});
    EXPECT_TRUE(within(errors, 6e-3)) << errors.describe();
    return fetch(out.data());
  }
  std::vector<uint16_t> fetch(const void* out) const {
    std::vector<uint16_t> rows(bytes() / 2);
    cuda::check(cudaMemcpy(rows.data(), out, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return rows;
  }
  size_t bytes() const { return static_cast<size_t>(problem_.options().num_tokens * kHidden * 2); }

 private:
  CudaProblem& problem_;
  SkewLayer& owned_;
  const DeviceQueue& queue_;
};

TEST_F(CudaSkew, EveryRouting_HasTheBitsOfEitherKernelAlone) {
  CudaProblem problem(options());
  const Context context({.device = "cuda:0", .num_threads = 1});
  const DeviceQueue queue(context);
  SkewLayer chosen(context, problem, "");
  SkewLayer streamed(context, problem, "cuda.stream_sm90");
  SkewLayer tiled(context, problem, "cuda.tile_sm90");
  ASSERT_NE(explain(chosen.layer.plan()).find("skewed choices: cuda.tile_sm90"), std::string::npos);
  for (const int64_t tokens : {129, 256, 700, 1024}) {
    for (const RoutingKind kind :
         {RoutingKind::kUniform, RoutingKind::kZipf, RoutingKind::kOneHot, RoutingKind::kHoles}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, routing " << static_cast<int>(kind));
      problem.set_batch({.num_tokens = tokens, .routing = kind, .routings = 1, .seed = 5});
      const std::vector<uint16_t> out = SkewRun(problem, chosen, queue).run();
      EXPECT_TRUE(out == SkewRun(problem, streamed, queue).run());
      EXPECT_TRUE(out == SkewRun(problem, tiled, queue).run());
    }
  }
}

// One graph is replayed on even and on skewed ids in turn: the device makes the choice.
TEST_F(CudaSkew, ReplaysOnEvenAndSkewedIds_HaveTheBitsOfOneKernelAlone) {
  CudaProblem problem(options());
  const Context context({.device = "cuda:0", .num_threads = 1});
  const DeviceQueue queue(context);
  SkewLayer owned(context, problem, "");
  SkewLayer streamed(context, problem, "cuda.stream_sm90");
  SkewRun run(problem, owned, queue);
  SkewRun plain(problem, streamed, queue);
  constexpr int64_t kTokens = 256;
  DeviceTensor ids = queue.allocate(DType::kI32, {kTokens, 2});
  const auto* const id_data = static_cast<const int32_t*>(ids.const_view().data);
  GuardedDevice out(run.bytes());
  GuardedDevice expected(run.bytes());
  cudaStream_t const stream = to_cuda(queue.stream());
  const cuda::OwnedGraph graph = cuda::capture(stream, [&] { run.enqueue(out.data(), id_data); });
  for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kZipf, RoutingKind::kUniform,
                                 RoutingKind::kOneHot, RoutingKind::kHoles}) {
    const testing::HostRouting routing = testing::make_routing(
        {.num_tokens = kTokens, .num_experts = 8, .top_k = 2, .kind = kind, .seed = 5});
    Tensor host(DType::kI32, {kTokens, 2});
    std::copy(routing.ids.begin(), routing.ids.end(), host.as<int32_t>());
    queue.upload(host.const_view(), ids.view());
    out.poison(stream);
    expected.poison(stream);
    cuda::check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
    plain.enqueue(expected.data(), id_data);
    queue.synchronize();
    EXPECT_TRUE(run.fetch(out.data()) == run.fetch(expected.data())) << static_cast<int>(kind);
  }
}

}  // namespace
}  // namespace conclave
