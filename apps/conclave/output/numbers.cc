#include "output/numbers.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

namespace conclave::tool {
namespace {

std::string scaled(uint64_t value, double step, const std::array<const char*, 6>& units) {
  if (value < 1000) return fmt::format("{}{}", value, units[0]);
  double scaled_value = static_cast<double>(value);
  size_t unit = 0;
  // 999.5 rounds to four digits, which belong to the next unit.
  while (scaled_value >= 999.5 && unit + 1 < units.size()) {
    scaled_value /= step;
    ++unit;
  }
  const int decimals = scaled_value < 9.995 ? 2 : scaled_value < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f}{}", scaled_value, decimals, units[unit]);
}

}  // namespace

std::string bytes_text(uint64_t bytes) {
  return scaled(bytes, 1000, {" B", " kB", " MB", " GB", " TB", " PB"});
}

std::string binary_bytes_text(uint64_t bytes) {
  return scaled(bytes, 1024, {" B", " KiB", " MiB", " GiB", " TiB", " PiB"});
}

std::string count_text(uint64_t count) {
  return scaled(count, 1000, {"", " k", " M", " B", " T", " Q"});
}

std::string ms_text(double ms) {
  const int decimals = ms < 0.1 ? 4 : ms < 100.0 ? 3 : 1;
  return fmt::format("{:.{}f}", ms, decimals);
}

std::string error_text(double error) { return fmt::format("{:.1e}", error); }

std::string percent_text(double share) { return fmt::format("{:.0f} %", 100.0 * share); }

}  // namespace conclave::tool
