#include "input/file_roles.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <cstddef>
#include <filesystem>
#include <system_error>

namespace conclave::tool {
namespace {

std::filesystem::path place_of(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code problem;
  const fs::path whole = fs::absolute(path, problem);
  if (problem) return fs::path(path).lexically_normal();
  fs::path found = fs::weakly_canonical(whole, problem);
  return problem ? whole.lexically_normal() : found;
}

// The one that is written is named; of two results the later.
[[noreturn]] void refuse(const FileRole& first, const FileRole& later) {
  const FileRole& wrong = later.is_result ? later : first;
  const FileRole& other = later.is_result ? first : later;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "two results, or a result and its source, cannot be one file",
               .tensor = wrong.option,
               .expected = fmt::format("another file than that of {}", other.option),
               .found = wrong.path});
}

}  // namespace

void require_distinct(std::span<const FileRole> files) {
  for (size_t i = 0; i < files.size(); ++i) {
    for (size_t j = i + 1; j < files.size(); ++j) {
      const FileRole& first = files[i];
      const FileRole& later = files[j];
      const bool is_written = first.is_result || later.is_result;
      if (!is_written || first.path.empty() || later.path.empty()) continue;
      if (place_of(first.path) == place_of(later.path)) refuse(first, later);
    }
  }
}

}  // namespace conclave::tool
