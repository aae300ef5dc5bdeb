// M1, M2, M5, M6: guard pages, dirty memory, the workspace bound, and failing allocations.

#include "support/guarded_allocator.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::GuardedAllocator;
using testing::GuardedBlock;
using testing::GuardSide;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

MoeSpec spec_of(DType dtype, int64_t hidden, int64_t intermediate) {
  MoeSpec spec = make_spec(5, 2, hidden, intermediate, dtype);
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 17};
  return spec;
}

// A copy of a tensor's bytes next to a guard page.
GuardedBlock guarded_copy(const Tensor& tensor, GuardSide side) {
  const auto alignment = static_cast<size_t>(std::max<int64_t>(bit_size(tensor.dtype()) / 8, 1));
  GuardedBlock block(tensor.size_bytes(), alignment, side, 0xA5);
  std::memcpy(block.data(), tensor.as<std::byte>(), tensor.size_bytes());
  return block;
}

class GuardPages : public ::testing::TestWithParam<std::tuple<std::string, GuardSide>> {};

TEST_P(GuardPages, EveryBuffer_IsReadAndWrittenWithinItsBounds) {
  const auto& [isa, side] = GetParam();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const auto& [hidden_size, inner] :
         {std::pair<int64_t, int64_t>{64, 32}, {33, 31}, {65, 63}, {1, 1}}) {
      const MoeSpec spec = spec_of(dtype, hidden_size, inner);
      const Tensor hidden = random_tensor(dtype, 23, hidden_size, 1);
      const OwnedLayer plain = make_layer(spec, {.max_tokens = 10}, {.isa = isa});
      const auto expected = run_layer(plain.layer, hidden.view(), dtype);

      GuardedAllocator allocator(side);
      {
        const OwnedLayer guarded =
            make_layer(spec, {.max_tokens = 10}, {.isa = isa, .host_allocator = &allocator});
        const GuardedBlock in = guarded_copy(hidden, side);
        const GuardedBlock out = guarded_copy(Tensor(dtype, {23, hidden_size}), side);
        guarded.layer.forward({.hidden = {in.data(), dtype, {23, hidden_size}, 0},
                               .out = {out.data(), dtype, {23, hidden_size}, 0}});
        EXPECT_EQ(std::memcmp(out.data(), expected.out.as<std::byte>(), out.size()), 0);
        EXPECT_EQ(std::memcmp(in.data(), hidden.as<std::byte>(), in.size()), 0);
        EXPECT_TRUE(out.gap_intact());
      }
      EXPECT_TRUE(allocator.gaps_intact());
      EXPECT_EQ(allocator.live_blocks(), 0U);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryRow, GuardPages,
                         ::testing::Combine(::testing::ValuesIn(testing::usable_isas()),
                                            ::testing::Values(GuardSide::kEnd, GuardSide::kBegin)),
                         [](const auto& row) {
                           return std::get<0>(row.param) +
                                  (std::get<1>(row.param) == GuardSide::kEnd ? "_end" : "_begin");
                         });

class DirtyMemory : public ::testing::TestWithParam<std::string> {};

// Packed weights and workspace start as NaN bytes, and calls of many sizes follow each other.
TEST_P(DirtyMemory, PoisonAndHistory_DoNotChangeABit) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const MoeSpec spec = spec_of(dtype, 43, 35);
    const OwnedLayer clean = make_layer(spec, {.max_tokens = 16}, {.isa = GetParam()});
    GuardedAllocator allocator(GuardSide::kEnd, 0xFF);
    const OwnedLayer dirty =
        make_layer(spec, {.max_tokens = 16}, {.isa = GetParam(), .host_allocator = &allocator});
    uint64_t seed = 1;
    for (const int64_t tokens : {1, 16, 3, 40, 2, 0, 17, 1}) {
      const Tensor hidden = random_tensor(dtype, tokens, 43, seed++);
      EXPECT_TRUE(same_bits(run_layer(dirty.layer, hidden.view(), dtype).out,
                            run_layer(clean.layer, hidden.view(), dtype).out))
          << tokens;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryRow, DirtyMemory, ::testing::ValuesIn(testing::usable_isas()),
                         [](const auto& row) { return row.param; });

// Bytes of a workspace that one forward really writes, in cache lines.
size_t touched_bytes(const MoeLayer& layer, const ForwardArgs& args) {
  constexpr size_t kLine = 64;
  size_t touched = 0;
  // Two fills are used: a line that equals one of them by chance differs from the other.
  std::vector<bool> hit(layer.workspace_bytes() / kLine + 1, false);
  for (const uint8_t fill : {uint8_t{0x5A}, uint8_t{0xA5}}) {
    GuardedBlock memory(layer.workspace_bytes(), kLine, GuardSide::kEnd, fill);
    Workspace workspace(std::span(memory.data(), memory.size()));
    ForwardArgs with_workspace = args;
    with_workspace.workspace = &workspace;
    layer.forward(with_workspace);
    for (size_t i = 0; i < memory.size(); ++i) {
      if (memory.data()[i] != std::byte{fill}) hit[i / kLine] = true;
    }
  }
  for (const bool line : hit) touched += line ? kLine : 0;
  return touched;
}

// The worst routing gives every token k different experts: duplicates of one expert share a row.
TEST(WorkspaceBound, WorstRouting_UsesMostOfIt) {
  const int64_t tokens = 256;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t experts : {int64_t{4}, int64_t{16}}) {
      const OwnedLayer owned =
          make_layer(make_spec(experts, 4, 192, 128, dtype), {.max_tokens = tokens});
      const Tensor hidden = random_tensor(DType::kBF16, tokens, 192, 1);
      Tensor ids(DType::kI32, {tokens, 4});
      Tensor weights(DType::kF32, {tokens, 4});
      Tensor out(DType::kBF16, {tokens, 192});
      for (int64_t i = 0; i < tokens * 4; ++i) {
        ids.as<int32_t>()[i] = static_cast<int32_t>(i % experts);
        weights.as<float>()[i] = 0.25F;
      }
      const size_t touched = touched_bytes(owned.layer, {.hidden = hidden.view(),
                                                         .topk_ids = ids.view(),
                                                         .topk_weights = weights.view(),
                                                         .out = out.view()});
      const double ratio =
          static_cast<double>(owned.layer.workspace_bytes()) / static_cast<double>(touched);
      RecordProperty("bound_over_peak", std::to_string(ratio));
      EXPECT_LE(ratio, 1.25) << owned.layer.workspace_bytes() << " booked, " << touched
                             << " touched";
    }
  }
}

// The k-th allocation fails, for every k, in create and forward.
class FailingAllocator final : public HostAllocator {
 public:
  explicit FailingAllocator(int64_t fail_at) : fail_at_(fail_at) {}
  void* allocate(size_t bytes, size_t alignment) override {
    if (count_++ == fail_at_) return nullptr;
    ++live_;
    return ::operator new(bytes, std::align_val_t(alignment));
  }
  void deallocate(void* data, size_t) noexcept override {
    --live_;
    ::operator delete(data, std::align_val_t(64));
  }
  int64_t live() const { return live_; }
  bool failed() const { return count_ > fail_at_; }

 private:
  std::atomic<int64_t> fail_at_;
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> live_{0};
};

TEST(AllocationFailure, EveryHookedAllocation_GivesATypedErrorAndNoLeak) {
  const MoeSpec spec = spec_of(DType::kBF16, 64, 32);
  const Tensor hidden = random_tensor(DType::kBF16, 5, 64, 1);
  bool survived = false;
  int64_t points = 0;
  for (int64_t fail_at = 0; !survived; ++fail_at) {
    ASSERT_LT(fail_at, 100);
    FailingAllocator allocator(fail_at);
    const ErrorCode code = code_of([&] {
      const OwnedLayer owned = make_layer(spec, {}, {.host_allocator = &allocator});
      Tensor out(DType::kBF16, {5, 64});
      const ForwardArgs args{.hidden = hidden.view(), .out = out.view()};
      try {
        owned.layer.forward(args);
      } catch (const Error&) {
        // The layer survives a failed forward: the next one has memory.
        owned.layer.forward(args);
        throw;
      }
    });
    survived = !allocator.failed();
    if (!survived) {
      EXPECT_EQ(code, ErrorCode::kOutOfMemory) << "allocation " << fail_at;
      ++points;
    }
    EXPECT_EQ(allocator.live(), 0) << "allocation " << fail_at;
  }
  EXPECT_GE(points, 6) << "four slabs, two gates, a workspace at least";
}

}  // namespace
}  // namespace conclave
