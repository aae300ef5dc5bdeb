#include "quant/gguf/block_bytes.h"
#include "quant/gguf/block_families.h"
#include "quant/gguf/grids.h"

#include <bit>

namespace conclave::inline v0::quant {
namespace {

// Signs of eight elements, one bit each. Seven bits are stored; the eighth makes their number even.
int eight_signs(int seven) {
  return seven | (std::popcount(static_cast<uint32_t>(seven)) & 1) << 7;
}

// Writes `count` elements of a grid point, negative where `signs` has a bit.
void put_point(const int8_t* point, int64_t count, int signs, int8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const bool negative = (signs >> i & 1) != 0;
    codes[i] = static_cast<int8_t>(negative ? -point[i] : point[i]);
  }
}

// A scale of 4 bits counts halves from 0.5 on, and grid values are multiples of `unit`.
float half_step(float scale, int code, float unit) {
  return scale * (0.5F + static_cast<float>(code)) * unit;
}

// Elements are -1, 0 or 1, moved by an eighth: the codes count eighths.
void put_eighths(const int8_t* point, bool down, int8_t* codes) {
  for (int64_t i = 0; i < 8; ++i) codes[i] = static_cast<int8_t>(8 * point[i] + (down ? -1 : 1));
}

}  // namespace

void take_apart_iq2_xxs(const std::byte* block, BlockParts& parts) {
  const float scale = field_f16(block);
  for (int64_t group = 0; group < 8; ++group) {
    const std::byte* points = block + 2 + group * 8;
    const auto word = load_field<uint32_t>(points + 4);
    parts.scales[group] = half_step(scale, static_cast<int>(word >> 28), 0.25F);
    for (int64_t i = 0; i < 4; ++i) {
      const int signs = eight_signs(static_cast<int>(word >> (7 * i) & 127U));
      put_point(grid_iq2_xxs(field_u8(points, i)), 8, signs, parts.codes + group * 32 + i * 8);
    }
  }
}

void take_apart_iq2_xs(const std::byte* block, BlockParts& parts) {
  const float scale = field_f16(block);
  for (int64_t group = 0; group < 16; ++group) {
    const int code = bits_of(block + 66, group / 2, group % 2 == 0 ? 0 : 4, 15);
    parts.scales[group] = half_step(scale, code, 0.25F);
  }
  for (int64_t i = 0; i < 32; ++i) {
    const int word = load_field<uint16_t>(block + 2 + i * 2);
    put_point(grid_iq2_xs(word & 511), 8, eight_signs(word >> 9), parts.codes + i * 8);
  }
}

void take_apart_iq2_s(const std::byte* block, BlockParts& parts) {
  const std::byte* low = block + 2;
  const std::byte* signs = block + 34;
  const std::byte* high = block + 66;
  const float scale = field_f16(block);
  for (int64_t group = 0; group < 16; ++group) {
    const int code = bits_of(block + 74, group / 2, group % 2 == 0 ? 0 : 4, 15);
    parts.scales[group] = half_step(scale, code, 0.25F);
  }
  for (int64_t i = 0; i < 32; ++i) {
    const int point = field_u8(low, i) | bits_of(high, i / 4, static_cast<int>(i % 4) * 2, 3) << 8;
    put_point(grid_iq2_s(point), 8, field_u8(signs, i), parts.codes + i * 8);
  }
}

void take_apart_iq3_xxs(const std::byte* block, BlockParts& parts) {
  const float scale = field_f16(block);
  for (int64_t group = 0; group < 8; ++group) {
    const auto word = load_field<uint32_t>(block + 66 + group * 4);
    parts.scales[group] = half_step(scale, static_cast<int>(word >> 28), 0.5F);
    for (int64_t i = 0; i < 8; ++i) {
      const int signs = eight_signs(static_cast<int>(word >> (7 * (i / 2)) & 127U));
      const int point = field_u8(block + 2, group * 8 + i);
      put_point(grid_iq3_xxs(point), 4, signs >> (4 * (i % 2)), parts.codes + group * 32 + i * 4);
    }
  }
}

void take_apart_iq3_s(const std::byte* block, BlockParts& parts) {
  const std::byte* low = block + 2;
  const std::byte* high = block + 66;
  const std::byte* signs = block + 74;
  const float scale = field_f16(block);
  for (int64_t group = 0; group < 8; ++group) {
    const int code = bits_of(block + 106, group / 2, group % 2 == 0 ? 0 : 4, 15);
    parts.scales[group] = scale * static_cast<float>(1 + 2 * code);
  }
  for (int64_t i = 0; i < 64; ++i) {
    const int point = field_u8(low, i) | bits_of(high, i / 8, static_cast<int>(i % 8), 1) << 8;
    const int four = bits_of(signs, i / 2, i % 2 == 0 ? 0 : 4, 15);
    put_point(grid_iq3_s(point), 4, four, parts.codes + i * 4);
  }
}

void take_apart_iq1_s(const std::byte* block, BlockParts& parts) {
  const float scale = field_f16(block);
  for (int64_t group = 0; group < 8; ++group) {
    const int word = load_field<uint16_t>(block + 34 + group * 2);
    parts.scales[group] = scale * static_cast<float>(2 * (word >> 12 & 7) + 1) * 0.125F;
    for (int64_t i = 0; i < 4; ++i) {
      const int point = field_u8(block + 2, group * 4 + i) | (word >> (3 * i) & 7) << 8;
      put_eighths(grid_iq1(point), (word & 0x8000) != 0, parts.codes + group * 32 + i * 8);
    }
  }
}

// The float16 scale stands in the upper bits of four words, whose other bits are scales of 3 bits.
void take_apart_iq1_m(const std::byte* block, BlockParts& parts) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < 4; ++i) {
    bits |= static_cast<uint32_t>(load_field<uint16_t>(block + 48 + i * 2) >> 12) << (4 * i);
  }
  const float scale = f16_to_float(static_cast<uint16_t>(bits));
  for (int64_t group = 0; group < 16; ++group) {
    const int word = load_field<uint16_t>(block + 48 + group / 4 * 2);
    const int code = word >> (3 * (group % 4)) & 7;
    parts.scales[group] = scale * static_cast<float>(2 * code + 1) * 0.125F;
  }
  for (int64_t i = 0; i < 32; ++i) {
    const int nibble = bits_of(block + 32, i / 2, i % 2 == 0 ? 0 : 4, 15);
    const int point = field_u8(block, i) | (nibble & 7) << 8;
    put_eighths(grid_iq1(point), (nibble & 8) != 0, parts.codes + i * 8);
  }
}

}  // namespace conclave::inline v0::quant
