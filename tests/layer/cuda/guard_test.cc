// Runs whole layers on memory whose neighbours are unmapped, in workspaces full of garbage, and in
// long mixed sequences of calls.

#include "device_layer.h"
#include "support/allocation_counter.h"
#include "support/cuda/guard_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <cuda_runtime_api.h>
#include <memory>
#include <random>
#include <vector>

namespace conclave {
namespace {

using testing::DeviceForward;
using testing::DeviceLayer;
using testing::GivenRouting;
using testing::GuardPageAllocator;
using testing::GuardSide;
using testing::make_spec;
using testing::NumberForm;
using testing::random_tensor;
using testing::same_bits;

class CudaGuard : public testing::CudaLayerTest {};

// A tensor of exactly its own size, aligned only to `alignment`, next to a hole.
class GuardedTensor {
 public:
  GuardedTensor(GuardPageAllocator& allocator, const DeviceQueue& queue, const Tensor& values,
                size_t alignment)
      : allocator_(allocator),
        queue_(queue),
        values_(values.dtype(), values.shape()),
        data_(allocator.allocate(values.size_bytes(), alignment, {})) {
    std::memcpy(values_.as<std::byte>(), values.as<std::byte>(), values.size_bytes());
    queue.upload(values.view(), view());
  }
  GuardedTensor(const GuardedTensor&) = delete;
  GuardedTensor& operator=(const GuardedTensor&) = delete;
  ~GuardedTensor() { allocator_.deallocate(data_, values_.size_bytes(), {}); }

  TensorView view() const { return {data_, values_.dtype(), values_.shape(), 0}; }
  Tensor download() const {
    Tensor copy(values_.dtype(), values_.shape());
    queue_.download(view(), copy.view());
    return copy;
  }
  bool is_unchanged() const { return same_bits(download(), values_); }

 private:
  GuardPageAllocator& allocator_;
  const DeviceQueue& queue_;
  Tensor values_;
  void* data_;
};

// The source's matrices in the layout that the layer reads in place.
Tensor stacked(const WeightSource& source, const std::vector<WeightId>& roles) {
  const WeightInfo info = source.describe(roles.front());
  const auto halves = static_cast<int64_t>(roles.size());
  Tensor tensor(info.dtype, {info.count, halves * info.rows, info.cols});
  const auto bytes = static_cast<size_t>(info.rows * info.cols * byte_size(info.dtype));
  size_t at = 0;
  for (int64_t expert = 0; expert < info.count; ++expert) {
    for (const WeightId role : roles) {
      source.read(role, expert, {0, info.rows, 0, info.cols}, {tensor.as<std::byte>() + at, bytes});
      at += bytes;
    }
  }
  return tensor;
}

class GuardedCalls {
 public:
  GuardedCalls(GuardSide side, const NumberForm& form)
      : allocator_(side),
        form_(form),
        spec_(testing::with_form(make_spec(6, 2, 272, 144, form.dtype), form)),
        plain_(without_gate(spec_), {.max_tokens = 300}),
        context_({.device = "cuda:0", .num_threads = 1, .device_allocator = &allocator_}) {
    spec_.has_gate = false;
    const WeightSource& source = *plain_.source;
    gate_up_ = guard(stacked(source, {weights::kGate, weights::kUp}), 16);
    down_ = guard(stacked(source, {weights::kDown}), 16);
    ExpertWeights weights{.gate_up = gate_up_->view(), .down = down_->view()};
    weights.memory = MemoryKind::kDevice;
    if (form.dtype == DType::kF8E4M3) {
      gate_up_scale_ = guard(stacked(source, {weights::kGate.with(WeightPlane::kScale),
                                              weights::kUp.with(WeightPlane::kScale)}),
                             4);
      down_scale_ = guard(stacked(source, {weights::kDown.with(WeightPlane::kScale)}), 4);
      weights.gate_up_scale = gate_up_scale_->view();
      weights.down_scale = down_scale_->view();
    }
    const auto pointers = make_pointer_source(weights);
    layer_ = std::make_unique<MoeLayer>(
        MoeLayer::create(context_, spec_, *pointers, {.max_tokens = 300}));
    workspace_ = std::make_unique<Workspace>(context_, layer_->workspace_bytes());
  }

  // The bits must equal those of a layer on ordinary memory, and the inputs must stay unchanged.
  void check(int64_t tokens, DType dtype) {
    const Tensor hidden = random_tensor(dtype, tokens, spec_.hidden_size, 5);
    const GivenRouting routing = testing::random_routing(tokens, 6, 2, 9);
    DeviceForward forward(plain_, hidden.view(), dtype);
    forward.route_by(routing.ids, routing.weights);
    forward.enqueue();
    const Tensor expected = forward.out();

    const auto element = static_cast<size_t>(byte_size(dtype));
    const auto rows = guard(hidden, element);
    const auto ids = guard(routing.ids, 4);
    const auto weights = guard(routing.weights, 4);
    const auto out = guard(Tensor(dtype, {tokens, spec_.hidden_size}), element);
    layer_->forward({.hidden = rows->view(),
                     .topk_ids = ids->view(),
                     .topk_weights = weights->view(),
                     .out = out->view(),
                     .workspace = workspace_.get(),
                     .stream = plain_.queue.stream()});
    EXPECT_TRUE(same_bits(out->download(), expected));
    EXPECT_TRUE(rows->is_unchanged() && ids->is_unchanged() && weights->is_unchanged());
  }
  bool weights_unchanged() const { return gate_up_->is_unchanged() && down_->is_unchanged(); }

 private:
  static MoeSpec without_gate(MoeSpec spec) {
    spec.has_gate = false;
    return spec;
  }
  std::unique_ptr<GuardedTensor> guard(const Tensor& values, size_t alignment) {
    return std::make_unique<GuardedTensor>(allocator_, plain_.queue, values, alignment);
  }

  GuardPageAllocator allocator_;
  NumberForm form_;
  MoeSpec spec_;
  DeviceLayer plain_;
  Context context_;
  std::unique_ptr<GuardedTensor> gate_up_, down_, gate_up_scale_, down_scale_;
  std::unique_ptr<MoeLayer> layer_;
  std::unique_ptr<Workspace> workspace_;
};

TEST_F(CudaGuard, EveryTensorAgainstAHole_NothingFaultsOrChanges) {
  for (const GuardSide side : {GuardSide::kEnd, GuardSide::kBegin}) {
    for (const NumberForm& form : testing::number_forms()) {
      // Static rows have one step per tensor, which is not taken from device memory here.
      if (form.quant.activations == ActivationScale::kTensorStatic) continue;
      GuardedCalls calls(side, form);
      for (const int64_t tokens : {1, 5, 8, 9, 40, 130, 300}) {
        for (const DType dtype : {testing::row_dtype(form), DType::kF32}) {
          SCOPED_TRACE(::testing::Message()
                       << form.name << " T" << tokens << " " << to_string(dtype)
                       << (side == GuardSide::kEnd ? ", at the end" : ", at the begin"));
          calls.check(tokens, dtype);
          if (HasFailure()) return;
        }
      }
      EXPECT_TRUE(calls.weights_unchanged());
    }
  }
}

// The layer copies weights, router, shared expert and biases, and has its own workspace.
TEST_F(CudaGuard, LayersThatCopyTheirWeights_NothingFaults) {
  for (const GuardSide side : {GuardSide::kEnd, GuardSide::kBegin}) {
    GuardPageAllocator allocator(side);
    for (const NumberForm& form : testing::number_forms()) {
      MoeSpec spec = testing::with_form(make_spec(5, 3, 131, 67, form.dtype), form);
      spec.has_bias = true;
      spec.has_output_bias = true;
      spec.num_zero_experts = 2;
      spec.router.has_expert_scale = true;
      spec.router.has_selection_bias = true;
      spec.router.has_logit_bias = true;
      spec.router.input_norm.enabled = true;
      spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 77};
      DeviceLayer plain(spec, {.max_tokens = 100});
      const Context context({.device = "cuda:0", .num_threads = 1, .device_allocator = &allocator});
      const MoeLayer layer = MoeLayer::create(context, spec, *plain.source, {.max_tokens = 100});
      for (const int64_t tokens : {1, 9, 100, 130}) {
        SCOPED_TRACE(::testing::Message() << form.name << " T" << tokens);
        const Tensor hidden = random_tensor(testing::row_dtype(form), tokens, 131, 5);
        DeviceForward forward(plain, hidden.view(), testing::row_dtype(form));
        forward.enqueue();
        const Tensor expected = forward.out();
        forward.args.workspace = nullptr;
        layer.forward(forward.args);
        ASSERT_TRUE(same_bits(forward.out(), expected));
      }
    }
  }
}

// One workspace serves layers of every form and calls of every kind, either as the last call left
// it or full of garbage: the bits are those of a fresh process.
TEST_F(CudaGuard, LongMixedSequences_LeaveNothingBehind) {
  struct Call {
    std::unique_ptr<DeviceForward> forward;
    Tensor expected;
  };
  std::vector<std::unique_ptr<DeviceLayer>> layers;
  std::vector<Call> calls;
  size_t most_bytes = 0;
  for (const NumberForm& form : testing::number_forms()) {
    MoeSpec spec = testing::with_form(make_spec(7, 2, 200, 104, form.dtype), form);
    layers.push_back(std::make_unique<DeviceLayer>(spec, LayerOptions{.max_tokens = 64}));
    DeviceLayer& owned = *layers.back();
    most_bytes = std::max(most_bytes, owned.layer.workspace_bytes());
    const DType dtype = testing::row_dtype(form);
    for (const int64_t tokens : {1, 6, 17, 64, 150}) {
      const Tensor hidden = random_tensor(dtype, tokens, 200, static_cast<uint64_t>(tokens));
      for (const bool given : {false, true}) {
        auto forward = std::make_unique<DeviceForward>(owned, hidden.view(), dtype);
        const GivenRouting routing = testing::random_routing(tokens, 7, 2, 9);
        if (given) forward->route_by(routing.ids, routing.weights);
        Workspace fresh(owned.context, owned.layer.workspace_bytes());
        forward->args.workspace = &fresh;
        forward->enqueue();
        Tensor expected = forward->out();
        calls.push_back({std::move(forward), std::move(expected)});
      }
    }
  }
  const Context context({.device = "cuda:0", .num_threads = 1});
  const DeviceQueue queue(context);
  Workspace shared(context, most_bytes);
  const std::span<std::byte> behind_counters = shared.memory().subspan(256);
  std::mt19937 random(11);
  for (int step = 0; step < 2000; ++step) {
    Call& call = calls[random() % calls.size()];
    if (random() % 4 == 0) {
      queue.fill({.data = behind_counters.data(),
                  .dtype = DType::kU8,
                  .shape = {static_cast<int64_t>(behind_counters.size())}},
                 static_cast<uint8_t>(random()));
    }
    call.forward->args.workspace = &shared;
    call.forward->args.stream = queue.stream();
    queue.fill(call.forward->args.out, 0xFF);
    call.forward->enqueue();
    queue.synchronize();
    ASSERT_TRUE(same_bits(call.forward->out(), call.expected)) << "step " << step;
  }
}

// 10 000 forwards of random sizes: this thread does not call operator new (the driver's own threads
// do), the context allocates nothing, and the device keeps as much free memory as before.
TEST_F(CudaGuard, TenThousandForwards_AllocateNothing) {
  for (const size_t index : {size_t{0}, size_t{2}}) {
    const NumberForm form = testing::number_forms()[index];
    SCOPED_TRACE(form.name);
    const Context plain({.device = "cuda:0", .num_threads = 1});
    testing::CountingAllocator counter(*plain.device_allocator());
    const Context context({.device = "cuda:0", .num_threads = 1, .device_allocator = &counter});
    const MoeSpec spec = testing::with_form(make_spec(8, 2, 128, 64, form.dtype), form);
    const auto source = make_synthetic_source(spec, 3);
    const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 256});
    Workspace workspace(context, layer.workspace_bytes());
    const DeviceQueue queue(context);
    const DeviceTensor rows =
        queue.upload(random_tensor(testing::row_dtype(form), 300, 128, 5).view());
    DeviceTensor out = queue.allocate(testing::row_dtype(form), {300, 128});
    std::mt19937 random(5);
    const auto forward = [&](int64_t tokens) {
      ConstTensorView hidden = rows.const_view();
      TensorView result = out.view();
      hidden.shape = {tokens, 128};
      result.shape = {tokens, 128};
      layer.forward(
          {.hidden = hidden, .out = result, .workspace = &workspace, .stream = queue.stream()});
    };
    for (int64_t tokens = 0; tokens <= 300; ++tokens) forward(tokens);
    queue.synchronize();
    const int64_t calls_before = counter.calls;
    size_t free_before = 0;
    size_t free_after = 0;
    size_t total = 0;
    ASSERT_EQ(cudaMemGetInfo(&free_before, &total), cudaSuccess);
    testing::arm_allocation_counter();
    for (int step = 0; step < 10000; ++step) forward(static_cast<int64_t>(random() % 301));
    const testing::AllocationCounts counts = testing::disarm_allocation_counter();
    queue.synchronize();
    ASSERT_EQ(cudaMemGetInfo(&free_after, &total), cudaSuccess);
    EXPECT_EQ(counts.own_heap, 0);
    EXPECT_EQ(counter.calls, calls_before);
    EXPECT_EQ(free_after, free_before);
  }
}

// Bytes of the workspace that a call writes: those that keep neither of two fillings.
int64_t bytes_written(DeviceLayer& owned, DeviceForward& forward) {
  const std::span<std::byte> memory = owned.workspace.memory();
  const TensorView all{
      .data = memory.data(), .dtype = DType::kU8, .shape = {static_cast<int64_t>(memory.size())}};
  std::vector<uint8_t> touched(memory.size(), 0);
  Tensor bytes(DType::kU8, {static_cast<int64_t>(memory.size())});
  for (const uint8_t filling : {uint8_t{0xFF}, uint8_t{0x5A}}) {
    TensorView rest = all;
    rest.data = memory.data() + 256;
    rest.shape = {static_cast<int64_t>(memory.size()) - 256};
    owned.queue.fill(rest, filling);
    forward.enqueue();
    owned.queue.download(all, bytes.view());
    for (size_t i = 256; i < memory.size(); ++i) {
      if (bytes.as<uint8_t>()[i] != filling) touched[i] = 1;
    }
  }
  return std::count(touched.begin(), touched.end(), uint8_t{1});
}

// Uses the maximum of tokens on the routing that fills most, with rows that must be converted and
// an output that no kernel of experts writes itself.
TEST_F(CudaGuard, Workspace_IsAtMostAQuarterMoreThanWhatIsWritten) {
  struct Size {
    int64_t experts, top_k, hidden, inner, tokens;
  };
  double worst = 0;
  for (const NumberForm& form : testing::number_forms()) {
    for (const Size& size : {Size{16, 4, 512, 256, 512}, Size{8, 2, 256, 512, 700},
                             Size{32, 8, 512, 128, 300}, Size{8, 1, 512, 512, 1000}}) {
      const MoeSpec spec = testing::with_form(
          make_spec(size.experts, size.top_k, size.hidden, size.inner, form.dtype), form);
      DeviceLayer owned(spec, {.max_tokens = size.tokens});
      const Tensor hidden = random_tensor(DType::kF32, size.tokens, size.hidden, 5);
      DeviceForward forward(owned, hidden.view(), DType::kF32);
      const int64_t written = bytes_written(owned, forward);
      const double ratio =
          static_cast<double>(owned.layer.plan().workspace_bytes) / static_cast<double>(written);
      EXPECT_LE(ratio, 1.25) << form.name << " E" << size.experts << " k" << size.top_k << " T"
                             << size.tokens << ": " << written << " bytes written";
      EXPECT_EQ(owned.layer.workspace_bytes(), owned.layer.plan().workspace_bytes);
      worst = std::max(worst, ratio);
    }
  }
  RecordProperty("booked over written", std::to_string(worst));
}

}  // namespace
}  // namespace conclave
