// Every block type of GGUF against the values that gguf-py gives the same bytes.
#include "support/gguf_blocks.h"

#include "quant/gguf/block_type.h"

#include "conclave/error.h"
#include "conclave/gguf.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

namespace conclave::quant {
namespace {

class GgufBlocks : public ::testing::TestWithParam<std::string> {
 protected:
  const BlockType& type() const {
    const BlockType* type = find_block_type(GetParam());
    if (type == nullptr) throw Error(ErrorCode::kInternal, "no such type: " + GetParam());
    return *type;
  }
  Tensor blocks() const { return testing::gguf_blocks().load(GetParam()); }
  Tensor values() const { return testing::gguf_blocks().load(GetParam() + ".values"); }
};

TEST_P(GgufBlocks, Values_AreThoseOfGgufPyToTheBit) {
  const Tensor stored = blocks();
  const Tensor expected = values();
  const int64_t count = stored.shape()[0];
  ASSERT_EQ(stored.shape()[1], type().bytes);
  ASSERT_EQ(expected.shape()[1], type().elements);
  std::vector<float> found(static_cast<size_t>(count * type().elements));
  decode_blocks(type(), stored.as<std::byte>(), 0, count * type().elements, found.data());
  for (size_t i = 0; i < found.size(); ++i) {
    const float wanted = expected.as<float>()[i];
    if (std::isnan(wanted)) {
      EXPECT_TRUE(std::isnan(found[i])) << i;
    } else {
      EXPECT_EQ(found[i], wanted) << i;
    }
  }
}

TEST_P(GgufBlocks, PartsOfARow_AreThoseOfTheWhole) {
  const Tensor stored = blocks();
  const int64_t elements = 3 * type().elements;
  std::vector<float> whole(static_cast<size_t>(elements));
  decode_blocks(type(), stored.as<std::byte>(), 0, elements, whole.data());
  for (const int64_t begin : {int64_t{0}, int64_t{1}, type().elements - 1, type().elements + 7}) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, type().elements}) {
      std::vector<float> part(static_cast<size_t>(count) + 1, 42.0F);
      decode_blocks(type(), stored.as<std::byte>(), begin, count, part.data());
      for (int64_t i = 0; i < count; ++i) {
        EXPECT_EQ(std::bit_cast<uint32_t>(part[static_cast<size_t>(i)]),
                  std::bit_cast<uint32_t>(whole[static_cast<size_t>(begin + i)]));
      }
      EXPECT_EQ(part.back(), 42.0F) << "nothing is written behind the part";
    }
  }
}

TEST_P(GgufBlocks, Codes_LieInTheRangeThatTheTypeStates) {
  const Tensor stored = blocks();
  BlockParts parts;
  int least = 127;
  int largest = -128;
  for (int64_t block = 0; block < stored.shape()[0]; ++block) {
    type().take_apart(stored.as<std::byte>() + block * type().bytes, parts);
    for (int64_t i = 0; i < type().elements; ++i) {
      least = std::min<int>(least, parts.codes[i]);
      largest = std::max<int>(largest, parts.codes[i]);
    }
  }
  EXPECT_EQ(least, type().least);
  EXPECT_EQ(largest, type().largest);
}

// Every product of a code and a finite scale is exact, so that it does not matter whether a kernel
// adds the offset with a fused operation.
TEST_P(GgufBlocks, Products_AreExactInFloat32) {
  const Tensor stored = blocks();
  BlockParts parts;
  for (int64_t block = 0; block < stored.shape()[0]; ++block) {
    type().take_apart(stored.as<std::byte>() + block * type().bytes, parts);
    for (int64_t i = 0; i < type().elements; ++i) {
      const float scale = parts.scales[i / type().group];
      const float product = scale * static_cast<float>(parts.codes[i]);
      if (!std::isfinite(product)) continue;
      EXPECT_EQ(static_cast<double>(product), static_cast<double>(scale) * parts.codes[i]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, GgufBlocks, ::testing::ValuesIn(testing::gguf_block_types()),
                         [](const auto& row) { return row.param; });

TEST(GgufBlockTypes, NamesWithoutBlocks_AreNoTypes) {
  EXPECT_EQ(find_block_type("F32"), nullptr);
  EXPECT_EQ(find_block_type("q4_0"), nullptr);
  EXPECT_EQ(testing::gguf_block_types().size(), 25U);
}

TEST(GgufBlockTypes, Rows_TakeTheSameBytesInFiles) {
  for (const BlockType& type : block_types()) {
    EXPECT_EQ(gguf_row_bytes(type.name, 3 * type.elements), static_cast<uint64_t>(3 * type.bytes))
        << type.name;
  }
}

}  // namespace
}  // namespace conclave::quant
