#include "quant/gguf/block_bytes.h"
#include "quant/gguf/block_families.h"
#include "quant/gguf/value_tables.h"

namespace conclave::inline v0::quant {
namespace {

constexpr int64_t kElements = 256;

// Element i of codes of 2 bits: 128 elements take 32 bytes, whose bit pairs are 32 elements each.
int pair_code(const std::byte* codes, int64_t i) {
  return bits_of(codes, i / 128 * 32 + i % 32, static_cast<int>(i % 128 / 32) * 2, 3);
}

// Element i of codes of 4 bits: 64 elements take 32 bytes, the lower halves first.
int nibble_code(const std::byte* codes, int64_t i) {
  return bits_of(codes, i / 64 * 32 + i % 32, i % 64 < 32 ? 0 : 4, 15);
}

// Eight pairs of a scale and an offset of 6 bits each, in 12 bytes: the lower 6 bits of the first
// eight bytes are four of each, and their upper bits are those of the other four.
void load_6_bit_scales(const std::byte* packed, float scale, float offset, BlockParts& parts) {
  for (int64_t j = 0; j < 8; ++j) {
    int sc = 0;
    int off = 0;
    if (j < 4) {
      sc = bits_of(packed, j, 0, 63);
      off = bits_of(packed, j + 4, 0, 63);
    } else {
      sc = bits_of(packed, j + 4, 0, 15) | bits_of(packed, j - 4, 6, 3) << 4;
      off = bits_of(packed, j + 4, 4, 15) | bits_of(packed, j, 6, 3) << 4;
    }
    parts.scales[j] = scale * static_cast<float>(sc);
    parts.offsets[j] = offset * static_cast<float>(off);
  }
}

}  // namespace

void take_apart_q2_k(const std::byte* block, BlockParts& parts) {
  const float scale = field_f16(block + 80);
  const float offset = field_f16(block + 82);
  for (int64_t group = 0; group < 16; ++group) {
    parts.scales[group] = scale * static_cast<float>(bits_of(block, group, 0, 15));
    parts.offsets[group] = offset * static_cast<float>(bits_of(block, group, 4, 15));
  }
  for (int64_t i = 0; i < kElements; ++i) {
    parts.codes[i] = static_cast<int8_t>(pair_code(block + 16, i));
  }
}

void take_apart_q3_k(const std::byte* block, BlockParts& parts) {
  const std::byte* high = block;
  const std::byte* low = block + 32;
  const std::byte* scales = block + 96;
  const float scale = field_f16(block + 108);
  for (int64_t group = 0; group < 16; ++group) {
    const int lower = bits_of(scales, group % 8, group < 8 ? 0 : 4, 15);
    const int upper = bits_of(scales, 8 + group % 4, static_cast<int>(group / 4) * 2, 3);
    parts.scales[group] = scale * static_cast<float>((lower | upper << 4) - 32);
  }
  for (int64_t i = 0; i < kElements; ++i) {
    const int top = bits_of(high, i % 32, static_cast<int>(i / 32), 1);
    parts.codes[i] = static_cast<int8_t>(pair_code(low, i) - (top != 0 ? 0 : 4));
  }
}

void take_apart_q4_k(const std::byte* block, BlockParts& parts) {
  load_6_bit_scales(block + 4, field_f16(block), field_f16(block + 2), parts);
  for (int64_t i = 0; i < kElements; ++i) {
    parts.codes[i] = static_cast<int8_t>(nibble_code(block + 16, i));
  }
}

void take_apart_q5_k(const std::byte* block, BlockParts& parts) {
  load_6_bit_scales(block + 4, field_f16(block), field_f16(block + 2), parts);
  for (int64_t i = 0; i < kElements; ++i) {
    const int fifth = bits_of(block + 16, i % 32, static_cast<int>(i / 32), 1);
    parts.codes[i] = static_cast<int8_t>(nibble_code(block + 48, i) | fifth << 4);
  }
}

// The lower 4 bits of 128 elements take 64 bytes, two elements a byte that are 64 apart, and the
// upper 2 bits 32 bytes.
void take_apart_q6_k(const std::byte* block, BlockParts& parts) {
  const float scale = field_f16(block + 208);
  for (int64_t group = 0; group < 16; ++group) {
    const auto own = static_cast<int8_t>(field_u8(block + 192, group));
    parts.scales[group] = scale * static_cast<float>(own);
  }
  for (int64_t i = 0; i < kElements; ++i) {
    const int lower = bits_of(block, i / 128 * 64 + i % 64, i % 128 < 64 ? 0 : 4, 15);
    const int upper = pair_code(block + 128, i);
    parts.codes[i] = static_cast<int8_t>((lower | upper << 4) - 32);
  }
}

void take_apart_iq4_xs(const std::byte* block, BlockParts& parts) {
  const float scale = field_f16(block);
  const auto upper = load_field<uint16_t>(block + 2);
  for (int64_t group = 0; group < 8; ++group) {
    const int low = bits_of(block + 4, group / 2, group % 2 == 0 ? 0 : 4, 15);
    const int high = upper >> (2 * group) & 3;
    parts.scales[group] = scale * static_cast<float>((low | high << 4) - 32);
  }
  for (int64_t i = 0; i < kElements; ++i) {
    const int code = bits_of(block + 8, i / 32 * 16 + i % 16, i % 32 < 16 ? 0 : 4, 15);
    parts.codes[i] = kIq4Values[static_cast<size_t>(code)];
  }
}

}  // namespace conclave::inline v0::quant
