// Refits of a layer on a GPU beside forwards on several streams and replays of graphs: every output
// is of old or of new weights, in the order in which they were enqueued.
#include "cuda/check.h"
#include "cuda/stream.h"
#include "layer/cuda/refit_cases.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::DeviceLayer;
using testing::kRefitModes;
using testing::make_spec;
using testing::random_tensor;
using testing::RefitCase;
using testing::same_bits;
using testing::TwoWeights;

class CudaRefitServing : public testing::CudaLayerTest {};

// A stream of its own with memory for some forwards.
class Lane {
 public:
  Lane(DeviceLayer& owned, const Tensor& hidden, int64_t outputs)
      : layer_(owned.layer),
        queue_(owned.context),
        workspace_(owned.context, owned.layer.workspace_bytes()),
        hidden_(queue_.upload(hidden.const_view())) {
    for (int64_t i = 0; i < outputs; ++i) {
      outputs_.push_back(queue_.allocate(hidden.dtype(), hidden.shape()));
    }
  }

  void enqueue(int64_t output) { layer_.forward(args(output)); }
  ForwardArgs args(int64_t output) {
    ForwardArgs made;
    made.hidden = hidden_.const_view();
    made.out = outputs_[static_cast<size_t>(output)].view();
    made.workspace = &workspace_;
    made.stream = queue_.stream();
    return made;
  }
  Tensor output(int64_t index) {
    const DeviceTensor& on_device = outputs_[static_cast<size_t>(index)];
    Tensor copy(on_device.const_view().dtype, on_device.const_view().shape);
    queue_.download(on_device.const_view(), copy.view());
    return copy;
  }
  void clear(int64_t index) { queue_.fill(outputs_[static_cast<size_t>(index)].view(), 0xFF); }
  Stream stream() const { return queue_.stream(); }
  cudaStream_t cuda_stream() const { return to_cuda(queue_.stream()); }

 private:
  MoeLayer& layer_;
  DeviceQueue queue_;
  Workspace workspace_;
  DeviceTensor hidden_;
  std::vector<DeviceTensor> outputs_;
};

Tensor output_of(DeviceLayer& owned, const Tensor& hidden) {
  return testing::run_device_layer(owned, hidden.view(), hidden.dtype()).out;
}

// Large enough for forwards to pile up.
MoeSpec large_spec() { return make_spec(16, 4, 1024, 512, DType::kBF16); }

// Forwards on two streams that no host waited for, on either side of a commit.
TEST_F(CudaRefitServing, Forwards_HaveTheWeightsOfTheirPlaceInTheOrder) {
  const TwoWeights two(large_spec());
  DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 512});
  DeviceLayer fresh(two.spec, two.of_second(), {.max_tokens = 512});
  const Tensor hidden = random_tensor(DType::kBF16, 500, two.spec.hidden_size, 5);
  const Tensor of_first = output_of(owned, hidden);
  const Tensor of_second = output_of(fresh, hidden);
  constexpr int64_t kForwards = 40;
  std::array lanes = {Lane(owned, hidden, kForwards), Lane(owned, hidden, kForwards)};
  for (const RefitMode mode : {RefitMode::kStaged, RefitMode::kStagedCopy}) {
    Refit back(owned.layer);
    back.stage(*two.first);
    back.commit();
    const auto enqueue = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (Lane& lane : lanes) lane.enqueue(i);
      }
    };
    enqueue(0, kForwards / 4);  // not yet watched
    Refit refit(owned.layer, {.mode = mode});
    enqueue(kForwards / 4, kForwards / 2);
    refit.stage(*two.second);
    enqueue(kForwards / 2, kForwards * 3 / 4);
    refit.commit();
    enqueue(kForwards * 3 / 4, kForwards);
    for (Lane& lane : lanes) {
      for (int64_t i = 0; i < kForwards; ++i) {
        EXPECT_TRUE(same_bits(lane.output(i), i < kForwards * 3 / 4 ? of_first : of_second)) << i;
      }
    }
  }
}

TEST_F(CudaRefitServing, Storm_SeesOldOrNewWeightsAlone) {
  const TwoWeights two(make_spec(16, 4, 512, 256, DType::kBF16));
  DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
  DeviceLayer fresh(two.spec, two.of_second(), {.max_tokens = 64});
  const Tensor hidden = random_tensor(DType::kBF16, 24, two.spec.hidden_size, 5);
  const Tensor of_first = output_of(owned, hidden);
  const Tensor of_second = output_of(fresh, hidden);
  std::atomic<bool> stopped{false};
  std::atomic<int64_t> mixtures{0};
  std::array<std::atomic<int64_t>, 2> seen{};
  const auto judge = [&](const Tensor& out) {
    const bool is_first = same_bits(out, of_first);
    if (!is_first && !same_bits(out, of_second)) mixtures.fetch_add(1);
    seen[is_first ? 0 : 1].fetch_add(1);
  };
  constexpr int64_t kBurst = 6;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      Lane lane(owned, hidden, kBurst);
      while (!stopped.load()) {
        for (int64_t output = 0; output < kBurst; ++output) lane.enqueue(output);
        for (int64_t output = 0; output < kBurst; ++output) judge(lane.output(output));
      }
    });
  }
  // Replays of a graph that was captured before the first refit.
  Lane replayed(owned, hidden, 1);
  const cuda::OwnedGraph graph =
      cuda::capture(replayed.cuda_stream(), [&] { replayed.enqueue(0); });
  threads.emplace_back([&] {
    while (!stopped.load()) {
      replayed.clear(0);
      {
        const GraphReplay replay(owned.layer, replayed.stream());
        cuda::check(cudaGraphLaunch(graph.get(), replayed.cuda_stream()), "cudaGraphLaunch");
      }
      judge(replayed.output(0));
    }
  });
  constexpr uint64_t kCommits = 24;
  for (uint64_t commit = 1; commit <= kCommits; ++commit) {
    const bool to_second = commit % 2 == 1;
    Refit refit(owned.layer, {.keeps_memory = commit % 4 < 2});
    refit.stage(to_second ? *two.second : *two.first);
    refit.commit();
    const int64_t before = seen[to_second ? 1 : 0].load();
    while (seen[to_second ? 1 : 0].load() < before + 20) std::this_thread::yield();
    EXPECT_EQ(owned.layer.status().refit_epoch, commit);
  }
  stopped = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mixtures.load(), 0);
}

// Addresses stay: a graph captured before has the new weights, whatever part of them changed.
TEST_F(CudaRefitServing, GraphCapturedBefore_HasTheNewWeightsAfter) {
  for (const RefitCase& each : testing::refit_cases()) {
    const TwoWeights two(each.spec);
    for (const RefitMode mode : kRefitModes) {
      for (const RefitScope& scope : {RefitScope{}, RefitScope{.experts = {0, 2, 3}}}) {
        SCOPED_TRACE(::testing::Message() << each.name << ", mode " << static_cast<int>(mode)
                                          << ", " << scope.experts.size() << " experts");
        DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
        DeviceLayer fresh(two.spec, two.merged(scope), {.max_tokens = 64});
        for (const Tensor& hidden : two.hidden) {
          DeviceLayer again(two.spec, two.of_first(), {.max_tokens = 64});
          Lane lane(again, hidden, 1);
          const cuda::OwnedGraph graph =
              cuda::capture(lane.cuda_stream(), [&] { lane.enqueue(0); });
          const auto replay = [&] {
            lane.clear(0);
            cuda::check(cudaGraphLaunch(graph.get(), lane.cuda_stream()), "cudaGraphLaunch");
          };
          replay();
          EXPECT_TRUE(same_bits(lane.output(0), output_of(owned, hidden)));
          Refit refit(again.layer, {.mode = mode, .scope = scope});
          refit.stage(*fresh.source);
          if (mode != RefitMode::kInPlace) {
            replay();
            EXPECT_TRUE(same_bits(lane.output(0), output_of(owned, hidden)));
          }
          refit.commit();
          replay();
          EXPECT_TRUE(same_bits(lane.output(0), output_of(fresh, hidden)));
        }
      }
    }
  }
}

// Replays that are on their way when a commit is called still have the old weights.
TEST_F(CudaRefitServing, ReplaysEnqueuedBefore_HaveTheOldWeights) {
  const TwoWeights two(large_spec());
  DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 512});
  const Tensor hidden = random_tensor(DType::kBF16, 500, two.spec.hidden_size, 5);
  const Tensor of_first = output_of(owned, hidden);
  constexpr int64_t kReplays = 30;
  Lane lane(owned, hidden, kReplays);
  std::vector<cuda::OwnedGraph> graphs;
  for (int64_t i = 0; i < kReplays; ++i) {
    graphs.push_back(cuda::capture(lane.cuda_stream(), [&] { lane.enqueue(i); }));
  }
  Refit refit(owned.layer);
  refit.stage(*two.second);
  for (const cuda::OwnedGraph& graph : graphs) {
    cuda::check(cudaGraphLaunch(graph.get(), lane.cuda_stream()), "cudaGraphLaunch");
  }
  refit.commit();
  for (int64_t i = 0; i < kReplays; ++i) EXPECT_TRUE(same_bits(lane.output(i), of_first)) << i;
}

TEST_F(CudaRefitServing, InPlace_RefusesForwardsUntilCommit) {
  const TwoWeights two(make_spec(6, 2, 128, 64, DType::kBF16));
  DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
  Lane lane(owned, two.hidden[0], 1);
  Refit refit(owned.layer, {.mode = RefitMode::kInPlace, .scope = {.experts = {1, 2}}});
  EXPECT_NO_THROW(lane.enqueue(0));
  refit.stage(*two.second, {.experts = {1}});
  EXPECT_EQ(code_of([&] { lane.enqueue(0); }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { GraphReplay(owned.layer, lane.stream()); }), ErrorCode::kState);
  refit.stage(*two.second, {.experts = {2}});
  refit.commit();
  EXPECT_NO_THROW(lane.enqueue(0));
}

// A forward may be captured while weights are staged, but not while they are committed.
TEST_F(CudaRefitServing, CaptureBesideARefit_IsTypedAtCommitAlone) {
  const TwoWeights two(make_spec(6, 2, 128, 64, DType::kBF16));
  DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
  DeviceLayer fresh(two.spec, two.of_second(), {.max_tokens = 64});
  const Tensor& hidden = two.hidden[0];
  const Tensor of_first = output_of(owned, hidden);
  Lane lane(owned, hidden, 1);
  Refit refit(owned.layer);
  const cuda::OwnedGraph graph = cuda::capture(lane.cuda_stream(), [&] {
    lane.enqueue(0);
    refit.stage(*two.second);
    lane.enqueue(0);
  });
  const auto replay = [&] {
    lane.clear(0);
    cuda::check(cudaGraphLaunch(graph.get(), lane.cuda_stream()), "cudaGraphLaunch");
    return lane.output(0);
  };
  EXPECT_TRUE(same_bits(replay(), of_first));
  EXPECT_EQ(code_of([&] {
              const auto lost = cuda::capture(lane.cuda_stream(), [&] { refit.commit(); });
            }),
            ErrorCode::kState);
  EXPECT_TRUE(same_bits(replay(), of_first));
  refit.commit();
  EXPECT_TRUE(same_bits(replay(), output_of(fresh, hidden)));
}

}  // namespace
}  // namespace conclave
