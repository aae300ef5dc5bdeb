#include "quant/gguf/k_encoders.h"

#include "quant/gguf/block_bytes.h"
#include "quant/gguf/two_levels.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::quant {
namespace {

constexpr int64_t kElements = kMaxBlockElements;

// Codes of types without offsets are stored from 0 on.
constexpr TwoLevelForm kQ2 = {
    .group = 16, .largest_code = 3, .largest_scale = 15, .largest_offset = 15};
constexpr TwoLevelForm kQ3 = {.group = 16,
                              .least_code = -4,
                              .largest_code = 3,
                              .least_scale = -32,
                              .largest_scale = 31,
                              .largest_offset = 0};
constexpr TwoLevelForm kQ4 = {.largest_code = 15};
constexpr TwoLevelForm kQ5 = {.largest_code = 31};
constexpr TwoLevelForm kQ6 = {.group = 16,
                              .least_code = -32,
                              .largest_code = 31,
                              .least_scale = -128,
                              .largest_scale = 127,
                              .largest_offset = 0};

void add_bits(std::byte& byte, int bits, int shift) {
  byte |= static_cast<std::byte>(bits << shift);
}

int code_at(const TwoLevelForm& form, const TwoLevelBlock& block, int64_t i) {
  return block.codes[static_cast<size_t>(i)] - form.least_code;
}

// 128 elements take 32 bytes, whose bit pairs are 32 elements each.
void store_pair(std::byte* pairs, int64_t i, int code) {
  add_bits(pairs[i / 128 * 32 + i % 32], code & 3, static_cast<int>(i % 128 / 32) * 2);
}

// 64 elements take 32 bytes, the lower halves first.
void store_nibble(std::byte* nibbles, int64_t i, int code) {
  add_bits(nibbles[i / 64 * 32 + i % 32], code & 15, i % 64 < 32 ? 0 : 4);
}

// Eight pairs of 6 bits in 12 bytes: four of each in the lower bits of the first eight bytes, whose
// upper bits are those of the other four.
void store_6_bit_scales(const TwoLevelBlock& block, std::byte* packed) {
  for (size_t j = 0; j < 4; ++j) {
    add_bits(packed[j], block.scales[j], 0);
    add_bits(packed[j + 4], block.offsets[j], 0);
    const int scale = block.scales[j + 4];
    const int offset = block.offsets[j + 4];
    add_bits(packed[j + 8], scale & 15, 0);
    add_bits(packed[j + 8], offset & 15, 4);
    add_bits(packed[j], scale >> 4, 6);
    add_bits(packed[j + 4], offset >> 4, 6);
  }
}

void store_q2_k(const TwoLevelBlock& block, std::byte* out) {
  for (size_t g = 0; g < 16; ++g) {
    add_bits(out[g], block.scales[g], 0);
    add_bits(out[g], block.offsets[g], 4);
  }
  for (int64_t i = 0; i < kElements; ++i) store_pair(out + 16, i, code_at(kQ2, block, i));
  store_f16(block.scale, out + 80);
  store_f16(block.offset, out + 82);
}

void store_q3_k(const TwoLevelBlock& block, std::byte* out) {
  for (int64_t i = 0; i < kElements; ++i) {
    const int code = code_at(kQ3, block, i);
    add_bits(out[i % 32], code >> 2, static_cast<int>(i / 32));
    store_pair(out + 32, i, code);
  }
  for (int64_t g = 0; g < 16; ++g) {
    const int scale = block.scales[static_cast<size_t>(g)] - kQ3.least_scale;
    add_bits(out[96 + g % 8], scale & 15, g < 8 ? 0 : 4);
    add_bits(out[104 + g % 4], scale >> 4, static_cast<int>(g / 4) * 2);
  }
  store_f16(block.scale, out + 108);
}

void store_q4_k(const TwoLevelBlock& block, std::byte* out) {
  store_f16(block.scale, out);
  store_f16(block.offset, out + 2);
  store_6_bit_scales(block, out + 4);
  for (int64_t i = 0; i < kElements; ++i) store_nibble(out + 16, i, code_at(kQ4, block, i));
}

void store_q5_k(const TwoLevelBlock& block, std::byte* out) {
  store_f16(block.scale, out);
  store_f16(block.offset, out + 2);
  store_6_bit_scales(block, out + 4);
  for (int64_t i = 0; i < kElements; ++i) {
    const int code = code_at(kQ5, block, i);
    add_bits(out[16 + i % 32], code >> 4, static_cast<int>(i / 32));
    store_nibble(out + 48, i, code);
  }
}

// The lower 4 bits of 128 elements take 64 bytes, two elements a byte that are 64 apart.
void store_q6_k(const TwoLevelBlock& block, std::byte* out) {
  for (int64_t i = 0; i < kElements; ++i) {
    const int code = code_at(kQ6, block, i);
    add_bits(out[i / 128 * 64 + i % 64], code & 15, i % 128 < 64 ? 0 : 4);
    store_pair(out + 128, i, code >> 4);
  }
  for (size_t g = 0; g < 16; ++g) {
    out[192 + g] = static_cast<std::byte>(static_cast<int8_t>(block.scales[g]));
  }
  store_f16(block.scale, out + 208);
}

using Store = void (*)(const TwoLevelBlock& block, std::byte* out);

template <const TwoLevelForm& kForm, int64_t kBytes, Store kStore>
void encode(const float* values, float share, std::byte* out) {
  std::fill_n(out, kBytes, std::byte{0});
  kStore(spread_two_levels(kForm, values, share), out);
}

template <const TwoLevelForm& kForm, int64_t kBytes, Store kStore>
void search(const float* values, std::byte* out) {
  std::fill_n(out, kBytes, std::byte{0});
  kStore(fit_two_levels(kForm, values), out);
}

template <const TwoLevelForm& kForm, int64_t kBytes, Store kStore>
constexpr BlockEncoder row(std::string_view type) {
  return {.type = type,
          .encode = encode<kForm, kBytes, kStore>,
          .search = search<kForm, kBytes, kStore>};
}

constexpr std::array kEncoders = {
    row<kQ2, 84, store_q2_k>("Q2_K"),  row<kQ3, 110, store_q3_k>("Q3_K"),
    row<kQ4, 144, store_q4_k>("Q4_K"), row<kQ5, 176, store_q5_k>("Q5_K"),
    row<kQ6, 210, store_q6_k>("Q6_K"),
};

}  // namespace

std::span<const BlockEncoder> k_encoders() noexcept { return kEncoders; }

}  // namespace conclave::inline v0::quant
