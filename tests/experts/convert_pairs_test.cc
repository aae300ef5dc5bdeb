// Every pair of row types, plain and weighted, in rows shorter than, equal to and longer than the
// block that the weighted conversion works in.
#include "core/float_convert.h"
#include "experts/quantize_rows.h"
#include "support/executors.h"
#include "support/guarded.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

constexpr int64_t kRows = 3;
constexpr std::array<float, kRows> kWeights = {0.7310586F, -1.5F, 1.0F / 3};

void store(DType dtype, float value, std::byte* at) {
  if (dtype == DType::kF32) {
    std::memcpy(at, &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
  std::memcpy(at, &bits, sizeof(bits));
}

float load(DType dtype, const std::byte* at) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  return dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

float rounded(DType dtype, float value) {
  std::array<std::byte, sizeof(float)> bytes{};
  store(dtype, value, bytes.data());
  return load(dtype, bytes.data());
}

struct Pair {
  DType from;
  DType to;
  int64_t columns;
  int64_t gap;  // between rows
};
std::string text(const Pair& pair) {
  return std::string(to_string(pair.from)) + " to " + std::string(to_string(pair.to)) + ", " +
         std::to_string(pair.columns) + " columns, gap " + std::to_string(pair.gap);
}

std::vector<Pair> every_pair() {
  std::vector<Pair> pairs;
  for (const DType from : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType to : {DType::kF32, DType::kBF16}) {
      for (const int64_t columns : {1, 255, 256, 257, 512, 513, 600}) {
        for (const int64_t gap : {0, 9}) pairs.push_back({from, to, columns, gap});
      }
    }
  }
  return pairs;
}

// Runs the conversion between guard pages; `weights` is null for the plain one.
void expect_exact(const Pair& pair, const float* weights) {
  const int64_t stride = pair.columns + pair.gap;
  const int64_t size = byte_size(pair.from);
  const GuardedBuffer source(static_cast<size_t>(((kRows - 1) * stride + pair.columns) * size),
                             GuardSide::kEnd, 0xff);
  std::mt19937 random(static_cast<uint32_t>(pair.columns));
  std::normal_distribution<float> normal;
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t col = 0; col < pair.columns; ++col) {
      store(pair.from, normal(random), source.data() + (row * stride + col) * size);
    }
  }
  const int64_t row_bytes = (pair.columns * byte_size(pair.to) + 63) / 64 * 64;
  const GuardedBuffer out(static_cast<size_t>(kRows * row_bytes), GuardSide::kEnd, 0xff);
  const ConstTensorView view{source.data(), pair.from, Shape{kRows, pair.columns}, stride};
  SerialExecutor executor(2);
  const RowBundle bundle =
      weights == nullptr ? experts::quantize_rows(view, pair.to, row_bytes, out.data(), executor)
                         : experts::quantize_weighted_rows(view, weights, 1, pair.to, row_bytes,
                                                           out.data(), executor);
  EXPECT_EQ(bundle.dtype, pair.to);
  EXPECT_EQ(bundle.row_bytes, row_bytes);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t col = 0; col < row_bytes / byte_size(pair.to); ++col) {
      const float actual = load(pair.to, out.data() + row * row_bytes + col * byte_size(pair.to));
      float expected = 0;
      if (col < pair.columns) {
        expected = load(pair.from, source.data() + (row * stride + col) * size);
        if (weights != nullptr) expected *= weights[row];
        expected = rounded(pair.to, expected);
      }
      ASSERT_EQ(std::bit_cast<uint32_t>(actual), std::bit_cast<uint32_t>(expected))
          << "row " << row << ", column " << col;
    }
  }
}

TEST(ConvertPairs, PlainRows_AreRoundedOnceAndPadded) {
  for (const Pair& pair : every_pair()) {
    SCOPED_TRACE(text(pair));
    expect_exact(pair, nullptr);
  }
}

TEST(ConvertPairs, WeightedRows_AreOneProductRoundedOnceAndPadded) {
  for (const Pair& pair : every_pair()) {
    SCOPED_TRACE(text(pair));
    expect_exact(pair, kWeights.data());
  }
}

}  // namespace
}  // namespace conclave::testing
