// Tests weights used in place, reloads, and workspaces full of garbage.

#include "device_layer.h"

#include <gtest/gtest.h>

namespace conclave {
namespace {

using testing::code_of;
using testing::CudaLayerTest;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::make_spec;
using testing::random_tensor;

class CudaMemory : public CudaLayerTest {};

// The layer's weights as a framework would hold them: two tensors in device memory.
struct FrameworkWeights {
  FrameworkWeights(const DeviceQueue& queue, const MoeSpec& spec, const WeightSource& source) {
    const int64_t experts = spec.num_experts;
    const int64_t inner = spec.intermediate_size;
    const int64_t hidden = spec.hidden_size;
    Tensor host_gate_up(spec.weight_dtype, {experts, 2 * inner, hidden});
    Tensor host_down(spec.weight_dtype, {experts, hidden, inner});
    const auto bytes = static_cast<size_t>(inner * hidden * byte_size(spec.weight_dtype));
    for (int64_t expert = 0; expert < experts; ++expert) {
      std::byte* const gate =
          host_gate_up.as<std::byte>() + static_cast<size_t>(expert) * 2 * bytes;
      source.read(weights::kGate, expert, {0, inner, 0, hidden}, {gate, bytes});
      source.read(weights::kUp, expert, {0, inner, 0, hidden}, {gate + bytes, bytes});
      source.read(weights::kDown, expert, {0, hidden, 0, inner},
                  {host_down.as<std::byte>() + static_cast<size_t>(expert) * bytes, bytes});
    }
    gate_up = queue.upload(host_gate_up.const_view());
    down = queue.upload(host_down.const_view());
  }
  std::unique_ptr<WeightSource> source() const {
    return make_pointer_source({.gate_up = gate_up.const_view(),
                                .down = down.const_view(),
                                .memory = MemoryKind::kDevice});
  }
  DeviceTensor gate_up, down;
};

TEST_F(CudaMemory, FrameworkTensors_AreUsedWithoutACopy) {
  MoeSpec spec = make_spec(8, 2, 256, 128, DType::kBF16);
  spec.has_gate = false;
  DeviceLayer copied(spec, {.max_tokens = 64});
  const FrameworkWeights weights(copied.queue, spec, *copied.source);
  const auto source = weights.source();
  testing::CountingAllocator counter(*copied.context.device_allocator());
  const Context context({.device = "cuda:0", .num_threads = 1, .device_allocator = &counter});
  MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 64});
  // It allocates only the counters.
  EXPECT_EQ(counter.calls, 1);
  for (const int64_t tokens : {3, 40}) {
    const Tensor hidden = random_tensor(DType::kBF16, tokens, 256, 5);
    const testing::GivenRouting routing = testing::random_routing(tokens, 8, 2, 9);
    DeviceForward forward(copied, hidden.view(), DType::kBF16);
    forward.route_by(routing.ids, routing.weights);
    forward.enqueue();
    const Tensor expected = forward.out();
    layer.forward(forward.args);
    EXPECT_TRUE(testing::same_bits(forward.out(), expected));
  }
  EXPECT_EQ(code_of([&] { layer.reload(*copied.source, ReloadMode::kInPlace); }),
            ErrorCode::kState);
  EXPECT_EQ(code_of([&] {
              const auto again = MoeLayer::create(copied.host, spec, *source, {.max_tokens = 64});
            }),
            ErrorCode::kDevice);
}

// Fails at one call, and knows which blocks have not been given back.
class FailingAllocator final : public DeviceAllocator {
 public:
  FailingAllocator(DeviceAllocator& inner, int64_t failing_call)
      : inner_(inner), failing_call_(failing_call) {}
  void* allocate(size_t bytes, size_t alignment, Stream stream) override {
    if (calls++ == failing_call_) return nullptr;
    ++outstanding;
    return inner_.allocate(bytes, alignment, stream);
  }
  void deallocate(void* data, size_t bytes, Stream stream) noexcept override {
    --outstanding;
    inner_.deallocate(data, bytes, stream);
  }
  int64_t calls = 0;
  int64_t outstanding = 0;

 private:
  DeviceAllocator& inner_;
  int64_t failing_call_;
};

// Weights that bf16 holds take what their file does: half a byte a code, and a byte a scale.
TEST_F(CudaMemory, CodesWithScalesOfAByte_TakeTheMemoryOfTheirFile) {
  for (const auto& [columns, values] :
       {std::pair{32, ScaleValues::kPowerOfTwo}, std::pair{16, ScaleValues::kFloat8}}) {
    MoeSpec spec = make_spec(8, 2, 2048, 1024, DType::kF4);
    spec.has_gate = false;
    spec.quant = {.weights = WeightScale::kBlock,
                  .block_rows = 1,
                  .block_cols = columns,
                  .scale_values = values,
                  .has_global_scale = values == ScaleValues::kFloat8};
    const auto source = make_synthetic_source(spec, 3);
    const Context device({.device = "cuda:0", .num_threads = 1});
    testing::CountingAllocator counter(*device.device_allocator());
    const Context context({.device = "cuda:0", .num_threads = 1, .device_allocator = &counter});
    const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 64});
    const int64_t weights = int64_t{3} * 8 * 2048 * 1024;
    const int64_t stored = weights / 2 + weights / columns;
    EXPECT_LE(counter.all_bytes, stored + stored / 50);
  }
}

TEST_F(CudaMemory, EachAllocationThatFails_IsATypedErrorAndLeaksNothing) {
  const Context plain({.device = "cuda:0", .num_threads = 1});
  MoeSpec spec = make_spec(8, 2, 256, 128, DType::kF8E4M3);
  spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  spec.has_bias = true;
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 128};
  const auto source = make_synthetic_source(spec, 3);
  int64_t points = 0;
  for (bool failed = true; failed; ++points) {
    FailingAllocator allocator(*plain.device_allocator(), points);
    const Context context({.device = "cuda:0", .num_threads = 1, .device_allocator = &allocator});
    const ErrorCode code = code_of([&] {
      const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 64});
      const Workspace workspace(context, layer.workspace_bytes());
    });
    failed = allocator.calls > points;
    EXPECT_EQ(code, failed ? ErrorCode::kOutOfMemory : ErrorCode{0}) << "allocation " << points;
    EXPECT_EQ(allocator.outstanding, 0) << "allocation " << points;
  }
  EXPECT_GT(points, 8);
}

TEST_F(CudaMemory, Reload_BringsTheNewWeights) {
  const MoeSpec spec = make_spec(8, 2, 128, 64, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, 40, 128, 5);
  DeviceLayer other(spec, {.max_tokens = 64}, {}, 99);
  DeviceForward wanted(other, hidden.view(), DType::kBF16);
  wanted.enqueue();
  const Tensor expected = wanted.out();
  for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
    DeviceLayer owned(spec, {.max_tokens = 64});
    owned.layer.reload(*other.source, mode);
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    forward.enqueue();
    EXPECT_TRUE(testing::same_bits(forward.out(), expected));
  }
}

TEST_F(CudaMemory, PoisonedWorkspace_ChangesNothing) {
  MoeSpec spec = make_spec(8, 2, 128, 64, DType::kBF16);
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 96};
  for (const bool with_shared : {false, true}) {
    if (!with_shared) spec.shared = {};
    DeviceLayer owned(spec, {.max_tokens = 64});
    for (const int64_t tokens : {3, 40}) {
      const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 5);
      DeviceForward forward(owned, hidden.view(), DType::kBF16);
      forward.enqueue();
      const Tensor expected = forward.out();
      // Fills all but the counters at its head, which belong to the workspace.
      const std::span<std::byte> memory = owned.workspace.memory().subspan(256);
      for (const uint8_t poison : {uint8_t{0xFF}, uint8_t{0x7F}, uint8_t{0}}) {
        owned.queue.fill({.data = memory.data(),
                          .dtype = DType::kU8,
                          .shape = {static_cast<int64_t>(memory.size())}},
                         poison);
        forward.enqueue();
        EXPECT_TRUE(testing::same_bits(forward.out(), expected)) << tokens << " " << int{poison};
      }
    }
  }
}

}  // namespace
}  // namespace conclave
