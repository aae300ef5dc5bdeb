#include "io/json_cursor.h"

#include "io/text.h"

#include <fmt/format.h>

#include <charconv>
#include <cstring>

namespace conclave::inline v0::io {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The value of four hexadecimal digits, which the cursor has checked.
uint32_t hex4(std::string_view digits) {
  uint32_t value = 0;
  std::from_chars(digits.data(), digits.data() + 4, value, 16);
  return value;
}

size_t encode_utf8(uint32_t code_point, char* out) {
  const auto put = [&](size_t i, uint32_t byte) {
    out[i] = static_cast<char>(static_cast<unsigned char>(byte));
  };
  if (code_point < 0x80) {
    put(0, code_point);
    return 1;
  }
  if (code_point < 0x800) {
    put(0, 0xC0 | (code_point >> 6));
    put(1, 0x80 | (code_point & 0x3F));
    return 2;
  }
  if (code_point < 0x10000) {
    put(0, 0xE0 | (code_point >> 12));
    put(1, 0x80 | ((code_point >> 6) & 0x3F));
    put(2, 0x80 | (code_point & 0x3F));
    return 3;
  }
  put(0, 0xF0 | (code_point >> 18));
  put(1, 0x80 | ((code_point >> 12) & 0x3F));
  put(2, 0x80 | ((code_point >> 6) & 0x3F));
  put(3, 0x80 | (code_point & 0x3F));
  return 4;
}

char simple_escape(char letter) {
  switch (letter) {
    case 'b':
      return '\b';
    case 'f':
      return '\f';
    case 'n':
      return '\n';
    case 'r':
      return '\r';
    case 't':
      return '\t';
    default:
      return letter;
  }
}

// Decodes the \u escape, or the pair of them, that starts `raw`; advances `used` past it.
std::optional<uint32_t> decode_unicode_escape(std::string_view raw, size_t& used) {
  const uint32_t first = hex4(raw.substr(2));
  used = 6;
  if (first < 0xD800 || first > 0xDFFF) return first;
  if (first > 0xDBFF || raw.size() < 12 || raw[6] != '\\' || raw[7] != 'u') return std::nullopt;
  const uint32_t second = hex4(raw.substr(8));
  if (second < 0xDC00 || second > 0xDFFF) return std::nullopt;
  used = 12;
  return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
}

}  // namespace

void JsonCursor::fail(std::string what) const {
  throw Error(code_,
              {.what = fmt::format("{} at byte {}", what, offset()),
               .file = std::string(file_),
               .found = at_ < text_.size() ? show_text(text_.substr(at_, 24)) : "end of text"});
}

void JsonCursor::skip_space() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return;
    ++at_;
  }
}

std::optional<char> JsonCursor::peek() {
  skip_space();
  if (at_ == text_.size()) return std::nullopt;
  return text_[at_];
}

bool JsonCursor::try_consume(char wanted) {
  if (peek() != wanted) return false;
  ++at_;
  return true;
}

void JsonCursor::expect(char wanted, std::string_view where) {
  if (!try_consume(wanted)) fail(fmt::format("'{}' is missing {}", wanted, where));
}

void JsonCursor::skip_escape() {
  if (at_ + 1 >= text_.size()) fail("a string does not end");
  const char letter = text_[at_ + 1];
  if (letter != 'u') {
    if (std::string_view("\"\\/bfnrt").find(letter) == std::string_view::npos) {
      fail("an unknown escape in a string");
    }
    at_ += 2;
    return;
  }
  for (size_t i = 2; i < 6; ++i) {
    const char c = at_ + i < text_.size() ? text_[at_ + i] : '\0';
    if (!is_digit(c) && !(c >= 'a' && c <= 'f') && !(c >= 'A' && c <= 'F')) {
      fail("\\u wants four hexadecimal digits");
    }
  }
  at_ += 6;
}

JsonString JsonCursor::string(std::string_view where) {
  expect('"', where);
  const size_t begin = at_;
  bool has_escapes = false;
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c == '"') {
      const std::string_view raw = text_.substr(begin, at_ - begin);
      ++at_;
      return {raw, has_escapes};
    }
    if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
    if (c == '\\') {
      has_escapes = true;
      skip_escape();
    } else {
      ++at_;
    }
  }
  fail("a string does not end");
}

bool JsonCursor::skip_digits() {
  const size_t begin = at_;
  while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
  return at_ != begin;
}

JsonNumber JsonCursor::number() {
  skip_space();
  const size_t begin = at_;
  const auto next_is = [&](char c) { return at_ < text_.size() && text_[at_] == c; };
  if (next_is('-')) ++at_;
  const size_t digits = at_;
  if (!skip_digits()) fail("a value is missing or malformed");
  if (text_[digits] == '0' && at_ - digits > 1) fail("a number with a leading zero");
  bool is_integer = true;
  if (next_is('.')) {
    is_integer = false;
    ++at_;
    if (!skip_digits()) fail("digits are missing after the point");
  }
  if (next_is('e') || next_is('E')) {
    is_integer = false;
    ++at_;
    if (next_is('+') || next_is('-')) ++at_;
    if (!skip_digits()) fail("digits are missing in the exponent");
  }
  return {text_.substr(begin, at_ - begin), is_integer};
}

bool JsonCursor::try_literal(std::string_view word) {
  skip_space();
  if (!text_.substr(at_).starts_with(word)) return false;
  at_ += word.size();
  return true;
}

void JsonCursor::expect_end() {
  if (peek()) fail("text after the end of the document");
}

std::optional<size_t> decode_json_string(std::string_view raw, char* out) noexcept {
  size_t size = 0;
  while (!raw.empty()) {
    size_t used = 1;
    if (raw[0] != '\\') {
      const size_t plain = std::min(raw.find('\\'), raw.size());
      std::memmove(out + size, raw.data(), plain);
      size += plain;
      used = plain;
    } else if (raw[1] != 'u') {
      out[size++] = simple_escape(raw[1]);
      used = 2;
    } else {
      const std::optional<uint32_t> code_point = decode_unicode_escape(raw, used);
      if (!code_point) return std::nullopt;
      size += encode_utf8(*code_point, out + size);
    }
    raw.remove_prefix(used);
  }
  return size;
}

namespace {

template <class Value>
std::optional<Value> parse_integer(const JsonNumber& number) {
  Value value{};
  const char* end = number.text.data() + number.text.size();
  const auto [rest, status] = std::from_chars(number.text.data(), end, value);
  if (!number.is_integer || status != std::errc{} || rest != end) return std::nullopt;
  return value;
}

}  // namespace

std::optional<int64_t> to_int64(const JsonNumber& number) noexcept {
  return parse_integer<int64_t>(number);
}

std::optional<uint64_t> to_uint64(const JsonNumber& number) noexcept {
  return parse_integer<uint64_t>(number);
}

std::optional<double> to_double(const JsonNumber& number) noexcept {
  double value = 0;
  const char* end = number.text.data() + number.text.size();
  const auto [rest, status] = std::from_chars(number.text.data(), end, value);
  if (rest != end || status == std::errc::invalid_argument) return std::nullopt;
  if (status == std::errc{}) return value;
  // from_chars calls both ends out of range, but a vanishing number is zero and a huge one an
  // error.
  const bool vanishes = number.text.find("e-") != std::string_view::npos ||
                        number.text.find("E-") != std::string_view::npos ||
                        number.text.starts_with("0.") || number.text.starts_with("-0.");
  if (!vanishes) return std::nullopt;
  return number.text.starts_with('-') ? -0.0 : 0.0;
}

}  // namespace conclave::inline v0::io
