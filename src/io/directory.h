// A model directory, held open. Members are opened by name, beneath the model's root, as regular
// files; afterwards only the descriptor is used.
#pragma once

#include "io/file.h"
#include "io/json.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace conclave::inline v0::io {

// How members are resolved. kWalk is the fallback for kernels without openat2: it follows links
// itself, one component at a time.
enum class PathResolver : uint8_t { kAuto, kWalk };

// The root is the directory itself, except in a Hugging Face cache: there
// models--ORG--NAME/snapshots/REVISION holds links into models--ORG--NAME/blobs, so the root is
// models--ORG--NAME. Links that leave the root are refused.
class Directory {
 public:
  // Throws Error(kFileNotFound, kFileAccess, kFileNotRegular) if `path` is no readable directory.
  static Directory open(const std::filesystem::path& path,
                        PathResolver resolver = PathResolver::kAuto);

  // Opens the regular file `name`, one plain path component (check_member_name). Throws
  // Error(kPathEscape, kFileNotFound, kFileAccess, kFileNotRegular).
  File open_file(std::string_view name, const FileOptions& options = {}) const;
  // Whether a member with that name exists, of any kind.
  bool contains(std::string_view name) const;
  // Opens the file and parses it within `limits`. Errors name the member.
  JsonDocument read_json(std::string_view name, const JsonLimits& limits = kConfigLimits) const;

  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  Directory(std::filesystem::path path, FileDescriptor root, std::string prefix,
            PathResolver resolver);
  FileDescriptor open_descriptor(std::string_view name) const;

  std::filesystem::path path_;
  FileDescriptor root_;
  std::string prefix_;  // from the root to the directory: "snapshots/REVISION/" or empty
  PathResolver resolver_;
};

// Throws Error(kPathEscape) unless `name` is one plain path component: not empty, ".", or "..", no
// '/', '\\', NUL or control character, no drive prefix, at most 255 bytes. `file` names the
// document that holds the name.
void check_member_name(std::string_view name, std::string_view file);
// Checks what check_member_name checks, and that the name ends in ".safetensors", else throws
// Error(kForbiddenFormat).
void check_shard_name(std::string_view name, std::string_view file);

}  // namespace conclave::inline v0::io
