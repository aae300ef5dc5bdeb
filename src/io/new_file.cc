#include "io/new_file.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace conclave::inline v0::io {
namespace {

// A name beside `path`, so that renaming stays within one file system.
std::filesystem::path temporary_name(const std::filesystem::path& path) {
  static std::atomic<uint64_t> counter{0};
  std::filesystem::path name = path;
  name += fmt::format(".{}.{}.partial", getpid(), counter.fetch_add(1));
  return name;
}

}  // namespace

NewFile::NewFile(std::filesystem::path path)
    : path_(std::move(path)), temporary_(temporary_name(path_)) {}

NewFile::~NewFile() {
  if (is_there_) unlink(temporary_.c_str());
}

void NewFile::fail(std::string_view action, const std::filesystem::path& file) {
  const int error_number = errno;
  throw Error(
      ErrorCode::kFileWrite,
      {.what = fmt::format("{} failed: {}", action, std::generic_category().message(error_number)),
       .file = file.string(),
       .hint = error_number == ENOSPC ? "free some disk space" : ""});
}

// A rename takes the place of a device or a pipe as well, which a caller of many rights would lose.
void NewFile::check_place(const std::filesystem::path& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode) || S_ISLNK(info.st_mode)) return;
  throw Error(ErrorCode::kFileWrite,
              {.what = S_ISDIR(info.st_mode) ? "a folder has this name"
                                             : "the name is that of a device, a pipe or a socket",
               .file = path.string(),
               .hint = "name a file"});
}

void NewFile::begin() {
  check_place(path_);
  descriptor_ = FileDescriptor(
      open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!descriptor_) fail("creating the file", temporary_);
  is_begun_ = true;
  is_there_ = true;
}

void NewFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(descriptor_.get(), bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("writing", temporary_);
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
}

void NewFile::resize(uint64_t bytes) {
  if (ftruncate(descriptor_.get(), static_cast<off_t>(bytes)) != 0) {
    fail("changing the size", temporary_);
  }
}

// The name appears only after the content is on the disk.
void NewFile::publish() {
  if (fsync(descriptor_.get()) != 0) fail("flushing", temporary_);
  descriptor_ = {};
  check_place(path_);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail("renaming the file", path_);
  is_there_ = false;
  const std::filesystem::path parent = path_.has_parent_path() ? path_.parent_path() : ".";
  const FileDescriptor directory(open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot flush a directory (EINVAL); the content is safe either way.
  if (directory && fsync(directory.get()) != 0 && errno != EINVAL) {
    fail("flushing the directory", parent);
  }
}

}  // namespace conclave::inline v0::io
