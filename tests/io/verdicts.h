// The loop of the programs that judge files for gguf_differential.py and
// safetensors_differential.py.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>

namespace conclave::testing {

// Reads pairs of a 4-byte length and that many bytes from standard input, and writes a line of
// `verdict(file)` each. Returns the program's exit status.
template <class Verdict>
int judge_input(const Verdict& verdict) {
  static_assert(std::endian::native == std::endian::little);
  std::ios::sync_with_stdio(false);
  std::array<char, sizeof(uint32_t)> prefix{};
  while (std::cin.read(prefix.data(), prefix.size())) {
    uint32_t bytes = 0;
    std::memcpy(&bytes, prefix.data(), prefix.size());
    std::string file(bytes, '\0');
    if (!std::cin.read(file.data(), bytes)) return 1;
    std::cout << verdict(file) << '\n';
  }
  return 0;
}

}  // namespace conclave::testing
