// Capabilities of the terminal. Nothing else in the tool reads the environment.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace conclave::tool {

// The variable's value; empty if unset.
std::string environment_value(const char* name);

bool is_terminal(std::FILE* stream);
// Whether this is a terminal with colour: NO_COLOR is empty or unset and TERM is not "dumb".
bool shows_color(std::FILE* stream);
// The width of the terminal behind `stream`, or 80 if unknown.
int terminal_columns(std::FILE* stream);

enum class Style : uint8_t { kPlain, kBold, kGood, kBad };
// Returns `text`, with the style's escape codes if `color`.
std::string paint(std::string_view text, Style style, bool color);

// Columns that the UTF-8 text takes on screen.
int display_width(std::string_view text);

}  // namespace conclave::tool
