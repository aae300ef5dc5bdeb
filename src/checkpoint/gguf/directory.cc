#include "checkpoint/gguf/directory.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kSuffix = ".gguf";
constexpr std::string_view kProjector = "mmproj";
constexpr size_t kMostNamed = 8;

// "-00002-of-00003.gguf": opened by way of the first part.
bool is_later_part(std::string_view name) {
  constexpr std::string_view kOf = "-of-";
  constexpr size_t kDigits = 5;
  constexpr size_t kTail = 1 + kDigits + kOf.size() + kDigits + kSuffix.size();
  if (name.size() < kTail) return false;
  const std::string_view tail = name.substr(name.size() - kTail);
  const auto is_number = [](std::string_view text) {
    return std::ranges::all_of(text, [](unsigned char c) { return std::isdigit(c) != 0; });
  };
  const std::string_view part = tail.substr(1, kDigits);
  return tail.front() == '-' && is_number(part) && part != "00001" &&
         tail.substr(1 + kDigits, kOf.size()) == kOf &&
         is_number(tail.substr(1 + kDigits + kOf.size(), kDigits));
}

bool is_model(const std::filesystem::directory_entry& entry) {
  std::error_code ignored;
  const std::string name = entry.path().filename().string();
  return name.ends_with(kSuffix) && !name.starts_with(kProjector) && !is_later_part(name) &&
         entry.is_regular_file(ignored);
}

}  // namespace

std::filesystem::path model_path(const std::filesystem::path& path) {
  std::error_code problem;
  if (!std::filesystem::is_directory(path, problem)) return path;
  if (std::filesystem::exists(path / "config.json", problem)) return path;
  std::vector<std::string> models;
  // A directory that cannot be listed is for the opening to report.
  for (std::filesystem::directory_iterator entry(path, problem), end; !problem && entry != end;
       entry.increment(problem)) {
    if (is_model(*entry)) models.push_back(entry->path().filename().string());
  }
  if (models.empty()) return path;
  if (models.size() == 1) return path / models.front();
  std::ranges::sort(models);
  const size_t count = models.size();
  models.resize(std::min(count, kMostNamed));
  throw Error(ErrorCode::kFileNotFound,
              {.what = "the directory has no model configuration, and several GGUF models",
               .file = (path / "config.json").string(),
               .found = fmt::format(
                   "{}{}", fmt::join(models, ", "),
                   count > kMostNamed ? fmt::format(" and {} more", count - kMostNamed) : ""),
               .hint = "give the path of one of them"});
}

}  // namespace conclave::inline v0::checkpoint
