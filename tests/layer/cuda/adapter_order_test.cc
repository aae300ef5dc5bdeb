// Factors of adapters in the order of weights whose columns have one. Needs no GPU.
#include "layer/cuda/adapter_order.h"

#include "core/row_stride.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace conclave {
namespace {

using experts::ExpertAdapter;
using testing::random_tensor;

float at(const ConstTensorView& view, int64_t row, int64_t column) {
  return static_cast<const float*>(view.data)[row * row_stride(view) + column];
}

TEST(AdapterOrder, RowsOfBAndColumnsOfA_GoWhereTheWeightsHaveTheirs) {
  constexpr int64_t kInner = 5;
  const Tensor a = random_tensor(DType::kF32, 3, 8, 1);
  const Tensor b = random_tensor(DType::kF32, 4, 3, 2);
  const Tensor down_a = random_tensor(DType::kF32, 2, 6, 3);
  const Tensor down_b = random_tensor(DType::kF32, 8, 2, 4);
  // Four columns of six, as a slice of them has.
  const ConstTensorView slice{
      .data = down_a.as<float>() + 1, .dtype = DType::kF32, .shape = {2, 4}, .row_stride = 6};
  const AdapterPart part{
      .shape = {.hidden_size = 8, .intermediate_size = 4},
      .experts = {ExpertAdapter{.gate = {.a = a.const_view(), .b = b.const_view(), .scale = 2},
                                .up = {.a = a.const_view(), .b = b.const_view()}},
                  ExpertAdapter{},
                  ExpertAdapter{.down = {.a = slice, .b = down_b.const_view(), .scale = 3}}}};
  // Five places of each expert.
  const std::vector<int32_t> columns = {2, 0, -1, 3, 1, -1, 0, 1, 2, 3, 3, 1, 0, 2, -1};
  const OrderedPart ordered = order_factors(part, columns, kInner);
  EXPECT_EQ(ordered.part.shape.intermediate_size, kInner);
  EXPECT_EQ(ordered.part.shape.hidden_size, 8);
  const ExpertAdapter& first = ordered.part.experts[0];
  const ExpertAdapter& last = ordered.part.experts[2];
  EXPECT_TRUE(ordered.part.experts[1].up.empty());
  EXPECT_TRUE(first.down.empty());
  // Matrices that meet rows and outputs of the layer stay where they were.
  EXPECT_EQ(first.gate.a.data, a.view().data);
  EXPECT_EQ(first.up.a.data, a.view().data);
  EXPECT_EQ(last.down.b.data, down_b.view().data);
  EXPECT_EQ(first.gate.scale, 2);
  EXPECT_EQ(last.down.scale, 3);
  for (const experts::MatrixFactors* factors : {&first.gate, &first.up}) {
    ASSERT_EQ(factors->b.shape, (Shape{kInner, 3}));
    for (int64_t place = 0; place < kInner; ++place) {
      const int32_t row = columns[static_cast<size_t>(place)];
      for (int64_t term = 0; term < 3; ++term) {
        EXPECT_EQ(at(factors->b, place, term), row < 0 ? 0 : at(b.const_view(), row, term));
      }
    }
  }
  ASSERT_EQ(last.down.a.shape, (Shape{2, kInner}));
  for (int64_t place = 0; place < kInner; ++place) {
    const int32_t column = columns[static_cast<size_t>(2 * kInner + place)];
    for (int64_t term = 0; term < 2; ++term) {
      EXPECT_EQ(at(last.down.a, term, place), column < 0 ? 0 : at(slice, term, column));
    }
  }
}

TEST(AdapterOrder, APartWithoutExperts_StaysEmpty) {
  const OrderedPart ordered = order_factors({.shape = {}, .experts = {}}, {}, 16);
  EXPECT_TRUE(ordered.part.experts.empty());
  EXPECT_TRUE(ordered.memory.empty());
}

}  // namespace
}  // namespace conclave
