// Opens a path beneath a directory: links may be followed, but never out of it.
#pragma once

#include "io/file.h"

#include <string_view>

namespace conclave::inline v0::io {

// Both open `path`, relative to `root`, for reading. They throw Error(kPathEscape) if a link leaves
// the root, and as throw_open_error for other failures. `shown` is the name for messages.

// Uses openat2(2) with RESOLVE_BENEATH; returns an empty descriptor if the kernel lacks it.
FileDescriptor open_beneath_by_kernel(const FileDescriptor& root, const std::string& path,
                                      const std::string& shown);
// Walks one component at a time and never leaves the held directories, so that renaming one of them
// meanwhile cannot lead outside.
FileDescriptor open_beneath_by_walk(const FileDescriptor& root, std::string_view path,
                                    const std::string& shown);

}  // namespace conclave::inline v0::io
