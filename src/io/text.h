// Text helpers shared by the parsers.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::inline v0::io {

// Offset of the first byte that is not part of well-formed UTF-8 (no overlong forms, no
// surrogates, nothing above U+10FFFF); nothing if all of `text` is well-formed.
std::optional<size_t> find_invalid_utf8(std::string_view text) noexcept;

// `text` made safe to show: quoted, control characters and bytes that are not UTF-8 escaped, long
// texts cut.
std::string show_text(std::string_view text);

// A name as it is where it is short and fit to show, else as show_text.
std::string show_name(std::string_view name);

}  // namespace conclave::inline v0::io
