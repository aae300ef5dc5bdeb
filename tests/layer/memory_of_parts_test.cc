// M1, M2 for layers with any parts: guard pages around every buffer, memory that starts as NaN.

#include "support/guarded_allocator.h"
#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

namespace conclave {
namespace {

using testing::GuardedAllocator;
using testing::GuardedBlock;
using testing::GuardSide;
using testing::make_layer;
using testing::OwnedLayer;
using testing::parts_text;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;
using testing::SpecDraw;

class MemoryOfParts : public ::testing::TestWithParam<uint32_t> {
 protected:
  MoeSpec spec() const { return SpecDraw(GetParam()).draw(); }
  std::string isa() const {
    const auto isas = testing::usable_isas();
    return isas[GetParam() % isas.size()];
  }
};

TEST_P(MemoryOfParts, PoisonAndHistory_DoNotChangeABit) {
  const MoeSpec drawn = spec();
  SCOPED_TRACE(parts_text(drawn));
  const OwnedLayer clean = make_layer(drawn, {.max_tokens = 16}, {.isa = isa()});
  GuardedAllocator allocator(GuardSide::kEnd, 0xFF);
  const OwnedLayer dirty =
      make_layer(drawn, {.max_tokens = 16}, {.isa = isa(), .host_allocator = &allocator});
  uint64_t seed = 1;
  for (const int64_t tokens : {1, 16, 3, 40, 0, 17, 2}) {
    const Tensor hidden = random_tensor(drawn.weight_dtype, tokens, drawn.hidden_size, seed++);
    EXPECT_TRUE(same_bits(run_layer(dirty.layer, hidden.view(), DType::kF32).out,
                          run_layer(clean.layer, hidden.view(), DType::kF32).out))
        << tokens;
  }
}

GuardedBlock guarded_copy(const Tensor& tensor, GuardSide side) {
  GuardedBlock block(tensor.size_bytes(), sizeof(float), side, 0xA5);
  std::memcpy(block.data(), tensor.as<std::byte>(), tensor.size_bytes());
  return block;
}

TEST_P(MemoryOfParts, EveryArgument_IsReadAndWrittenWithinItsBounds) {
  const MoeSpec drawn = spec();
  SCOPED_TRACE(parts_text(drawn));
  const Shape shape{23, drawn.hidden_size};
  const Tensor hidden = random_tensor(DType::kF32, 23, drawn.hidden_size, 1);
  const Tensor residual = random_tensor(DType::kF32, 23, drawn.hidden_size, 2);
  for (const GuardSide side : {GuardSide::kEnd, GuardSide::kBegin}) {
    GuardedAllocator allocator(side);
    {
      const OwnedLayer owned =
          make_layer(drawn, {.max_tokens = 10}, {.isa = isa(), .host_allocator = &allocator});
      const GuardedBlock in = guarded_copy(hidden, side);
      const GuardedBlock beside = guarded_copy(residual, side);
      const GuardedBlock out = guarded_copy(hidden, side);
      const GuardedBlock shared = guarded_copy(hidden, side);
      ForwardArgs args{.hidden = {in.data(), DType::kF32, shape, 0},
                       .out = {out.data(), DType::kF32, shape, 0}};
      if (drawn.residual.intermediate_size != 0) {
        args.residual_input = {beside.data(), DType::kF32, shape, 0};
      }
      if (drawn.shared.mode != SharedMode::kNone) {
        args.shared_out = {shared.data(), DType::kF32, shape, 0};
      }
      owned.layer.forward(args);
      EXPECT_EQ(std::memcmp(in.data(), hidden.as<std::byte>(), in.size()), 0);
      EXPECT_EQ(std::memcmp(beside.data(), residual.as<std::byte>(), beside.size()), 0);
      EXPECT_TRUE(out.gap_intact());
      EXPECT_TRUE(shared.gap_intact());
    }
    EXPECT_TRUE(allocator.gaps_intact());
    EXPECT_EQ(allocator.live_blocks(), 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(Draws, MemoryOfParts, ::testing::Range(400U, 440U));

}  // namespace
}  // namespace conclave
