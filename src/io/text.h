// Text helpers shared by the parsers.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::inline v0::io {

// Offset of the first byte that is not part of well-formed UTF-8 (no overlong forms, no surrogates,
// nothing above U+10FFFF); nothing if all of `text` is well-formed.
std::optional<size_t> find_invalid_utf8(std::string_view text) noexcept;

// Whether a character of `text` is a control character of ASCII, NUL and DEL among them.
bool has_control_character(std::string_view text) noexcept;
// Whether names of keys and tensors may be this: they are shown and compared, so that they must be
// UTF-8 without control characters.
bool is_plain_text(std::string_view text) noexcept;

// Returns `text` in a form that is safe to show: quoted, with control characters and bytes that are
// not UTF-8 escaped; long texts are cut.
std::string show_text(std::string_view text);

// Returns a name unchanged if it is short and safe to show, otherwise as show_text.
std::string show_name(std::string_view name);

}  // namespace conclave::inline v0::io
