// Rows of bytes become columns, eight by eight in registers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace conclave::inline v0 {

inline constexpr int64_t kByteSquare = 8;

// Eight rows of eight bytes, transposed: blocks of four bytes change places, then of two, then of
// one.
class ByteSquare {
 public:
  // The rows lie `stride` bytes apart.
  ByteSquare(const std::byte* from, int64_t stride) {
    for (int64_t row = 0; row < kByteSquare; ++row) {
      std::memcpy(&rows_[row], from + row * stride, sizeof(uint64_t));
    }
    exchange<4>(0x00000000ffffffffU);
    exchange<2>(0x0000ffff0000ffffU);
    exchange<1>(0x00ff00ff00ff00ffU);
  }
  void store(int64_t column, std::byte* to) const {
    std::memcpy(to, &rows_[column], sizeof(uint64_t));
  }

 private:
  static_assert(std::endian::native == std::endian::little);

  template <int kBytes>
  void exchange(uint64_t low) {
    for (int row = 0; row < kByteSquare; ++row) {
      if ((row & kBytes) != 0) continue;
      uint64_t& above = rows_[row];
      uint64_t& below = rows_[row + kBytes];
      const uint64_t changed = (above >> (8 * kBytes) ^ below) & low;
      below ^= changed;
      above ^= changed << (8 * kBytes);
    }
  }

  uint64_t rows_[kByteSquare];
};

}  // namespace conclave::inline v0
