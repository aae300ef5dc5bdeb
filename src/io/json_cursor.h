// Walks over JSON text token by token (RFC 8259, nothing more), for JsonDocument and the
// safetensors header. Holds no tree and allocates nothing until it fails.
#pragma once

#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::inline v0::io {

// A string literal as it appears between the quotes.
struct JsonString {
  std::string_view raw;
  bool has_escapes = false;
};

// A number literal; `is_integer` if it has neither fraction nor exponent.
struct JsonNumber {
  std::string_view text;
  bool is_integer = false;
};

class JsonCursor {
 public:
  // The text must be UTF-8. Failures throw Error(code) with `file` and the byte offset, counted
  // from `first_offset`.
  JsonCursor(std::string_view text, ErrorCode code, std::string_view file, size_t first_offset = 0)
      : text_(text), code_(code), file_(file), first_offset_(first_offset) {}

  // The next character after white space, not consumed; nothing at the end.
  std::optional<char> peek();
  bool try_consume(char wanted);
  void expect(char wanted, std::string_view where);
  JsonString string(std::string_view where);
  JsonNumber number();
  // Consumes `word` if the text continues with it.
  bool try_literal(std::string_view word);
  void expect_end();

  size_t offset() const noexcept { return first_offset_ + at_; }
  [[noreturn]] void fail(std::string what) const;

 private:
  void skip_space();
  void skip_escape();
  bool skip_digits();

  std::string_view text_;
  ErrorCode code_;
  std::string_view file_;
  size_t first_offset_;
  size_t at_ = 0;
};

// Writes the decoded text of `raw` to `out`, which may be `raw`'s own memory: decoded text is never
// longer. Returns its size; nothing if an escape is half of a surrogate pair.
std::optional<size_t> decode_json_string(std::string_view raw, char* out) noexcept;

// The exact value of an integer literal; nothing if it does not fit. "-0" is 0 for int64 and
// nothing for uint64, which takes digits only.
std::optional<int64_t> to_int64(const JsonNumber& number) noexcept;
std::optional<uint64_t> to_uint64(const JsonNumber& number) noexcept;
// The nearest double; nothing beyond its range.
std::optional<double> to_double(const JsonNumber& number) noexcept;

}  // namespace conclave::inline v0::io
