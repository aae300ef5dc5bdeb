#include "output/terminal.h"

#include <algorithm>
#include <cstdlib>
#include <sys/ioctl.h>
#include <unistd.h>

namespace conclave::tool {

std::string environment_value(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

bool is_terminal(std::FILE* stream) { return ::isatty(::fileno(stream)) == 1; }

bool shows_color(std::FILE* stream) {
  return is_terminal(stream) && environment_value("NO_COLOR").empty() &&
         environment_value("TERM") != "dumb";
}

int terminal_columns(std::FILE* stream) {
  constexpr int kDefaultColumns = 80;
  winsize size{};
  if (::ioctl(::fileno(stream), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kDefaultColumns;
  return size.ws_col;
}

std::string paint(std::string_view text, Style style, bool color) {
  const char* code = nullptr;
  switch (style) {
    case Style::kPlain:
      break;
    case Style::kBold:
      code = "\x1b[1m";
      break;
    case Style::kGood:
      code = "\x1b[32m";
      break;
    case Style::kBad:
      code = "\x1b[1;31m";
      break;
  }
  if (!color || code == nullptr) return std::string(text);
  return code + std::string(text) + "\x1b[0m";
}

int display_width(std::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  }));
}

}  // namespace conclave::tool
