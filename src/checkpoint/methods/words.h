// Codes that fill words of 32 bits, the lowest bits first, and how they become canonical ones.
#pragma once

#include "checkpoint/methods/inputs.h"
#include "checkpoint/methods/method.h"
#include "core/code_bits.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0::checkpoint {

inline constexpr int64_t kWordBits = 32;
inline constexpr std::array kWordTypes = {DType::kI32, DType::kU32};
inline constexpr std::array kSignedByteTypes = {DType::kI8};

inline uint32_t word_at(std::span<const std::byte> words, int64_t index) {
  return value_at<uint32_t>(words, index);
}

// Code `index` of a line of words, of which `word(i)` is number i: code i is at bit i * bits, and
// may lie in two words.
template <class Word>
uint32_t code_in_line(const Word& word, int64_t index, int64_t bits) {
  const int64_t bit = index * bits;
  const int64_t at = bit % kWordBits;
  uint32_t code = word(bit / kWordBits) >> at;
  if (at + bits > kWordBits) code |= word(bit / kWordBits + 1) << (kWordBits - at);
  return code & ((uint32_t{1} << bits) - 1);
}

// The way back: adds a code to a line of words that begins as 0, of which word i is number
// `first` + i * `stride`.
inline void put_in_line(std::span<std::byte> words, int64_t first, int64_t stride, int64_t index,
                        int64_t bits, uint32_t code) {
  const int64_t bit = index * bits;
  const int64_t at = bit % kWordBits;
  const auto add = [&](int64_t i, uint32_t part) {
    const int64_t place = first + i * stride;
    const uint32_t word = word_at(words, place) | part;
    std::memcpy(words.data() + place * static_cast<int64_t>(sizeof(word)), &word, sizeof(word));
  };
  add(bit / kWordBits, code << at);
  if (at + bits > kWordBits) add(bit / kWordBits + 1, code >> (kWordBits - at));
}

// The number that stands for zero in unsigned codes of so many bits, where none is stored.
constexpr int64_t middle_of(int64_t bits) { return int64_t{1} << (bits - 1); }

// Canonical integer codes are of half a byte or a byte, and stand for the stored code less the
// middle one.
constexpr DType integer_type(int64_t bits) { return bits <= 4 ? DType::kI4 : DType::kI8; }
constexpr int64_t integer_bits(int64_t bits) { return bits <= 4 ? 4 : 8; }
inline void set_integer(std::byte* plane, int64_t index, int64_t bits, uint32_t code) {
  const int64_t value = static_cast<int64_t>(code) - middle_of(bits);
  const int64_t canonical = integer_bits(bits) == 4 ? value + middle_of(4) : value;
  set_code(plane, index, integer_bits(bits), static_cast<uint8_t>(canonical));
}

// The way back: the stored code of a canonical one.
inline uint32_t stored_integer(const std::byte* plane, int64_t index, int64_t bits) {
  const uint8_t canonical = code_at(plane, index, integer_bits(bits));
  const int64_t value = integer_bits(bits) == 4
                            ? canonical - middle_of(4)
                            : static_cast<int64_t>(static_cast<int8_t>(canonical));
  return static_cast<uint32_t>(value + middle_of(bits));
}

// Bytes of 8-bit codes with a sign from those without one, and the reverse.
void flip_signs(std::span<std::byte> bytes);

// The type of integer codes of at most 8 bits. Throws NotRead for other numbers of bits.
DType checked_integer_type(int64_t bits);

}  // namespace conclave::inline v0::checkpoint
