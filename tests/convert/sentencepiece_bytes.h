// Models of SentencePiece as bytes, field by field, for tests that need odd ones.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace conclave::testing {

inline std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  bytes += static_cast<char>(value);
  return bytes;
}

inline std::string number_field(uint32_t field, uint64_t value) {
  return varint(uint64_t{field} << 3) + varint(value);
}

inline std::string bytes_field(uint32_t field, std::string_view bytes) {
  return varint(uint64_t{field} << 3 | 2) + varint(bytes.size()) + std::string(bytes);
}

inline std::string float_field(uint32_t field, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  std::string bytes = varint(uint64_t{field} << 3 | 5);
  for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(bits >> shift);
  return bytes;
}

inline std::string piece_field(std::string_view text, float score, uint64_t kind) {
  return bytes_field(
      1, bytes_field(1, text) + float_field(2, score) + (kind == 1 ? "" : number_field(3, kind)));
}

// Merges by score, tokens for bytes, text as it is but for a space before it: what llama.cpp does.
struct TrainerFields {
  uint64_t algorithm = 2;
  bool spaces_are_suffixes = false;
  bool falls_back_to_bytes = true;
};
inline std::string trainer_field(const TrainerFields& trainer) {
  return bytes_field(2, number_field(3, trainer.algorithm) +
                            number_field(24, trainer.spaces_are_suffixes ? 1 : 0) +
                            number_field(35, trainer.falls_back_to_bytes ? 1 : 0));
}

struct NormalizerFields {
  std::string_view characters = {};
  bool adds_prefix = true;
  bool removes_extra_spaces = false;
  bool escapes_spaces = true;
};
inline std::string normalizer_field(const NormalizerFields& normalizer) {
  return bytes_field(3, bytes_field(2, normalizer.characters) +
                            number_field(3, normalizer.adds_prefix ? 1 : 0) +
                            number_field(4, normalizer.removes_extra_spaces ? 1 : 0) +
                            number_field(5, normalizer.escapes_spaces ? 1 : 0));
}

}  // namespace conclave::testing
