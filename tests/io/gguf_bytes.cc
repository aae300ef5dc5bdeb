#include "io/gguf_bytes.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

namespace conclave::testing {

std::string gguf_text(std::string_view text) {
  return little_endian(uint64_t{text.size()}) + std::string(text);
}

std::string gguf_entry(std::string_view key, uint32_t type, std::string_view value) {
  return gguf_text(key) + little_endian(type) + std::string(value);
}

std::string gguf_array(uint32_t type, uint64_t count, std::string_view elements) {
  return little_endian(type) + little_endian(count) + std::string(elements);
}

std::string gguf_tensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
                        uint64_t offset) {
  std::string bytes = gguf_text(name) + little_endian(static_cast<uint32_t>(dims.size()));
  for (const uint64_t dim : dims) bytes += little_endian(dim);
  return bytes + little_endian(type) + little_endian(offset);
}

std::string gguf_header(const GgufParts& parts) {
  std::string header = "GGUF" + little_endian(parts.version);
  header += little_endian(parts.num_tensors.value_or(parts.tensors.size()));
  header += little_endian(parts.num_entries.value_or(parts.entries.size()));
  for (const std::string& entry : parts.entries) header += entry;
  for (const std::string& tensor : parts.tensors) header += tensor;
  return header;
}

std::string gguf(const GgufParts& parts) {
  std::string file = gguf_header(parts);
  file.resize((file.size() + parts.alignment - 1) / parts.alignment * parts.alignment, '\0');
  for (size_t i = 0; i < parts.data_bytes; ++i) file += static_cast<char>(i * 37 + 11);
  return file;
}

GgufParts large_gguf(size_t count, size_t keys) {
  GgufParts parts = {.data_bytes = 32 * count};
  for (size_t i = 0; i < keys; ++i) {
    parts.entries.push_back(
        gguf_entry(fmt::format("model.layers.{}.experts.{}.count", i / 128, i % 128), kGgufU32,
                   static_cast<uint32_t>(i)));
  }
  for (size_t i = 0; i < count; ++i) {
    parts.tensors.push_back(gguf_tensor(fmt::format("blk.{}.ffn_down.{}.weight", i / 128, i % 128),
                                        {1, 1}, kTypeF32, 32 * i));
  }
  return parts;
}

io::ReadBytes reader_of(std::string_view file) {
  return [file](uint64_t offset, std::span<std::byte> destination) {
    std::ranges::fill(destination, std::byte{0});
    if (offset >= file.size()) return;
    const std::string_view part = file.substr(offset, destination.size());
    std::memcpy(destination.data(), part.data(), part.size());
  };
}

io::GgufHeader parse_gguf(std::string_view file) {
  return io::parse_gguf_header(reader_of(file), file.size(), "model.gguf");
}

}  // namespace conclave::testing
