// Faults that every reader of files must stand: reads that fail, and files that another process
// changes while they are read.
#pragma once

#include "io/file.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace conclave::testing {

inline constexpr FileAccess kBothModes[] = {FileAccess::kMap, FileAccess::kRead};

// Opens a file's content and returns the bytes of all its tensors.
using LoadAll = std::function<std::string(io::File opened)>;

// Makes the k-th read of a load fail in one way, for every k, way and access mode: short and
// interrupted reads must be invisible, others give typed errors. Returns the number of cases.
size_t expect_read_faults_handled(const std::filesystem::path& path, const LoadAll& load_all);

// A file with one tensor of so many bytes, all of this value.
constexpr size_t kChangingBytes = size_t{1} << 19;
using MakeVersion = std::function<std::string(char value)>;
// Opens the file; what it returns reads bytes of that tensor from an offset on.
using ReadTensor = std::function<void(uint64_t offset, std::span<std::byte> destination)>;
using OpenTensor = std::function<ReadTensor(const std::filesystem::path& path, FileAccess access)>;

struct ChangeCounts {
  int files = 0;
  int refused_loads = 0;
  int mixed_loads = 0;
};
// Lets another process truncate, rewrite, replace or remove the file while it is read: a load must
// give the original bytes or Error(kFileChanged).
ChangeCounts expect_changes_noticed(const MakeVersion& version, const OpenTensor& open_tensor);

}  // namespace conclave::testing
