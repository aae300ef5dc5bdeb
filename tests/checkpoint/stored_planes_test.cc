// Planes that methods compute from stored tensors, at sizes and values that files seldom have.

#include "checkpoint/methods/method.h"
#include "checkpoint/quantization.h"
#include "core/float8.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::testing {
namespace {

using checkpoint::MatrixForm;
using checkpoint::PlaneInput;
using checkpoint::QuantizedWeights;
using checkpoint::StoredPlane;

QuantizedWeights read(const nlohmann::json& config) {
  const io::JsonDocument document =
      io::JsonDocument::parse(config.dump(), "config.json", io::kConfigLimits);
  return checkpoint::read_quantization(document.root()).weights.value();
}

const StoredPlane& plane_of(const QuantizedWeights& weights, WeightPlane plane) {
  return *std::ranges::find_if(weights.planes, [&](const StoredPlane& stored) {
    return stored.plane == plane && stored.decode != nullptr;
  });
}

TEST(StoredPlanes, ZeroPointsOfGptq_EndWithinAWordAndWrap) {
  const QuantizedWeights weights =
      read({{"quant_method", "gptq"}, {"bits", 3}, {"group_size", 8}, {"sym", false}});
  const MatrixForm form{
      .rows = 5, .cols = 16, .scale_rows = 5, .groups = 2, .group_cols = 8, .quant = &weights};
  // Five rows fill 15 bits of a group's one word. The first version stores each zero less one.
  const int stored[2][5] = {{0, 1, 2, 3, 7}, {6, 5, 4, 7, 0}};
  std::array<uint32_t, 2> words{};
  for (size_t group = 0; group < 2; ++group) {
    for (size_t row = 0; row < 5; ++row) {
      words[group] |= static_cast<uint32_t>(stored[group][row]) << (3 * row);
    }
  }
  const std::array inputs = {PlaneInput{.bytes = std::as_bytes(std::span(words))}};
  std::vector<float> zeros(10);
  plane_of(weights, WeightPlane::kZero)
      .decode(form, inputs, std::as_writable_bytes(std::span(zeros)));
  for (size_t row = 0; row < 5; ++row) {
    for (size_t group = 0; group < 2; ++group) {
      const int zero = (stored[group][row] + 1) % 8 - 4;
      EXPECT_EQ(zeros[row * 2 + group], static_cast<float>(zero)) << row << ", " << group;
    }
  }
}

TEST(StoredPlanes, PairsOfRows_HoldEveryCodeOfFourBits) {
  const QuantizedWeights weights = read({{"quant_method", "modelopt"}, {"quant_algo", "W4A8_AWQ"}});
  const MatrixForm form{
      .rows = 3, .cols = 8, .scale_rows = 3, .groups = 1, .group_cols = 8, .quant = &weights};
  const auto value_of = [](int64_t row, int64_t col) {
    return static_cast<int>((5 * row + col) % 16) - 8;
  };
  std::vector<std::byte> pairs(16);
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t col = 0; col < form.cols; ++col) {
      const int code = value_of(row, col) & 15;
      pairs[static_cast<size_t>(row / 2 * form.cols + col)] |=
          static_cast<std::byte>(row % 2 == 0 ? code : code << 4);
    }
  }
  const std::array inputs = {PlaneInput{.bytes = pairs}};
  std::vector<std::byte> plane(24);
  plane_of(weights, WeightPlane::kWeights).decode(form, inputs, plane);
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t col = 0; col < form.cols; ++col) {
      const auto found = static_cast<uint8_t>(plane[static_cast<size_t>(row * form.cols + col)]);
      EXPECT_EQ(found, float_to_e4m3(static_cast<float>(value_of(row, col)))) << row << ", " << col;
    }
  }
}

}  // namespace
}  // namespace conclave::testing
