#include "core/code_bits.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace conclave {
namespace {

// The bit `at` of the row, counted from the lowest of its first byte.
unsigned bit_of(const std::vector<std::byte>& row, int64_t at) {
  return std::to_integer<unsigned>(row[static_cast<size_t>(at / 8)]) >> (at % 8) & 1U;
}

uint8_t code_by_bits(const std::vector<std::byte>& row, int64_t index, int64_t bits) {
  unsigned code = 0;
  for (int64_t bit = 0; bit < bits; ++bit) code |= bit_of(row, index * bits + bit) << bit;
  return static_cast<uint8_t>(code);
}

std::vector<std::byte> random_bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  uint32_t state = 12345;
  for (std::byte& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

class CodeBits : public ::testing::TestWithParam<int64_t> {};

TEST_P(CodeBits, CodeAt_ReadsTheBitsOfACode) {
  const int64_t bits = GetParam();
  const std::vector<std::byte> row = random_bytes(48);
  for (int64_t i = 0; i < 48 * 8 / bits; ++i) {
    EXPECT_EQ(code_at(row.data(), i, bits), code_by_bits(row, i, bits)) << i;
  }
}

TEST_P(CodeBits, SetCode_KeepsTheCodesAroundIt) {
  const int64_t bits = GetParam();
  const std::vector<std::byte> row = random_bytes(24);
  for (int64_t i = 0; i < 24 * 8 / bits; ++i) {
    std::vector<std::byte> changed = row;
    const auto code = static_cast<uint8_t>(~code_by_bits(row, i, bits) & ((1 << bits) - 1));
    set_code(changed.data(), i, bits, code);
    for (int64_t j = 0; j < 24 * 8 / bits; ++j) {
      EXPECT_EQ(code_by_bits(changed, j, bits), j == i ? code : code_by_bits(row, j, bits)) << i;
    }
  }
}

TEST_P(CodeBits, CopyCodes_MovesARowOfAnyBeginAndLength) {
  const int64_t bits = GetParam();
  const std::vector<std::byte> row = random_bytes(24);
  const int64_t codes = 24 * 8 / bits;
  for (int64_t begin = 0; begin <= codes; ++begin) {
    for (int64_t count = 0; count <= codes - begin; ++count) {
      const auto bytes = static_cast<size_t>((count * bits + 7) / 8);
      std::vector<std::byte> out(bytes + 1, std::byte{0xa5});
      copy_codes(row.data(), begin, count, bits, out.data());
      EXPECT_EQ(out[bytes], std::byte{0xa5});
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(code_by_bits(out, i, bits), code_by_bits(row, begin + i, bits))
            << begin << " " << count << " " << i;
      }
      for (int64_t bit = count * bits; bit < static_cast<int64_t>(bytes) * 8; ++bit) {
        ASSERT_EQ(bit_of(out, bit), 0U) << begin << " " << count;
      }
    }
  }
}

TEST_P(CodeBits, CodesToAByte_AreTheFewestThatFillBytes) {
  const int64_t bits = GetParam();
  EXPECT_EQ(codes_to_a_byte(bits) * bits, std::lcm(bits, int64_t{8}));
}

INSTANTIATE_TEST_SUITE_P(Widths, CodeBits, ::testing::Values(4, 6, 8));

}  // namespace
}  // namespace conclave
