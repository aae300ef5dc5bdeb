#include "quant/gguf/block_bytes.h"
#include "quant/gguf/block_families.h"
#include "quant/gguf/value_tables.h"

#include <array>
#include <bit>

namespace conclave::inline v0::quant {
namespace {

constexpr int64_t kSmall = 32;

// Byte i holds element i in its lower half and element i + 16 in its upper half.
int half_code(const std::byte* codes, int64_t element) {
  return bits_of(codes, element % 16, element < 16 ? 0 : 4, 15);
}

template <class Code>
void fill_codes(BlockParts& parts, int64_t count, Code code_of) {
  for (int64_t i = 0; i < count; ++i) parts.codes[i] = static_cast<int8_t>(code_of(i));
}

// The lower four bits as above, the fifth of element i in bit i of a word of 32.
int code_of_5_bits(const std::byte* high, const std::byte* codes, int64_t element) {
  const auto word = load_field<uint32_t>(high);
  return half_code(codes, element) | static_cast<int>(word >> element & 1U) << 4;
}

}  // namespace

void take_apart_q4_0(const std::byte* block, BlockParts& parts) {
  parts.scales[0] = field_f16(block);
  fill_codes(parts, kSmall, [&](int64_t i) { return half_code(block + 2, i) - 8; });
}

void take_apart_q4_1(const std::byte* block, BlockParts& parts) {
  parts.scales[0] = field_f16(block);
  parts.offsets[0] = -field_f16(block + 2);
  fill_codes(parts, kSmall, [&](int64_t i) { return half_code(block + 4, i); });
}

void take_apart_q5_0(const std::byte* block, BlockParts& parts) {
  parts.scales[0] = field_f16(block);
  fill_codes(parts, kSmall,
             [&](int64_t i) { return code_of_5_bits(block + 2, block + 6, i) - 16; });
}

void take_apart_q5_1(const std::byte* block, BlockParts& parts) {
  parts.scales[0] = field_f16(block);
  parts.offsets[0] = -field_f16(block + 2);
  fill_codes(parts, kSmall, [&](int64_t i) { return code_of_5_bits(block + 4, block + 8, i); });
}

void take_apart_q8_0(const std::byte* block, BlockParts& parts) {
  parts.scales[0] = field_f16(block);
  fill_codes(parts, kSmall, [&](int64_t i) { return static_cast<int8_t>(field_u8(block + 2, i)); });
}

void take_apart_iq4_nl(const std::byte* block, BlockParts& parts) {
  parts.scales[0] = field_f16(block);
  fill_codes(parts, kSmall,
             [&](int64_t i) { return kIq4Values[static_cast<size_t>(half_code(block + 2, i))]; });
}

void take_apart_q1_0(const std::byte* block, BlockParts& parts) {
  parts.scales[0] = field_f16(block);
  fill_codes(parts, 128, [&](int64_t i) {
    return 2 * bits_of(block + 2, i / 8, static_cast<int>(i % 8), 1) - 1;
  });
}

void take_apart_q2_0(const std::byte* block, BlockParts& parts) {
  parts.scales[0] = field_f16(block);
  fill_codes(parts, 64, [&](int64_t i) {
    return bits_of(block + 2, i / 4, static_cast<int>(i % 4) * 2, 3) - 1;
  });
}

// The codes are twice the values of e2m1, so that the scale is half of 2^(e - 127). There is no
// NaN.
void take_apart_mxfp4(const std::byte* block, BlockParts& parts) {
  const auto exponent = static_cast<uint32_t>(field_u8(block, 0));
  const uint32_t bits = exponent < 2 ? 0x00200000U << exponent : (exponent - 1) << 23;
  parts.scales[0] = std::bit_cast<float>(bits);
  fill_codes(parts, kSmall,
             [&](int64_t i) { return kTwiceE2m1[static_cast<size_t>(half_code(block + 1, i))]; });
}

void take_apart_nvfp4(const std::byte* block, BlockParts& parts) {
  constexpr int64_t kGroup = 16;
  for (int64_t group = 0; group < 4; ++group) {
    parts.scales[group] = half_of_unsigned_e4m3(field_u8(block, group));
    const std::byte* codes = block + 4 + group * kGroup / 2;
    for (int64_t i = 0; i < kGroup; ++i) {
      const int code = bits_of(codes, i % 8, i < 8 ? 0 : 4, 15);
      parts.codes[group * kGroup + i] = kTwiceE2m1[static_cast<size_t>(code)];
    }
  }
}

void take_apart_tq1_0(const std::byte* block, BlockParts& parts) {
  constexpr std::array<int, 5> kPowers = {1, 3, 9, 27, 81};
  parts.scales[0] = field_f16(block + 52);
  int8_t* code = parts.codes;
  // A byte is a fraction of 256 with one digit of base 3 for each of its elements.
  const auto digits = [&](int64_t begin, int64_t bytes, size_t digits_a_byte) {
    for (size_t digit = 0; digit < digits_a_byte; ++digit) {
      for (int64_t i = 0; i < bytes; ++i) {
        const int fraction = field_u8(block, begin + i) * kPowers[digit] & 0xff;
        *code++ = static_cast<int8_t>((fraction * 3 >> 8) - 1);
      }
    }
  };
  digits(0, 32, 5);
  digits(32, 16, 5);
  digits(48, 4, 4);
}

void take_apart_tq2_0(const std::byte* block, BlockParts& parts) {
  parts.scales[0] = field_f16(block + 64);
  fill_codes(parts, 256, [&](int64_t i) {
    const int64_t half = i / 128;
    return bits_of(block, half * 32 + i % 32, static_cast<int>(i % 128 / 32) * 2, 3) - 1;
  });
}

}  // namespace conclave::inline v0::quant
