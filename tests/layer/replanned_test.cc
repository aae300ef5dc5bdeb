// MoeLayer::with_max_tokens makes another plan on weights that are already packed.

#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace conclave {
namespace {

using testing::code_of;
using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

// Covers every stage that books scratch memory by the number of tokens.
MoeSpec spec_of() {
  MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 16};
  spec.latent = {.size = 28, .has_norm = true};
  spec.residual = {.intermediate_size = 12};
  return spec;
}

// Counts the bytes that are allocated.
class CountingAllocator final : public HostAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    live += bytes;
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  void deallocate(void* data, size_t bytes) noexcept override {
    live -= bytes;
    std::free(data);
  }
  size_t live = 0;
};

class Replanned : public ::testing::Test {
 protected:
  Replanned() : context_({.num_threads = 2, .host_allocator = &allocator_}) {
    const auto source = make_synthetic_source(spec_of(), 11);
    layer_.emplace(MoeLayer::create(context_, spec_of(), *source, {.max_tokens = 4}));
  }

  // Uses a workspace that the test counts separately.
  Tensor run(const MoeLayer& layer, const Tensor& hidden) {
    Workspace workspace(context_, layer.workspace_bytes(hidden.shape()[0]));
    return run_layer(layer, hidden.view(), DType::kF32, {.workspace = &workspace}).out;
  }

  CountingAllocator allocator_;
  Context context_;
  std::optional<MoeLayer> layer_;
};

TEST_F(Replanned, EveryNumberOfTokens_HasTheBitsOfTheFirstPlan) {
  const size_t packed = allocator_.live;
  ASSERT_GT(packed, size_t{0});
  for (const int64_t most : {1, 3, 64, 1000}) {
    const MoeLayer other = layer_->with_max_tokens(most);
    EXPECT_EQ(allocator_.live, packed) << "weights were packed again";
    EXPECT_EQ(other.plan().max_tokens, most);
    EXPECT_EQ(layer_->plan().max_tokens, 4);
    EXPECT_EQ(other.workspace_bytes() > layer_->workspace_bytes(), most > 4);
    for (const int64_t tokens : {0, 1, 4, 5, 37}) {
      const Tensor hidden = random_tensor(DType::kBF16, tokens, 40, 3);
      EXPECT_TRUE(same_bits(run(*layer_, hidden), run(other, hidden)))
          << most << " planned, " << tokens << " tokens";
    }
  }
}

TEST_F(Replanned, Weights_LiveAsLongAsTheLastLayer) {
  const Tensor hidden = random_tensor(DType::kBF16, 9, 40, 3);
  const Tensor expected = run_layer(*layer_, hidden.view(), DType::kF32).out;
  std::optional<MoeLayer> other(layer_->with_max_tokens(16));
  layer_.reset();
  EXPECT_TRUE(same_bits(run_layer(*other, hidden.view(), DType::kF32).out, expected));
  const MoeLayer third = other->with_max_tokens(2);
  other.reset();
  EXPECT_TRUE(same_bits(run_layer(third, hidden.view(), DType::kF32).out, expected));
}

TEST_F(Replanned, Reload_OfOneIsOfAll) {
  const MoeLayer other = layer_->with_max_tokens(16);
  const Tensor hidden = random_tensor(DType::kBF16, 9, 40, 3);
  for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
    const uint64_t seed = mode == ReloadMode::kStaged ? 2 : 5;
    const Tensor before = run_layer(other, hidden.view(), DType::kF32).out;
    layer_->reload(*make_synthetic_source(spec_of(), seed), mode);
    const auto fresh = testing::make_layer(spec_of(), {}, {}, seed);
    const Tensor expected = run_layer(fresh.layer, hidden.view(), DType::kF32).out;
    ASSERT_FALSE(same_bits(before, expected));
    EXPECT_TRUE(same_bits(run_layer(*layer_, hidden.view(), DType::kF32).out, expected));
    EXPECT_TRUE(same_bits(run_layer(other, hidden.view(), DType::kF32).out, expected));
  }
}

TEST_F(Replanned, Status_CountsTheForwardsOfAll) {
  const MoeLayer other = layer_->with_max_tokens(16);
  const Tensor hidden = random_tensor(DType::kBF16, 9, 40, 3);
  run_layer(*layer_, hidden.view(), DType::kF32);
  run_layer(other, hidden.view(), DType::kF32);
  EXPECT_EQ(layer_->status().forwards, 2);
  EXPECT_EQ(other.status().tokens, 18);
}

TEST_F(Replanned, NumberOutOfRange_IsRefused) {
  for (const int64_t most : {int64_t{0}, int64_t{-1}, int64_t{1} << 41}) {
    EXPECT_EQ(code_of([&] { static_cast<void>(layer_->with_max_tokens(most)); }),
              ErrorCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace conclave
