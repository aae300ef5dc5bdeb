// The order in which a GPU holds codes of 4 bits for tensor cores: a thread finds its codes of 64
// columns side by side, and four pairs of them in a word lie so that few instructions move them to
// where bf16 has its bits.
#pragma once

#include <cstdint>

namespace conclave::inline v0::experts {

// kLanesOfFloats: codes of e2m1; kLanesOfNumbers: codes that stand for whole numbers in their
// order; kLanesOfPairs: codes of any values, which a table has in pairs.
// kLanesOfSmallNumbers: whole numbers from 0 to 3 in their order, which take two bits.
enum class CodeOrder : uint8_t {
  kStored,
  kLanesOfFloats,
  kLanesOfNumbers,
  kLanesOfPairs,
  kLanesOfSmallNumbers,
};
// Bits of a code that has `bits` where it is stored.
constexpr int64_t code_bits(CodeOrder order, int64_t bits) {
  return order == CodeOrder::kLanesOfSmallNumbers ? 2 : bits;
}

// Lane 4 r + p of a warp has columns 2 p, 2 p + 1, 2 p + 8 and 2 p + 9 of each 16 in its A operand.
// So the 32 bytes of 64 columns are two words for each p, and each word has those of 32 columns:
// the lower half the even ones, the upper half the odd ones.
inline constexpr int64_t kLaneColumns = 64;
inline constexpr int64_t kWordColumns = 32;

struct LanePlace {
  int32_t word = 0;  // one of the eight that 64 columns have
  int32_t half = 0;
  int32_t pair = 0;  // one of the four that a word has
};
constexpr LanePlace lane_place(int32_t column) {
  const int32_t step = column / 16;
  return {.word = column % 8 / 2 * 2 + step / 2,
          .half = column % 2,
          .pair = step % 2 * 2 + column % 16 / 8};
}

// A code of e2m1 is a sign, two bits of exponent and one of mantissa. Pair i of a half has its sign
// at bit 15, 12, 14 or 13, and the others from bit 6, 3, 9 or 0 on; bf16 numbers have them at 15
// and 6.
constexpr int32_t lane_sign_bit(const LanePlace& place) {
  return 16 * place.half + (0xdecf >> (4 * place.pair) & 0xf);
}
constexpr int32_t lane_low_bit(const LanePlace& place) {
  return 16 * place.half + (0x0936 >> (4 * place.pair) & 0xf);
}
// A number's bits stay together; the words' lower bytes are numbers of bf16 with 2^-133 as unit.
constexpr int32_t lane_number_bit(const LanePlace& place) {
  return 16 * place.half + 4 * place.pair;
}

// A pair is a byte, as tables of two codes' values are looked up.
constexpr int32_t lane_pair_bit(const LanePlace& place) { return 8 * place.pair + 4 * place.half; }

// Small numbers of 64 columns are a word for each p: two bits of each half's lower byte, and of its
// upper one, have the numbers of each 16 columns.
inline constexpr int64_t kSmallWordColumns = 16;  // as they are stored
constexpr int32_t small_lane_word(int32_t column) { return column % 8 / 2; }
constexpr int32_t small_lane_bit(int32_t column) {
  return 16 * (column % 2) + 8 * (column % 16 / 8) + 2 * (column / 16);
}

// The place of a column's code among those of its 32 columns, in rows of codes of a byte that are
// multiplied by such weights: a word of these becomes eight bytes, of which the even columns' come
// first, in the order in which pairs have their bits.
constexpr int32_t lane_byte(int32_t column) {
  const LanePlace place = lane_place(column);
  return column % 8 / 2 * 8 + 4 * place.half + (0x0312 >> (4 * place.pair) & 0xf);
}

// The bits of a code at its place in a word, and the code at a place.
template <CodeOrder kOrder>
constexpr uint32_t lane_bits(const LanePlace& place, uint32_t code) {
  static_assert(kOrder != CodeOrder::kStored);
  if constexpr (kOrder == CodeOrder::kLanesOfNumbers) return code << lane_number_bit(place);
  if constexpr (kOrder == CodeOrder::kLanesOfPairs) return code << lane_pair_bit(place);
  return (code >> 3) << lane_sign_bit(place) | (code & 7U) << lane_low_bit(place);
}
template <CodeOrder kOrder>
constexpr uint32_t lane_code(const LanePlace& place, uint32_t word) {
  static_assert(kOrder != CodeOrder::kStored);
  if constexpr (kOrder == CodeOrder::kLanesOfNumbers) return word >> lane_number_bit(place) & 0xfU;
  if constexpr (kOrder == CodeOrder::kLanesOfPairs) return word >> lane_pair_bit(place) & 0xfU;
  return (word >> lane_sign_bit(place) & 1U) << 3 | (word >> lane_low_bit(place) & 7U);
}

}  // namespace conclave::inline v0::experts
