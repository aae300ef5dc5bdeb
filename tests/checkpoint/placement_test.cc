// Reads every layout of a tensor back, element by element.
#include "checkpoint/placement.h"

#include "checkpoint/block_reader.h"

#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <vector>

namespace conclave::checkpoint {
namespace {

// Element i has the value i.
class Counting final : public TensorData {
 public:
  explicit Counting(int64_t elements) {
    for (int64_t i = 0; i < elements; ++i) values_.push_back(static_cast<uint16_t>(i));
  }
  void read(int32_t, uint64_t offset, std::span<std::byte> destination) const override {
    ASSERT_LE(offset + destination.size(), values_.size() * sizeof(uint16_t));
    std::memcpy(destination.data(), mapped(0).data() + offset, destination.size());
    read_bytes += destination.size();
  }
  std::span<const std::byte> mapped(int32_t) const override {
    return std::as_bytes(std::span(values_));
  }
  mutable size_t read_bytes = 0;

 private:
  std::vector<uint16_t> values_;
};

constexpr int64_t kExperts = 3, kRows = 5, kCols = 7;  // gate and up have kRows rows each

struct Layout {
  const char* name;
  RowOrder rows;
  AxisOrder axes;
};
constexpr Layout kLayouts[] = {
    {"Concatenated", RowOrder::kConcatenated, AxisOrder::kRowsFirst},
    {"Interleaved", RowOrder::kInterleaved, AxisOrder::kRowsFirst},
    {"Transposed", RowOrder::kConcatenated, AxisOrder::kColsFirst},
    {"TransposedInterleaved", RowOrder::kInterleaved, AxisOrder::kColsFirst},
};

// The position of element (row, col) of gate (part 0) or up (part 1), written out by hand.
int64_t expected_index(const Layout& layout, int64_t expert, int64_t part, int64_t row,
                       int64_t col) {
  const int64_t fused = layout.rows == RowOrder::kInterleaved ? 2 * row + part : part * kRows + row;
  const int64_t start = expert * 2 * kRows * kCols;
  return layout.axes == AxisOrder::kRowsFirst ? start + fused * kCols + col
                                              : start + col * 2 * kRows + fused;
}

class FusedLayout : public ::testing::TestWithParam<Layout> {};

INSTANTIATE_TEST_SUITE_P(Layouts, FusedLayout, ::testing::ValuesIn(kLayouts),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(FusedLayout, AnyBlock_HoldsTheRightElements) {
  const Counting data(kExperts * 2 * kRows * kCols);
  const TensorBlock block{.count = kExperts, .rows = 2 * kRows, .cols = kCols, .is_stack = true};
  const NamePattern pattern{"experts.gate_up_proj", Part::kGateUp, GetParam().rows};
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    for (int64_t part = 0; part < 2; ++part) {
      const MatrixLocation matrix =
          locate(block, pattern, GetParam().axes,
                 {.index = expert, .part = part, .parts = 2, .rows_before = part * kRows}, 0);
      for (const WeightBlock& cut : {WeightBlock{0, kRows, 0, kCols}, WeightBlock{1, 4, 2, 5},
                                     WeightBlock{2, 3, 0, kCols}, WeightBlock{0, kRows, 6, 7}}) {
        std::vector<uint16_t> found(
            static_cast<size_t>((cut.row_end - cut.row_begin) * (cut.col_end - cut.col_begin)));
        read_block(data, matrix, cut, sizeof(uint16_t), std::as_writable_bytes(std::span(found)));
        size_t i = 0;
        for (int64_t row = cut.row_begin; row < cut.row_end; ++row) {
          for (int64_t col = cut.col_begin; col < cut.col_end; ++col, ++i) {
            EXPECT_EQ(found[i], expected_index(GetParam(), expert, part, row, col))
                << "expert " << expert << " part " << part << " row " << row << " col " << col;
          }
        }
      }
    }
  }
}

TEST(Placement, InterleavedBiases_AreTakenApart) {
  const Counting data(kExperts * 2 * kRows);
  const TensorBlock block{
      .count = kExperts, .rows = 2 * kRows, .cols = 1, .is_stack = true, .is_vector = true};
  const NamePattern pattern{"b", Part::kGateUpBias, RowOrder::kInterleaved};
  const MatrixLocation up =
      locate(block, pattern, AxisOrder::kRowsFirst, {.index = 2, .part = 1, .parts = 2}, 0);
  std::vector<uint16_t> found(kRows);
  read_block(data, up, {0, 1, 0, kRows}, sizeof(uint16_t),
             std::as_writable_bytes(std::span(found)));
  EXPECT_EQ(found, (std::vector<uint16_t>{21, 23, 25, 27, 29}));
}

TEST(Placement, LargeTransposedInterleavedMatrix_IsReadInWindows) {
  // One expert of [H, 2 I] has 3 MiB: several windows, and nothing is read twice.
  constexpr int64_t kHidden = 512, kWide = 1536;
  const Counting data(kHidden * 2 * kWide);
  const TensorBlock block{.count = 1, .rows = 2 * kWide, .cols = kHidden, .is_stack = true};
  const NamePattern pattern{"g", Part::kGateUp, RowOrder::kInterleaved};
  const MatrixLocation up =
      locate(block, pattern, AxisOrder::kColsFirst, {.part = 1, .parts = 2}, 0);
  std::vector<uint16_t> found(kWide * kHidden);
  read_block(data, up, {0, kWide, 0, kHidden}, sizeof(uint16_t),
             std::as_writable_bytes(std::span(found)));
  for (int64_t row = 0; row < kWide; row += 101) {
    for (int64_t col = 0; col < kHidden; ++col) {
      ASSERT_EQ(found[static_cast<size_t>(row * kHidden + col)],
                static_cast<uint16_t>(col * 2 * kWide + 2 * row + 1));
    }
  }
  EXPECT_LE(data.read_bytes, sizeof(uint16_t) * kHidden * 2 * kWide);
}

TEST(Placement, Shapes_AreAcceptedInEveryUsualForm) {
  const NamePattern plain{"w", Part::kDown};
  const TensorBlock stack{.count = 4, .rows = 6, .cols = 3, .is_stack = true};
  const auto accepts = [&](std::vector<int64_t> shape, AxisOrder axes) {
    return fits(shape, stack, plain, axes);
  };
  EXPECT_TRUE(accepts({4, 6, 3}, AxisOrder::kRowsFirst));
  EXPECT_FALSE(accepts({24, 3}, AxisOrder::kRowsFirst));
  EXPECT_TRUE(accepts({4, 3, 6}, AxisOrder::kColsFirst));
  EXPECT_FALSE(accepts({12, 6}, AxisOrder::kColsFirst));
  EXPECT_FALSE(accepts({4, 3, 6}, AxisOrder::kRowsFirst));
  EXPECT_FALSE(accepts({5, 6, 3}, AxisOrder::kRowsFirst));
  EXPECT_FALSE(accepts({4, 18}, AxisOrder::kRowsFirst));
  const NamePattern merged{.text = "w", .part = Part::kDown, .experts = ExpertAxis::kMerged};
  EXPECT_TRUE(fits(std::vector<int64_t>{24, 3}, stack, merged, AxisOrder::kRowsFirst));
  EXPECT_TRUE(fits(std::vector<int64_t>{12, 6}, stack, merged, AxisOrder::kColsFirst));
  EXPECT_FALSE(fits(std::vector<int64_t>{4, 6, 3}, stack, merged, AxisOrder::kRowsFirst));

  TensorBlock with_zero_experts = stack;
  with_zero_experts.surplus = 2;
  EXPECT_TRUE(fits(std::vector<int64_t>{6, 6, 3}, with_zero_experts, plain, AxisOrder::kRowsFirst));

  const TensorBlock vector{.rows = 8, .cols = 1, .is_vector = true};
  const NamePattern bias{"b", Part::kSelectionBias};
  EXPECT_TRUE(fits(std::vector<int64_t>{8}, vector, bias, AxisOrder::kRowsFirst));
  EXPECT_TRUE(fits(std::vector<int64_t>{1, 8}, vector, bias, AxisOrder::kRowsFirst));
  EXPECT_FALSE(fits(std::vector<int64_t>{8, 1}, vector, bias, AxisOrder::kRowsFirst));
  EXPECT_FALSE(fits(std::vector<int64_t>{2, 8}, vector, bias, AxisOrder::kRowsFirst));
  NamePattern of_two = bias;
  of_two.rows_beside = 2;
  EXPECT_TRUE(fits(std::vector<int64_t>{2, 8}, vector, of_two, AxisOrder::kRowsFirst));
  const TensorBlock scalar{.rows = 1, .cols = 1, .is_vector = true};
  EXPECT_TRUE(fits(std::vector<int64_t>{}, scalar, bias, AxisOrder::kRowsFirst));
  EXPECT_TRUE(fits(std::vector<int64_t>{1}, scalar, bias, AxisOrder::kRowsFirst));
}

}  // namespace
}  // namespace conclave::checkpoint
