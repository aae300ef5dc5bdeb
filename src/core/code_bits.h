// Codes of 4, 6 or 8 bits in dense rows: code i is at bit i * bits, the lowest bit first.
#pragma once

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>

namespace conclave::inline v0 {

constexpr uint8_t code_at(const std::byte* row, int64_t index, int64_t bits) {
  if (bits == 8) return static_cast<uint8_t>(row[index]);
  const int64_t first = index * bits;
  auto two = static_cast<unsigned>(row[first / 8]);
  if (first % 8 + bits > 8) two |= static_cast<unsigned>(row[first / 8 + 1]) << 8U;
  return static_cast<uint8_t>(two >> (first % 8) & ((1U << bits) - 1U));
}

constexpr void set_code(std::byte* row, int64_t index, int64_t bits, uint8_t code) {
  if (bits == 8) {
    row[index] = std::byte{code};
    return;
  }
  const int64_t first = index * bits;
  const auto place = static_cast<unsigned>(first % 8);
  const unsigned mask = ((1U << bits) - 1U) << place;
  const unsigned moved = unsigned{code} << place;
  for (int64_t byte = 0; byte * 8 < first % 8 + bits; ++byte) {
    std::byte& out = row[first / 8 + byte];
    out = (out & static_cast<std::byte>(~(mask >> (8 * byte)))) |
          static_cast<std::byte>(moved >> (8 * byte));
  }
}

// The codes after which a code begins a byte again.
constexpr int64_t codes_to_a_byte(int64_t bits) { return 8 / std::gcd(bits, int64_t{8}); }

// Sets `count` codes from code `begin` on. Pairs that fill a byte are not read first.
constexpr void set_codes(std::byte* row, int64_t begin, int64_t count, int64_t bits,
                         const uint8_t* codes) {
  int64_t done = 0;
  if (bits == 4) {
    if (begin % 2 != 0 && count > 0) set_code(row, begin, bits, codes[done++]);
    for (; done + 2 <= count; done += 2) {
      row[(begin + done) / 2] = static_cast<std::byte>(codes[done] | codes[done + 1] << 4);
    }
  }
  for (; done < count; ++done) set_code(row, begin + done, bits, codes[done]);
}

// Copies `count` codes from code `begin` of a row to the begin of another. What is left of the last
// byte becomes 0.
inline void copy_codes(const std::byte* row, int64_t begin, int64_t count, int64_t bits,
                       std::byte* out) {
  if (begin * bits % 8 == 0 && count * bits % 8 == 0) {
    std::memcpy(out, row + begin * bits / 8, static_cast<size_t>(count * bits / 8));
    return;
  }
  if (count * bits % 8 != 0) out[count * bits / 8] = std::byte{0};
  for (int64_t i = 0; i < count; ++i) set_code(out, i, bits, code_at(row, begin + i, bits));
}

}  // namespace conclave::inline v0
