// Random access to one regular file through a descriptor, optionally mapped. Detects that the file
// changed after it was opened.
#pragma once

#include "conclave/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <sys/types.h>

namespace conclave::inline v0::io {

// Owns a descriptor; -1 means none.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Stands in for pread(2) in tests of I/O faults.
using ReadFunction = std::function<ssize_t(int fd, void* buffer, size_t bytes, off_t offset)>;

struct FileOptions {
  FileAccess access = FileAccess::kAuto;
  ReadFunction read = {};  // empty: pread
};

// Size and times of a file: if two stamps are equal, no one wrote to it in between.
struct FileStamp {
  uint64_t bytes = 0;
  uint64_t links = 0;
  int64_t modified_ns = 0;
  int64_t changed_ns = 0;
};

// Movable; const members are safe to call from several threads.
class File {
 public:
  // Follows links, because `path` comes from the user. Throws Error(kFileNotFound, kFileAccess,
  // kFileNotRegular).
  static File open(const std::filesystem::path& path, const FileOptions& options = {});
  // Takes ownership of `descriptor`; `name` is for messages. Throws Error(kFileNotRegular,
  // kFileAccess).
  static File adopt(FileDescriptor descriptor, std::string name, const FileOptions& options = {});
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& name() const noexcept { return name_; }
  uint64_t bytes() const noexcept { return stamp_.bytes; }  // when it was opened

  // Fills `destination` from `offset`, which must lie within bytes(). Retries EINTR and short
  // reads. Throws Error(kFileRead) on a failed read, Error(kFileChanged) if the file is no longer
  // the one that was opened; then the destination's content is undefined.
  void read(uint64_t offset, std::span<std::byte> destination) const;
  std::string read_all() const;
  // Throws Error(kFileChanged) if the file was written to since it was opened.
  void check_unchanged() const;

  // The file's bytes in memory; empty unless kMap. Touching them faults if another process has
  // truncated the file, and shows what it has written; read() does neither.
  std::span<const std::byte> mapping() const noexcept;
  // Takes the pages of these bytes, which lie within bytes(), out of this process; reading them
  // maps them again. Does nothing without a mapping.
  void release(uint64_t offset, uint64_t bytes) const noexcept;

 private:
  File(FileDescriptor descriptor, std::string name, FileStamp stamp, ReadFunction read);
  void map();

  FileDescriptor descriptor_;
  std::string name_;
  FileStamp stamp_;
  ReadFunction read_;
  void* mapping_ = nullptr;
};

}  // namespace conclave::inline v0::io
