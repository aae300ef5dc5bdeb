// A tensor of a GGUF model, and where its bytes are: in a part of a file, or in memory.
#pragma once

#include "io/gguf/file.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace conclave::inline v0::checkpoint {

struct GgufPlace {
  const io::GgufTensor* tensor = nullptr;
  const io::GgufFile::Part* part = nullptr;  // null for a tensor that is in no file
  std::span<const std::byte> bytes = {};     // empty before they have come, and in a file

  explicit operator bool() const noexcept { return tensor != nullptr; }
  bool is_in_file() const noexcept { return part != nullptr; }

  // Copies bytes [offset, offset + destination.size()) of the tensor. Throws as GgufFile::read.
  void read(uint64_t offset, std::span<std::byte> destination) const;
  // The tensor's bytes; empty if they are not in memory.
  std::span<const std::byte> in_memory() const noexcept;
  // "FILE: NAME", or the name alone of a tensor that is in no file.
  std::string name() const;
};

}  // namespace conclave::inline v0::checkpoint
