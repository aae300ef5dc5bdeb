#include "fuzz/harness.h"
#include "fuzz/promises.h"
#include "io/safetensors_rules.h"

#include "conclave/safetensors.h"

#include <nlohmann/json.hpp>

#include <set>
#include <string>

namespace conclave::testing {
namespace {

__extension__ using Uint128 = unsigned __int128;

// Bytes of a tensor, in wider arithmetic than the reader's own; nothing beyond 2^126.
std::optional<Uint128> wide_bytes(const TensorInfo& tensor) {
  Uint128 bits = static_cast<Uint128>(bit_size(tensor.dtype));
  for (const int64_t dim : tensor.shape) {
    if (dim == 0) return 0;
  }
  for (const int64_t dim : tensor.shape) {
    if (bits >> 63 != 0) return std::nullopt;
    bits *= static_cast<Uint128>(dim);
  }
  return bits / 8;
}

// Checks that the tensors cover the data exactly and agree with their own shapes.
void check_accepted(std::span<const std::byte> input, uint64_t file_bytes,
                    const std::vector<TensorInfo>& tensors, size_t metadata_entries) {
  const uint64_t header_bytes = io::safetensors_header_bytes(input, file_bytes, "fuzz");
  uint64_t end = io::kLengthBytes + header_bytes;
  std::set<std::string> names;
  for (const TensorInfo& tensor : tensors) {
    promise(names.insert(tensor.name).second);
    promise(tensor.file_offset == end);
    promise(wide_bytes(tensor) == tensor.bytes);
    end += tensor.bytes;
  }
  promise(end == file_bytes);
  // Another parser must find the same number of entries.
  const auto* text = reinterpret_cast<const char*>(input.data()) + io::kLengthBytes;
  const nlohmann::json json = nlohmann::json::parse(text, text + header_bytes, nullptr, false);
  promise(json.is_object());
  promise(json.size() == tensors.size() + (json.contains("__metadata__") ? 1 : 0));
  if (json.contains("__metadata__")) {
    promise(json["__metadata__"].size() == metadata_entries);
  } else {
    promise(metadata_entries == 0);
  }
}

}  // namespace

void fuzz_safetensors_header(std::span<const std::byte> input) {
  const auto parse = [&](uint64_t file_bytes) {
    return expect_value_or_error([&] {
      std::map<std::string, std::string> metadata;
      const std::vector<TensorInfo> tensors =
          SafetensorsFile::parse_header(input, file_bytes, "fuzz.safetensors", &metadata);
      check_accepted(input, file_bytes, tensors, metadata.size());
    });
  };
  const std::optional<ErrorCode> code = parse(input.size());
  // The header is sound but has too little data behind it: the last byte now decides the file size.
  if (code == ErrorCode::kSafetensorsTruncatedData) {
    parse(input.size() + std::to_integer<uint64_t>(input.back()));
  }
}

}  // namespace conclave::testing
