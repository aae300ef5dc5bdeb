#include "quant/gguf/block_encoder.h"

#include "core/float_convert.h"
#include "quant/gguf/block_bytes.h"
#include "quant/gguf/k_encoders.h"
#include "quant/gguf/value_tables.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace conclave::inline v0::quant {
namespace {

constexpr int64_t kElements = 32;

constexpr std::array<int8_t, 15> kE2m1Grid = {-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12};

using Codes = std::array<uint8_t, kElements>;

// The first value of the largest magnitude, with its sign.
float outermost(const float* values) {
  float found = values[0];
  for (int64_t i = 1; i < kElements; ++i) {
    if (std::abs(values[i]) > std::abs(found)) found = values[i];
  }
  return found;
}

// A number from 0 to `most` in place of one that was cut to a whole.
uint8_t code_of(float number, int most) {
  return static_cast<uint8_t>(std::clamp(number, 0.0F, static_cast<float>(most)));
}

// Byte i holds element i in its lower half and element i + 16 in its upper half.
void store_halves(const Codes& codes, std::byte* out) {
  for (size_t i = 0; i < kElements / 2; ++i) {
    out[i] = static_cast<std::byte>((codes[i] & 15) | (codes[i + kElements / 2] & 15) << 4);
  }
}

// The fifth bit of element i is bit i of a word.
void store_fifth_bits(const Codes& codes, std::byte* out) {
  uint32_t word = 0;
  for (size_t i = 0; i < kElements; ++i) word |= uint32_t{codes[i]} >> 4 << i;
  std::memcpy(out, &word, sizeof(word));
}

// Codes from 0 to 2 * half - 1, of which `half` stands for 0, and a signed step: the outermost
// value becomes code 0.
Codes codes_around_zero(const float* values, float share, int half, std::byte* scale) {
  const float step = within_f16(outermost(values) * share / static_cast<float>(-half));
  const float inverse = inverse_of(step);
  Codes codes{};
  for (size_t i = 0; i < kElements; ++i) {
    codes[i] = code_of(values[i] * inverse + (static_cast<float>(half) + 0.5F), 2 * half - 1);
  }
  store_f16(step, scale);
  return codes;
}

// Codes from 0 to `most`, evenly from the least value to the largest. A smaller share leaves out as
// much at both ends.
Codes codes_from_least(const float* values, float share, int most, std::byte* scale,
                       std::byte* offset) {
  const auto [least, largest] = std::minmax_element(values, values + kElements);
  const float range = std::min(*largest - *least, std::numeric_limits<float>::max());
  const float begin = within_f16(*least + range * (0.5F - 0.5F * share));
  const float step = within_f16(range * share / static_cast<float>(most));
  const float inverse = inverse_of(step);
  Codes codes{};
  for (size_t i = 0; i < kElements; ++i) {
    codes[i] = code_of((values[i] - begin) * inverse + 0.5F, most);
  }
  store_f16(step, scale);
  store_f16(begin, offset);
  return codes;
}

void encode_q4_0(const float* values, float share, std::byte* block) {
  store_halves(codes_around_zero(values, share, 8, block), block + 2);
}

void encode_q4_1(const float* values, float share, std::byte* block) {
  store_halves(codes_from_least(values, share, 15, block, block + 2), block + 4);
}

void encode_q5_0(const float* values, float share, std::byte* block) {
  const Codes codes = codes_around_zero(values, share, 16, block);
  store_fifth_bits(codes, block + 2);
  store_halves(codes, block + 6);
}

void encode_q5_1(const float* values, float share, std::byte* block) {
  const Codes codes = codes_from_least(values, share, 31, block, block + 2);
  store_fifth_bits(codes, block + 4);
  store_halves(codes, block + 8);
}

void encode_q8_0(const float* values, float share, std::byte* block) {
  const float step = within_f16(std::abs(outermost(values)) * share / 127.0F);
  const float inverse = inverse_of(step);
  store_f16(step, block);
  for (int64_t i = 0; i < kElements; ++i) {
    // Halves go away from 0 here.
    const float code = std::clamp(std::round(values[i] * inverse), -127.0F, 127.0F);
    block[2 + i] = static_cast<std::byte>(static_cast<int8_t>(code));
  }
}

// The first of the table, where two numbers are equally near.
template <size_t kCount>
uint8_t nearest_of(const std::array<int8_t, kCount>& table, float value, float step) {
  uint8_t best = 0;
  float least = HUGE_VALF;
  for (size_t code = 0; code < kCount; ++code) {
    const float off = std::abs(step * static_cast<float>(table[code]) - value);
    if (off < least) {
      least = off;
      best = static_cast<uint8_t>(code);
    }
  }
  return best;
}

template <size_t kCount>
Codes codes_of_table(const std::array<int8_t, kCount>& table, const float* values, float step) {
  Codes codes{};
  for (size_t i = 0; i < kElements; ++i) codes[i] = nearest_of(table, values[i], step);
  return codes;
}

// The table is longer below 0, so that the outermost value goes there, whatever its sign. Codes are
// the nearest for the step as it is stored.
void encode_iq4_nl(const float* values, float share, std::byte* block) {
  const float wanted = within_f16(outermost(values) * share / float{kIq4Values.front()});
  store_f16(wanted, block);
  const float step = f16_to_float(float_to_f16(wanted));
  store_halves(codes_of_table(kIq4Values, values, step), block + 2);
}

// The largest code, 6, has an exponent of 2.
void encode_mxfp4(const float* values, float share, std::byte* block) {
  const float largest = std::abs(outermost(values)) * share;
  const float wanted = largest > 0 ? std::floor(std::log2(largest)) + (127.0F - 2.0F) : 0.0F;
  const auto exponent = static_cast<uint32_t>(std::clamp(wanted, 0.0F, 254.0F));
  block[0] = static_cast<std::byte>(exponent);
  const float half =
      std::bit_cast<float>(exponent < 2 ? 0x00200000U << exponent : (exponent - 1) << 23);
  store_halves(codes_of_table(kTwiceE2m1, values, half), block + 1);
}

constexpr std::array kEncoders = {
    BlockEncoder{.type = "Q8_0", .encode = encode_q8_0},
    BlockEncoder{.type = "Q4_0", .encode = encode_q4_0},
    BlockEncoder{.type = "Q4_1", .encode = encode_q4_1},
    BlockEncoder{.type = "Q5_0", .encode = encode_q5_0},
    BlockEncoder{.type = "Q5_1", .encode = encode_q5_1},
    BlockEncoder{.type = "IQ4_NL", .encode = encode_iq4_nl, .grid = kIq4Values},
    BlockEncoder{.type = "MXFP4", .encode = encode_mxfp4, .grid = kE2m1Grid},
};

}  // namespace

std::span<const BlockEncoder> block_encoders() noexcept {
  static const std::vector<BlockEncoder> kAll = [] {
    std::vector<BlockEncoder> all(kEncoders.begin(), kEncoders.end());
    all.insert(all.end(), k_encoders().begin(), k_encoders().end());
    return all;
  }();
  return kAll;
}

const BlockEncoder* find_block_encoder(std::string_view type) noexcept {
  const auto all = block_encoders();
  const auto at = std::ranges::find(all, type, &BlockEncoder::type);
  return at != all.end() ? &*at : nullptr;
}

}  // namespace conclave::inline v0::quant
