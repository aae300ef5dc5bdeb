// Codes of 4 or 8 bits in dense rows: code i is at bit i * bits, the lowest bit first.
#pragma once

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace conclave::inline v0 {

constexpr uint8_t code_at(const std::byte* row, int64_t index, int64_t bits) {
  if (bits == 8) return static_cast<uint8_t>(row[index]);
  const auto pair = static_cast<uint8_t>(row[index / 2]);
  return index % 2 == 0 ? pair & 0xfU : pair >> 4;
}

constexpr void set_code(std::byte* row, int64_t index, int64_t bits, uint8_t code) {
  if (bits == 8) {
    row[index] = std::byte{code};
    return;
  }
  const auto pair = static_cast<uint8_t>(row[index / 2]);
  const int kept = index % 2 == 0 ? (pair & 0xf0) | code : (pair & 0xf) | code << 4;
  row[index / 2] = static_cast<std::byte>(kept);
}

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
  if (count % 2 != 0) out[count / 2] = std::byte{0};
  for (int64_t i = 0; i < count; ++i) set_code(out, i, bits, code_at(row, begin + i, bits));
}

}  // namespace conclave::inline v0
