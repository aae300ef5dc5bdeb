#include "checkpoint/methods/words.h"

#include <fmt/format.h>

namespace conclave::inline v0::checkpoint {

void flip_signs(std::span<std::byte> bytes) {
  for (std::byte& byte : bytes) byte ^= std::byte{0x80};
}

DType checked_integer_type(int64_t bits) {
  if (bits >= 2 && bits <= 8) return integer_type(bits);
  throw NotRead{fmt::format("int codes of {} bits", bits)};
}

}  // namespace conclave::inline v0::checkpoint
