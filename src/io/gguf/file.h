// A GGUF model: one file, or the parts "name-00001-of-00003.gguf" that a model is split into.
#pragma once

#include "io/file.h"
#include "io/gguf/header.h"
#include "io/name_index.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

namespace conclave::inline v0::io {

// Immutable; all members are safe to call from several threads.
class GgufFile {
 public:
  // Opens the parts beside `path`, the first of them, too. Throws Error: 2xx for a file, 35x to 37x
  // for a header, kGgufSplit if the parts do not make one model.
  static GgufFile open(const std::filesystem::path& path, FileAccess access = FileAccess::kAuto);

  // One file alone, of whichever part. Throws likewise.
  static GgufFile open_part(const std::filesystem::path& path);

  struct Part {
    File file;
    GgufHeader header;
  };
  struct Place {
    const Part* part = nullptr;
    const GgufTensor* tensor = nullptr;
    explicit operator bool() const noexcept { return tensor != nullptr; }
  };

  std::span<const Part> parts() const noexcept { return parts_; }
  // The first part holds the keys of the model.
  const GgufValue* find_value(std::string_view key) const noexcept {
    return parts_.front().header.find_value(key);
  }
  Place find_tensor(std::string_view name) const noexcept;

  // Copies bytes [offset, offset + destination.size()) of the tensor. Throws as File::read.
  static void read(const Place& place, uint64_t offset, std::span<std::byte> destination);
  // The tensor's bytes in the mapping, aligned as the file says; empty unless the access is kMap.
  static std::span<const std::byte> mapped(const Place& place) noexcept;
  // Takes bytes [offset, offset + bytes) of the tensor out of this process, as File::release.
  static void release(const Place& place, uint64_t offset, uint64_t bytes) noexcept;

 private:
  explicit GgufFile(std::vector<Part> parts);

  std::vector<Part> parts_;
  std::vector<Place> tensors_;  // in all parts
  NameIndex names_;             // maps to tensors_, group 0
};

// The header of one file; the file must outlive the call only.
GgufHeader read_gguf_header(const File& file);

}  // namespace conclave::inline v0::io
