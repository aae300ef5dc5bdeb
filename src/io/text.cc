#include "io/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace conclave::inline v0::io {
namespace {

constexpr size_t kMaxShown = 160;

bool is_continuation(unsigned char byte) { return (byte & 0xC0) == 0x80; }

// Length in bytes of the well-formed sequence that starts `text`; 0 if there is none.
size_t sequence_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t bytes = lead >= 0xC2 && lead <= 0xDF ? 2 : lead >= 0xE0 && lead <= 0xEF ? 3 : 4;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if (!is_continuation(byte(i))) return 0;
  }
  // The second byte's range excludes overlong forms, surrogates and values above U+10FFFF.
  const unsigned char second = byte(1);
  if (lead == 0xE0 && second < 0xA0) return 0;
  if (lead == 0xED && second > 0x9F) return 0;
  if (lead == 0xF0 && second < 0x90) return 0;
  if (lead == 0xF4 && second > 0x8F) return 0;
  return bytes;
}

}  // namespace

std::optional<size_t> find_invalid_utf8(std::string_view text) noexcept {
  constexpr uint64_t kHighBits = 0x8080'8080'8080'8080;
  size_t at = 0;
  while (at < text.size()) {
    uint64_t word = 0;
    if (text.size() - at >= sizeof(word)) {
      std::memcpy(&word, text.data() + at, sizeof(word));
      if ((word & kHighBits) == 0) {
        at += sizeof(word);
        continue;
      }
    }
    const size_t bytes = sequence_bytes(text.substr(at));
    if (bytes == 0) return at;
    at += bytes;
  }
  return std::nullopt;
}

bool has_control_character(std::string_view text) noexcept {
  return std::ranges::any_of(
      text, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; });
}

bool is_plain_text(std::string_view text) noexcept {
  return !has_control_character(text) && !find_invalid_utf8(text);
}

std::string show_text(std::string_view text) {
  std::string shown = "\"";
  size_t at = 0;
  while (at < text.size() && at < kMaxShown) {
    const auto byte = static_cast<unsigned char>(text[at]);
    const size_t bytes = sequence_bytes(text.substr(at));
    if (bytes == 0 || byte < 0x20 || byte == 0x7F) {
      shown += fmt::format("\\x{:02x}", byte);
      ++at;
      continue;
    }
    if (byte == '"' || byte == '\\') shown += '\\';
    shown += text.substr(at, bytes);
    at += bytes;
  }
  shown += '"';
  if (at < text.size()) shown += fmt::format(" ... ({} bytes)", text.size());
  return shown;
}

std::string show_name(std::string_view name) {
  constexpr size_t kLongestName = 200;
  const bool fits = name.size() <= kLongestName && is_plain_text(name);
  return fits ? std::string(name) : show_text(name);
}

}  // namespace conclave::inline v0::io
