#include "checkpoint/shared/shared_mapping.h"

#include "io/new_file.h"
#include "io/open_error.h"

#include "conclave/error.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

[[noreturn]] void throw_write_error(int error_number, const std::string& file) {
  throw Error(ErrorCode::kFileWrite, {.what = "shared weights were not made: " +
                                              std::generic_category().message(error_number),
                                      .file = file});
}

}  // namespace

SharedMapping::SharedMapping(io::FileDescriptor descriptor, std::string name, uint64_t bytes,
                             int protection)
    : descriptor_(std::move(descriptor)), name_(std::move(name)), bytes_(bytes) {
  if (bytes == 0) return;
  void* const memory = mmap(nullptr, bytes, protection, MAP_SHARED, descriptor_.get(), 0);
  if (memory == MAP_FAILED) {
    const int error_number = errno;
    if (!name_.empty()) ::unlink(name_.c_str());
    throw Error(ErrorCode::kFileAccess, {.what = "shared weights were not mapped: " +
                                                 std::generic_category().message(error_number),
                                         .file = name_});
  }
  data_ = static_cast<std::byte*>(memory);
}

SharedMapping SharedMapping::create(const std::filesystem::path& path, uint64_t bytes) {
  io::NewFile::check_place(path);
  const std::string name = path.string() + ".new." + std::to_string(getpid());
  ::unlink(name.c_str());
  io::FileDescriptor descriptor(
      ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!descriptor) io::throw_open_error(errno, name);
  // Memory is reserved here: a page that is missing later would end the process by a signal.
  const int failed = posix_fallocate(descriptor.get(), 0, static_cast<off_t>(bytes));
  if (failed != 0) {
    ::unlink(name.c_str());
    throw_write_error(failed, path.string());
  }
  return {std::move(descriptor), name, bytes, PROT_READ | PROT_WRITE};
}

SharedMapping SharedMapping::open(const std::filesystem::path& path) {
  io::FileDescriptor descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!descriptor) io::throw_open_error(errno, path.string());
  struct stat info {};
  if (fstat(descriptor.get(), &info) != 0) io::throw_open_error(errno, path.string());
  if (!S_ISREG(info.st_mode)) {
    throw Error(ErrorCode::kFileNotRegular, {.what = "not a regular file", .file = path.string()});
  }
  return {std::move(descriptor), {}, static_cast<uint64_t>(info.st_size), PROT_READ};
}

SharedMapping::SharedMapping(SharedMapping&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      name_(std::exchange(other.name_, {})),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

SharedMapping& SharedMapping::operator=(SharedMapping&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(name_, other.name_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SharedMapping::~SharedMapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (!name_.empty()) ::unlink(name_.c_str());
}

void SharedMapping::rename_to(const std::filesystem::path& path) {
  if (::rename(name_.c_str(), path.c_str()) != 0) throw_write_error(errno, path.string());
  name_.clear();
}

uint64_t SharedMapping::bytes_of_file() const noexcept {
  struct stat info {};
  if (fstat(descriptor_.get(), &info) != 0) return 0;
  return static_cast<uint64_t>(info.st_size);
}

}  // namespace conclave::inline v0::checkpoint
