// Judges GGUF files for gguf_differential.py with one line of JSON each: the name of an error code,
// or the lists of [key, kind, value] and of [name, type, shape, offset, bytes].
#include "io/gguf/header.h"
#include "io/gguf_bytes.h"
#include "io/verdicts.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

namespace {

using conclave::io::GgufArray;
using nlohmann::json;

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return text;
}

// Numbers as their bits, so that NaN and signs of zero are compared, too.
uint64_t bits(double number) { return std::bit_cast<uint64_t>(number); }

json kind_and_value(const conclave::io::GgufValue& value) {
  struct Visitor {
    json operator()(uint64_t number) const { return {"integer", number}; }
    json operator()(int64_t number) const { return {"integer", number}; }
    json operator()(double number) const { return {"float", bits(number)}; }
    json operator()(bool flag) const { return {"bool", flag}; }
    json operator()(const std::string& text) const { return {"string", hex(text)}; }
    json operator()(const GgufArray& array) const {
      if (!array.of_numbers) return {"strings", array.count};
      json numbers = json::array();
      for (const double number : array.numbers) numbers.push_back(bits(number));
      return {"numbers", numbers};
    }
  };
  return std::visit(Visitor{}, value);
}

json verdict(const std::string& file) {
  try {
    const conclave::io::GgufHeader header = conclave::testing::parse_gguf(file);
    json entries = json::array();
    for (const conclave::io::GgufEntry& entry : header.entries) {
      const json value = kind_and_value(entry.value);
      entries.push_back({entry.key, value[0], value[1]});
    }
    json tensors = json::array();
    for (const conclave::io::GgufTensor& tensor : header.tensors) {
      tensors.push_back(
          {tensor.name, tensor.type->name, tensor.shape(), tensor.file_offset, tensor.bytes});
    }
    return {entries, tensors};
  } catch (const conclave::Error& error) {
    return conclave::to_string(error.code());
  }
}

}  // namespace

int main() { return conclave::testing::judge_input(verdict); }
