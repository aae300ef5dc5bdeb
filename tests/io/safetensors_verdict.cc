// Judges safetensors files for safetensors_differential.py with one line of JSON each: the name of
// an error code, or the list of [name, dtype, shape, begin, end].
#include "io/verdicts.h"

#include "conclave/error.h"
#include "conclave/safetensors.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstring>
#include <span>
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

int main() { return conclave::testing::judge_input(verdict); }
