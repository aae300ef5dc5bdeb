#include "io/directory.h"

#include "io/open_error.h"
#include "io/path_walk.h"
#include "io/sniff.h"
#include "io/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <climits>
#include <fcntl.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace conclave::inline v0::io {
namespace {

constexpr size_t kMaxNameBytes = 255;  // NAME_MAX

// The open directory's real path, without links; `path` is the one it was opened by.
std::filesystem::path path_of(const FileDescriptor& directory, const std::filesystem::path& path) {
  std::array<char, PATH_MAX> target{};
  const std::string link = fmt::format("/proc/self/fd/{}", directory.get());
  const ssize_t bytes = readlink(link.c_str(), target.data(), target.size());
  if (bytes > 0 && static_cast<size_t>(bytes) < target.size()) {
    return std::string(target.data(), static_cast<size_t>(bytes));
  }
  std::error_code ignored;  // used without /proc; an empty path on failure: no cache
  return std::filesystem::canonical(path, ignored);
}

// Returns "snapshots/REVISION/" for a directory models--ORG--NAME/snapshots/REVISION, else nothing.
std::string cache_prefix(const std::filesystem::path& directory) {
  const std::filesystem::path snapshots = directory.parent_path();
  const std::string repository = snapshots.parent_path().filename().string();
  if (snapshots.filename() != "snapshots" || !repository.starts_with("models--")) return {};
  return "snapshots/" + directory.filename().string() + '/';
}

// Whether a path that does not exist is spelled like a model's name on a hub, "ORG/NAME", while its
// first part is no local directory either.
bool looks_like_hub_name(const std::filesystem::path& path) {
  const std::string text = path.string();
  std::error_code ignored;
  if (std::filesystem::exists(path.parent_path(), ignored)) return false;
  const auto is_plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
  };
  const size_t slash = text.find('/');
  if (slash == std::string::npos || slash == 0 || slash + 1 == text.size()) return false;
  return text.front() != '.' && std::count(text.begin(), text.end(), '/') == 1 &&
         std::all_of(text.begin(), text.end(),
                     [&](char c) { return c == '/' || is_plain(static_cast<unsigned char>(c)); });
}

[[noreturn]] void refuse_path(int error_number, const std::filesystem::path& path) {
  const bool absent = error_number == ENOENT || error_number == ENOTDIR;
  if (!absent || !looks_like_hub_name(path)) throw_open_error(error_number, path.string());
  throw Error(ErrorCode::kFileNotFound,
              {.what = "no such directory",
               .file = path.string(),
               .expected = "the local directory of a model",
               .hint = "this looks like a model's name on the Hugging Face hub: download it, for "
                       "example with 'hf download " +
                       path.string() + " --local-dir DIR', and name that directory"});
}

[[noreturn]] void refuse_name(std::string_view name, std::string_view file, std::string why) {
  throw Error(ErrorCode::kPathEscape,
              {.what = "a file name " + std::move(why),
               .file = std::string(file),
               .expected = "the plain name of a file in the model directory",
               .found = show_text(name)});
}

}  // namespace

void check_member_name(std::string_view name, std::string_view file) {
  if (name.empty() || name == "." || name == "..") refuse_name(name, file, "names a directory");
  if (name.size() > kMaxNameBytes) refuse_name(name, file, "is longer than 255 bytes");
  if (name.find_first_of("/\\") != std::string_view::npos) {
    refuse_name(name, file, "contains a path");
  }
  if (has_control_character(name)) refuse_name(name, file, "contains a control character");
  const bool has_letter = (name[0] >= 'a' && name[0] <= 'z') || (name[0] >= 'A' && name[0] <= 'Z');
  if (name.size() >= 2 && has_letter && name[1] == ':') {
    refuse_name(name, file, "starts with a drive");
  }
}

void check_shard_name(std::string_view name, std::string_view file) {
  check_member_name(name, file);
  if (!name.ends_with(".safetensors")) {
    throw Error(ErrorCode::kForbiddenFormat,
                {.what = "a shard is not a safetensors file",
                 .file = std::string(file),
                 .expected = "a name that ends in .safetensors",
                 .found = show_text(name),
                 .hint = "convert the model with save_pretrained(..., safe_serialization=True)"});
  }
}

Directory::Directory(std::filesystem::path path, FileDescriptor root, std::string prefix,
                     PathResolver resolver)
    : path_(std::move(path)),
      root_(std::move(root)),
      prefix_(std::move(prefix)),
      resolver_(resolver) {}

Directory Directory::open(const std::filesystem::path& path, PathResolver resolver) {
  FileDescriptor directory(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!directory) refuse_path(errno, path);
  struct stat info {};
  if (fstat(directory.get(), &info) != 0) throw_open_error(errno, path.string());
  if (!S_ISDIR(info.st_mode)) {
    throw Error(ErrorCode::kFileNotRegular, {.what = "not a directory",
                                             .file = path.string(),
                                             .expected = "a model directory",
                                             .hint = "name the directory that holds config.json"});
  }
  std::string prefix = cache_prefix(path_of(directory, path));
  if (!prefix.empty()) {
    // Two levels above the held directory, not above a path that may have moved since.
    FileDescriptor root(openat(directory.get(), "../..", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!root) throw_open_error(errno, path.string());
    directory = std::move(root);
  }
  return {path, std::move(directory), std::move(prefix), resolver};
}

FileDescriptor Directory::open_descriptor(std::string_view name) const {
  const std::string beneath = prefix_ + std::string(name);
  const std::string shown = (path_ / name).string();
  if (resolver_ == PathResolver::kAuto) {
    FileDescriptor opened = open_beneath_by_kernel(root_, beneath, shown);
    if (opened) return opened;
  }
  return open_beneath_by_walk(root_, beneath, shown);
}

File Directory::open_file(std::string_view name, const FileOptions& options) const {
  check_member_name(name, path_.string());
  return File::adopt(open_descriptor(name), (path_ / name).string(), options);
}

bool Directory::contains(std::string_view name) const {
  check_member_name(name, path_.string());
  struct stat info {};
  return fstatat(root_.get(), (prefix_ + std::string(name)).c_str(), &info, AT_SYMLINK_NOFOLLOW) ==
         0;
}

JsonDocument Directory::read_json(std::string_view name, const JsonLimits& limits) const {
  const File file = open_file(name, {.access = FileAccess::kRead});
  if (file.bytes() > limits.max_bytes) {
    throw Error(ErrorCode::kJsonTooLarge, {.what = "the document is too large",
                                           .file = file.name(),
                                           .found = fmt::format("{} bytes", file.bytes()),
                                           .limit = fmt::format("{} bytes", limits.max_bytes)});
  }
  std::string text = file.read_all();
  refuse_foreign_format(std::as_bytes(std::span(text)), file.name());
  return JsonDocument::parse(std::move(text), file.name(), limits);
}

}  // namespace conclave::inline v0::io
