// Judges safetensors files for safetensors_differential.py: reads pairs of a 4-byte length and that
// many bytes from standard input, and writes one line of JSON each: the name of an error code, or
// the list of [name, dtype, shape, begin, end].
#include "conclave/error.h"
#include "conclave/safetensors.h"

#include <nlohmann/json.hpp>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>

namespace {

nlohmann::json verdict(const std::string& file) {
  try {
    const auto bytes = std::as_bytes(std::span(file));
    auto tensors = nlohmann::json::array();
    uint64_t header_bytes = 0;
    if (bytes.size() >= sizeof(header_bytes)) {
      std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
    }
    for (const conclave::TensorInfo& tensor :
         conclave::SafetensorsFile::parse_header(bytes, bytes.size(), "input")) {
      const uint64_t begin = tensor.file_offset - sizeof(header_bytes) - header_bytes;
      tensors.push_back({tensor.name, conclave::to_string(tensor.dtype), tensor.shape, begin,
                         begin + tensor.bytes});
    }
    return tensors;
  } catch (const conclave::Error& error) {
    return conclave::to_string(error.code());
  }
}

}  // namespace

int main() {
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
