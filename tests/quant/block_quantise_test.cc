// Blocks of GGUF types made of values: the bytes of gguf-py where it makes such blocks, and the
// nearest codes where it makes none.
#include "quant/gguf/block_type.h"

#include "conclave/error.h"
#include "conclave/quantise.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace conclave::quant {
namespace {

const SafetensorsFile& encoded() {
  static const SafetensorsFile kFile = SafetensorsFile::open("testdata/gguf/encoded.safetensors");
  return kFile;
}

std::vector<float> values_to_encode() {
  const Tensor values = encoded().load("values");
  const float* const begin = values.as<float>();
  return {begin, begin + values.shape()[0] * values.shape()[1]};
}

std::vector<float> decoded(const std::string& type, const std::vector<std::byte>& blocks) {
  const BlockType& row = *find_block_type(type);
  std::vector<float> values(blocks.size() / static_cast<size_t>(row.bytes) *
                            static_cast<size_t>(row.elements));
  decode_blocks(row, blocks.data(), 0, static_cast<int64_t>(values.size()), values.data());
  return values;
}

std::vector<std::string> all_types() {
  std::vector<std::string> names;
  for (const std::string_view type : BlockQuantiser::types()) names.emplace_back(type);
  return names;
}

class EveryBlock : public testing::TestWithParam<std::string> {
 protected:
  QuantisedRows quantise(const std::vector<float>& values,
                         ScaleRule rule = ScaleRule::kAmax) const {
    const BlockQuantiser quantiser(GetParam(), rule);
    const int64_t cols = quantiser.block_elements();
    return quantiser.quantise(values, static_cast<int64_t>(values.size()) / cols, cols);
  }
};

using BlockOfGgufPy = EveryBlock;
using TwoLevels = EveryBlock;

TEST_P(BlockOfGgufPy, Amax_HasItsBytes) {
  const Tensor expected = encoded().load(GetParam());
  const QuantisedRows rows = quantise(values_to_encode());
  const int64_t bytes = find_block_type(GetParam())->bytes;
  ASSERT_EQ(expected.shape()[1], bytes);
  ASSERT_EQ(static_cast<int64_t>(rows.codes.size()), expected.shape()[0] * bytes);
  for (int64_t block = 0; block < expected.shape()[0]; ++block) {
    EXPECT_EQ(std::memcmp(rows.codes.data() + block * bytes,
                          expected.as<std::byte>() + block * bytes, static_cast<size_t>(bytes)),
              0)
        << block;
  }
}

TEST_P(EveryBlock, Error_IsThatOfWhatComesBack) {
  const std::vector<float> values = values_to_encode();
  for (const ScaleRule rule : {ScaleRule::kAmax, ScaleRule::kSearch}) {
    const QuantisedRows rows = quantise(values, rule);
    const std::vector<float> back = decoded(GetParam(), rows.codes);
    double squared = 0;
    double norm = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      squared += std::pow(double{values[i]} - double{back[i]}, 2);
      norm += double{values[i]} * double{values[i]};
    }
    EXPECT_NEAR(rows.error.squared_error / squared, 1.0, 1e-4);
    EXPECT_NEAR(rows.error.squared_values / norm, 1.0, 1e-12);
  }
}

TEST_P(EveryBlock, Search_IsNeverWorseThanAmaxAndBetterForSome) {
  const std::vector<float> values = values_to_encode();
  const BlockQuantiser amax(GetParam(), ScaleRule::kAmax);
  const BlockQuantiser search(GetParam(), ScaleRule::kSearch);
  const auto cols = static_cast<size_t>(amax.block_elements());
  int better = 0;
  for (size_t begin = 0; begin < values.size(); begin += cols) {
    const auto block = std::span(values).subspan(begin, cols);
    const double before = amax.quantise(block, 1, int64_t(cols)).error.squared_error;
    const double after = search.quantise(block, 1, int64_t(cols)).error.squared_error;
    EXPECT_LE(after, before) << begin;
    better += after < 0.99 * before ? 1 : 0;
  }
  EXPECT_GT(better, 0);
}

TEST_P(EveryBlock, ExtremeValues_StayFinite) {
  for (const float size : {std::numeric_limits<float>::denorm_min(), 1e-38F, 1e-20F, 1e9F,
                           std::numeric_limits<float>::max()}) {
    for (const ScaleRule rule : {ScaleRule::kAmax, ScaleRule::kSearch}) {
      std::vector<float> values(static_cast<size_t>(find_block_type(GetParam())->elements), 0.0F);
      values[3] = size;
      values[20] = -size;
      const QuantisedRows rows = quantise(values, rule);
      for (const float value : decoded(GetParam(), rows.codes)) {
        EXPECT_TRUE(std::isfinite(value)) << size;
      }
      EXPECT_TRUE(std::isfinite(rows.error.worst_steps)) << size;
    }
  }
}

TEST_P(EveryBlock, RowOfPartOfABlock_IsRefused) {
  const BlockQuantiser quantiser(GetParam(), ScaleRule::kAmax);
  const std::vector<float> values(48);
  try {
    quantiser.quantise(values, 1, 48);
    ADD_FAILURE() << "48 columns were taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTensorShape);
  }
  EXPECT_TRUE(quantiser.quantise({}, 0, 256).codes.empty());
}

// Types that gguf-py makes blocks of.
std::vector<std::string> encoded_types() {
  std::vector<std::string> names;
  for (const TensorInfo& tensor : encoded().tensors()) {
    if (tensor.name != "values") names.push_back(tensor.name);
  }
  return names;
}

// A code is the nearest one for the scale and offset that the block has, but for the last bit of a
// quotient in float32.
TEST_P(TwoLevels, Codes_AreTheNearestForTheirScales) {
  const std::vector<float> values = values_to_encode();
  const BlockType& type = *find_block_type(GetParam());
  BlockParts parts;
  for (const ScaleRule rule : {ScaleRule::kAmax, ScaleRule::kSearch}) {
    const QuantisedRows rows = quantise(values, rule);
    for (size_t at = 0; at < values.size(); ++at) {
      const auto i = static_cast<int64_t>(at);
      const int64_t element = i % type.elements;
      if (element == 0) type.take_apart(rows.codes.data() + i / type.elements * type.bytes, parts);
      const double scale = parts.scales[element / type.group];
      if (scale == 0) continue;
      const double offset = type.has_offset ? double{parts.offsets[element / type.group]} : 0;
      const double quotient = (double{values[at]} + offset) / scale;
      const double bounded = std::clamp(quotient, double(type.least), double(type.largest));
      EXPECT_LE(std::abs(bounded - parts.codes[element]), 0.5001) << at;
    }
  }
}

// ggml's own quantiser, of ggml-python 0.0.45, leaves this relative error in values that are
// normal.
TEST_P(TwoLevels, SearchOfNormalValues_ErrsLessThanGgml) {
  const std::map<std::string, double> ggml = {
      {"Q2_K", 0.2967}, {"Q3_K", 0.1508}, {"Q4_K", 0.07134}, {"Q5_K", 0.03613}, {"Q6_K", 0.01776}};
  constexpr int64_t kCols = 1 << 16;
  std::vector<float> values(kCols);
  uint64_t state = 20261123;
  const auto uniform = [&state] {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (static_cast<double>(state >> 11) + 0.5) * 0x1p-53;
  };
  for (float& value : values) {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    value = static_cast<float>(0.02 * radius * std::cos(6.283185307179586 * uniform()));
  }
  const BlockQuantiser search(GetParam(), ScaleRule::kSearch);
  const double error = search.quantise(values, 1, kCols).error.relative();
  EXPECT_LT(error, 0.99 * ggml.at(GetParam()));
  EXPECT_GT(error, 0.8 * ggml.at(GetParam())) << "better than such codes can be";
}

INSTANTIATE_TEST_SUITE_P(Types, TwoLevels, testing::Values("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
                         [](const auto& row) { return row.param; });
INSTANTIATE_TEST_SUITE_P(Types, BlockOfGgufPy, testing::ValuesIn(encoded_types()),
                         [](const auto& row) { return row.param; });
INSTANTIATE_TEST_SUITE_P(Types, EveryBlock, testing::ValuesIn(all_types()),
                         [](const auto& row) { return row.param; });

// gguf-py has no such blocks to compare with: each code must be the nearest of the table for the
// scale that the block has, and the outermost value within the rounding of the scale.
TEST(BlockQuantise, Iq4Nl_HasTheNearestCodes) {
  constexpr int kTable[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                            1,    13,   25,  38,  53,  69,  89,  113};
  const std::vector<float> values = values_to_encode();
  const BlockQuantiser quantiser("IQ4_NL", ScaleRule::kAmax);
  const auto blocks = static_cast<int64_t>(values.size()) / 32;
  const QuantisedRows rows = quantiser.quantise(values, blocks, 32);
  const std::vector<float> back = decoded("IQ4_NL", rows.codes);
  BlockParts parts;
  for (int64_t block = 0; block < blocks; ++block) {
    find_block_type("IQ4_NL")->take_apart(rows.codes.data() + block * 18, parts);
    const double scale = parts.scales[0];
    for (int64_t i = 0; i < 32; ++i) {
      const auto at = static_cast<size_t>(block * 32 + i);
      double least = HUGE_VAL;
      for (const int code : kTable) {
        least = std::min(least, std::abs(double{values[at]} - scale * code));
      }
      EXPECT_LE(std::abs(double{values[at]} - double{back[at]}), least * (1 + 1e-6) + 1e-30) << at;
    }
  }
}

TEST(BlockQuantise, TypesWithoutAnEncoder_AreNamed) {
  try {
    const BlockQuantiser quantiser("IQ4_XS", ScaleRule::kAmax);
    ADD_FAILURE() << "IQ4_XS was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnknownName);
    EXPECT_NE(error.detail().expected.find("Q8_0"), std::string::npos);
  }
}

}  // namespace
}  // namespace conclave::quant
