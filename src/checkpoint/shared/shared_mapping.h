// A file in memory that several processes map, and the words of its header that change.
#pragma once

#include "io/file.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace conclave::inline v0::checkpoint {

class SharedMapping {
 public:
  // A new file of zeros, under a name of its own until `rename_to`. Throws Error(kFileAccess,
  // kFileWrite).
  static SharedMapping create(const std::filesystem::path& path, uint64_t bytes);
  // Throws Error(kFileNotFound, kFileAccess, kFileNotRegular).
  static SharedMapping open(const std::filesystem::path& path);
  SharedMapping(SharedMapping&& other) noexcept;
  SharedMapping& operator=(SharedMapping&& other) noexcept;
  ~SharedMapping();

  void rename_to(const std::filesystem::path& path);
  std::byte* data() const noexcept { return data_; }
  uint64_t bytes() const noexcept { return bytes_; }
  std::span<std::byte> span(uint64_t first, uint64_t bytes) const {
    return {data_ + first, static_cast<size_t>(bytes)};
  }
  // The file's bytes now: another process may have truncated it, though none should.
  uint64_t bytes_of_file() const noexcept;

 private:
  SharedMapping(io::FileDescriptor descriptor, std::string name, uint64_t bytes, int protection);

  io::FileDescriptor descriptor_;
  std::string name_;  // a file that has not its own yet has it
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace conclave::inline v0::checkpoint
