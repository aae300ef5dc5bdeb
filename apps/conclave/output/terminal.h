// What the terminal can show. The tool's only reader of the environment.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace conclave::tool {

// The variable's value; empty if unset.
std::string environment_value(const char* name);

bool is_terminal(std::FILE* stream);
// A terminal that takes colour: NO_COLOR is empty or unset and TERM is not "dumb".
bool shows_color(std::FILE* stream);
// Of the terminal behind `stream`, 80 where unknown.
int terminal_columns(std::FILE* stream);

enum class Style : uint8_t { kPlain, kBold, kGood, kBad };
// `text` with the style's escape codes if `color`, else unchanged.
std::string paint(std::string_view text, Style style, bool color);

// Columns the UTF-8 text takes on screen.
int display_width(std::string_view text);

}  // namespace conclave::tool
