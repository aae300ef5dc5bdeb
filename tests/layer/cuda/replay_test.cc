// Replays one captured graph of a whole layer on other rows, ids, weights, logits and numbers of
// tokens; and runs several layers on several streams at once.

#include "cuda/check.h"
#include "cuda/stream.h"
#include "device_layer.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::DeviceForward;
using testing::DeviceLayer;
using testing::GivenRouting;
using testing::make_spec;
using testing::NumberForm;
using testing::random_tensor;

class CudaReplay : public testing::CudaLayerTest {};

MoeSpec small_spec(const NumberForm& form, int64_t top_k = 3) {
  return testing::with_form(make_spec(10, top_k, 264, 136, form.dtype), form);
}

// Some ids are -1 and some name no expert; the weights differ.
GivenRouting hostile_routing(int64_t tokens, int64_t top_k, uint64_t seed) {
  GivenRouting routing = testing::random_routing(tokens, 10, top_k, seed);
  auto* const ids = routing.ids.as<int32_t>();
  auto* const weights = routing.weights.as<float>();
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    const uint64_t draw = (static_cast<uint64_t>(i) + 1) * (seed * 2 + 1) * 0x9E3779B97F4A7C15U;
    weights[i] = 0.05F + static_cast<float>(draw >> 40) * 0x1p-24F;
    if (draw % 11 == 0) ids[i] = -1;
    if (draw % 37 == 0) ids[i] = std::numeric_limits<int32_t>::min();
    if (draw % 41 == 0) ids[i] = 10;
  }
  return routing;
}

GivenRouting first_rows(const GivenRouting& routing, int64_t tokens) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < tokens; ++row) rows.push_back(row);
  return {.ids = testing::gather_rows(routing.ids, rows),
          .weights = testing::gather_rows(routing.weights, rows)};
}

Tensor first_rows(const Tensor& tensor, int64_t tokens) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < tokens; ++row) rows.push_back(row);
  return testing::gather_rows(tensor, rows);
}

void expect_untouched_from(const Tensor& out, int64_t first) {
  const std::vector<std::byte> poison(testing::row_bytes(out, 0).size(), std::byte{0xFF});
  for (int64_t row = first; row < out.shape()[0]; ++row) {
    ASSERT_EQ(testing::row_bytes(out, row), poison) << "row " << row;
  }
}

// A graph of one forward over `capacity` rows; a number on the device says how many are live.
class Replayed {
 public:
  Replayed(DeviceLayer& owned, int64_t capacity, DType dtype)
      : owned_(owned),
        capacity_(capacity),
        live_(owned.queue.upload(Tensor(DType::kI64, {1}).view())),
        forward_(owned, random_tensor(dtype, capacity, owned.layer.spec().hidden_size, 1).view(),
                 dtype) {
    const GivenRouting routing = hostile_routing(capacity, owned.layer.spec().top_k, 1);
    forward_.route_by(routing.ids, routing.weights);
    forward_.args.num_tokens = static_cast<const int64_t*>(live_.const_view().data);
    graph_ = cuda::capture(stream(), [&] { forward_.enqueue(); });
  }

  // Replays on these inputs; rows beyond `live` are poison.
  Tensor replay(const Tensor& hidden, const GivenRouting& routing, int64_t live) {
    Tensor count(DType::kI64, {1});
    count.as<int64_t>()[0] = live;
    owned_.queue.upload(count.const_view(), live_.view());
    owned_.queue.upload(hidden.const_view(), forward_.hidden().view());
    owned_.queue.upload(routing.ids.const_view(), forward_.ids().view());
    owned_.queue.upload(routing.weights.const_view(), forward_.weights().view());
    owned_.queue.fill(forward_.args.out, 0xFF);
    cuda::check(cudaGraphLaunch(graph_.get(), stream()), "cudaGraphLaunch");
    return forward_.out();
  }
  int64_t capacity() const { return capacity_; }

 private:
  cudaStream_t stream() const { return to_cuda(owned_.queue.stream()); }

  DeviceLayer& owned_;
  int64_t capacity_;
  DeviceTensor live_;
  DeviceForward forward_;
  cuda::OwnedGraph graph_;
};

TEST_F(CudaReplay, OtherRowsIdsWeightsAndTokens_EachReplayMatchesFloat64) {
  for (const NumberForm& form : testing::number_forms()) {
    SCOPED_TRACE(form.name);
    for (const auto& [top_k, capacity] :
         {std::pair<int64_t, int64_t>{3, 8}, {3, 40}, {3, 300}, {1, 40}, {1, 900}}) {
      const MoeSpec spec = small_spec(form, top_k);
      DeviceLayer owned(spec, {.max_tokens = 900});
      const DType dtype = testing::row_dtype(form);
      Replayed replayed(owned, capacity, dtype);
      uint64_t seed = 20;
      for (const int64_t live : {capacity, int64_t{1}, capacity / 2, int64_t{0}, capacity + 7,
                                 int64_t{-3}, capacity - 1}) {
        SCOPED_TRACE(::testing::Message() << live << " of " << capacity << ", k " << top_k);
        ++seed;
        const Tensor hidden = random_tensor(dtype, capacity, spec.hidden_size, seed);
        const GivenRouting routing = hostile_routing(capacity, top_k, seed);
        const Tensor out = replayed.replay(hidden, routing, live);
        const int64_t count = std::clamp<int64_t>(live, 0, capacity);
        expect_untouched_from(out, count);
        if (count == 0) continue;
        // The capacity decides the rung.
        const StageCheck check =
            check_against_reference(owned.host, spec, *owned.source,
                                    {.hidden = first_rows(hidden, count).view(),
                                     .topk_ids = first_rows(routing, count).ids.view(),
                                     .topk_weights = first_rows(routing, count).weights.view(),
                                     .output = first_rows(out, count).view(),
                                     .code_ambiguity = testing::code_ambiguity(owned, capacity)});
        EXPECT_LE(check.worst_token_error, 6e-3);
        testing::note_error(spec, check.worst_token_error);
      }
    }
  }
}

// The graph also contains the gate and the router, and chunks.
TEST_F(CudaReplay, OtherRowsThroughTheGate_GiveTheBitsOfAPlainCall) {
  for (const NumberForm& form : testing::number_forms()) {
    SCOPED_TRACE(form.name);
    MoeSpec spec = small_spec(form);
    spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 128};
    DeviceLayer owned(spec, {.max_tokens = 100});
    const DType dtype = testing::row_dtype(form);
    for (const int64_t tokens : {5, 40, 230}) {
      DeviceForward captured(owned, random_tensor(dtype, tokens, 264, 1).view(), dtype);
      cudaStream_t const stream = to_cuda(owned.queue.stream());
      const cuda::OwnedGraph graph = cuda::capture(stream, [&] { captured.enqueue(); });
      for (uint64_t seed = 2; seed < 6; ++seed) {
        const Tensor hidden = random_tensor(dtype, tokens, 264, seed);
        DeviceForward plain(owned, hidden.view(), dtype);
        plain.enqueue();
        const Tensor expected = plain.out();
        owned.queue.upload(hidden.const_view(), captured.hidden().view());
        owned.queue.fill(captured.args.out, 0xFF);
        cuda::check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
        EXPECT_TRUE(testing::same_bits(captured.out(), expected)) << tokens;
      }
    }
  }
}

struct GraphDeleter {
  void operator()(cudaGraph_t graph) const noexcept { static_cast<void>(cudaGraphDestroy(graph)); }
};

// Identifies a kernel with its grid; the map counts how often a forward launches it.
using Launch = std::tuple<void*, unsigned, unsigned, unsigned>;
std::map<Launch, int> launches_of(DeviceForward& forward, cudaStream_t stream) {
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
              "cudaStreamBeginCapture");
  forward.enqueue();
  cudaGraph_t captured = nullptr;
  cuda::check(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
  const std::unique_ptr<CUgraph_st, GraphDeleter> graph(captured);
  size_t count = 0;
  cuda::check(cudaGraphGetNodes(graph.get(), nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  cuda::check(cudaGraphGetNodes(graph.get(), nodes.data(), &count), "cudaGraphGetNodes");
  std::map<Launch, int> launches;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    cuda::check(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams kernel = {};
    cuda::check(cudaGraphKernelNodeGetParams(node, &kernel), "cudaGraphKernelNodeGetParams");
    ++launches[{kernel.func, kernel.gridDim.x, kernel.gridDim.y, kernel.gridDim.z}];
  }
  return launches;
}

// With a plan for 100, 130 tokens are launched as 65 twice, not as 100 and a rest of 30.
TEST_F(CudaReplay, CallAboveThePlan_IsLaunchedAsEqualChunks) {
  const MoeSpec spec = make_spec(10, 3, 264, 136, DType::kBF16);
  DeviceLayer owned(spec, {.max_tokens = 100});
  cudaStream_t const stream = to_cuda(owned.queue.stream());
  const auto launches = [&](int64_t tokens) {
    DeviceForward forward(owned, random_tensor(DType::kBF16, tokens, 264, 1).view(), DType::kBF16);
    return launches_of(forward, stream);
  };
  std::map<Launch, int> twice = launches(65);
  EXPECT_FALSE(twice.empty());
  for (auto& [launch, count] : twice) count *= 2;
  EXPECT_EQ(launches(130), twice);
}

TEST_F(CudaReplay, OneLayerOnTwoStreams_ForwardsDoNotDisturbEachOther) {
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

// A layer's forwards of several sizes; each must have the bits that it has alone.
class Lane {
 public:
  Lane(const MoeSpec& spec, DType dtype, uint64_t seed)
      : owned_(spec, {.max_tokens = 300}, {}, seed) {
    for (const int64_t tokens : {1, 7, 40, 300}) {
      const Tensor hidden = random_tensor(dtype, tokens, spec.hidden_size, seed + 1);
      forwards_.push_back(std::make_unique<DeviceForward>(owned_, hidden.view(), dtype));
      forwards_.back()->enqueue();
      expected_.push_back(forwards_.back()->out());
    }
  }

  void enqueue() {
    for (const auto& forward : forwards_) {
      owned_.queue.fill(forward->args.out, 0xFF);
      forward->enqueue();
    }
  }
  // Counts the forwards whose output differs from what it was alone.
  int differing() {
    int count = 0;
    for (size_t i = 0; i < forwards_.size(); ++i) {
      count += testing::same_bits(forwards_[i]->out(), expected_[i]) ? 0 : 1;
    }
    return count;
  }

 private:
  DeviceLayer owned_;
  std::vector<std::unique_ptr<DeviceForward>> forwards_;
  std::vector<Tensor> expected_;
};

TEST_F(CudaReplay, FourLayersOnFourStreams_HaveTheBitsTheyHaveAlone) {
  std::vector<std::unique_ptr<Lane>> lanes;
  const std::vector<NumberForm> forms = testing::number_forms();
  const MoeSpec wide = testing::with_form(make_spec(16, 4, 520, 392, forms[0].dtype), forms[0]);
  lanes.push_back(std::make_unique<Lane>(wide, DType::kBF16, 3));
  lanes.push_back(std::make_unique<Lane>(small_spec(forms[1]), DType::kF16, 5));
  lanes.push_back(std::make_unique<Lane>(small_spec(forms[2]), DType::kBF16, 7));
  lanes.push_back(std::make_unique<Lane>(small_spec(forms[4]), DType::kBF16, 9));
  for (int round = 0; round < 100; ++round) {
    for (const auto& lane : lanes) lane->enqueue();
    for (size_t i = 0; i < lanes.size(); ++i) {
      ASSERT_EQ(lanes[i]->differing(), 0) << "layer " << i << " in round " << round;
    }
  }
}

}  // namespace
}  // namespace conclave
