// A file that has its name only when all of it is on the disk.
#pragma once

#include "io/file.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

namespace conclave::inline v0::io {

class NewFile {
 public:
  explicit NewFile(std::filesystem::path path);
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile();  // removes what was not published

  // Throws Error(kFileWrite) where something has the name that a file must not take the place of: a
  // folder, a device, a pipe, a socket.
  static void check_place(const std::filesystem::path& path);

  const std::filesystem::path& path() const noexcept { return path_; }
  // Whether it was begun, published or not.
  bool is_begun() const noexcept { return is_begun_; }
  // Creates it under another name beside `path`. These throw Error(kFileWrite).
  void begin();
  void write(std::span<const std::byte> bytes);
  void resize(uint64_t bytes);
  void publish();

 private:
  [[noreturn]] static void fail(std::string_view action, const std::filesystem::path& file);

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  FileDescriptor descriptor_;
  bool is_begun_ = false;
  bool is_there_ = false;  // under the other name
};

}  // namespace conclave::inline v0::io
