#include "io/file.h"

#include "core/checked.h"
#include "io/open_error.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <optional>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <time.h>
#include <unistd.h>
#include <utility>

namespace conclave::inline v0::io {
namespace {

// No call asks for more than this: Linux itself stops short of 2 GiB.
constexpr size_t kMaxReadBytes = size_t{1} << 30;
// A fault maps what the page cache has of an aligned window of this size around it.
constexpr uint64_t kFaultWindowBytes = uint64_t{64} << 10;

int64_t nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

FileStamp stamp_of(const struct stat& info) {
  return {.bytes = static_cast<uint64_t>(info.st_size),
          .links = info.st_nlink,
          .modified_ns = nanoseconds(info.st_mtim),
          .changed_ns = nanoseconds(info.st_ctim)};
}

// File times advance with the kernel's coarse clock. A file written in the current tick could be
// written again without its times moving, so wait for the next tick before trusting them.
void wait_for_next_tick(const FileStamp& stamp) {
  constexpr int kMaxWaits = 40;
  constexpr timespec kMillisecond = {.tv_sec = 0, .tv_nsec = 1'000'000};
  for (int i = 0; i < kMaxWaits; ++i) {
    timespec now{};
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    const int64_t age = nanoseconds(now) - stamp.changed_ns;
    // A time far in the future comes from another machine's clock: waiting would not help.
    if (age > 0 || age < -int64_t{kMaxWaits} * kMillisecond.tv_nsec) return;
    nanosleep(&kMillisecond, nullptr);
  }
}

}  // namespace

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

File File::open(const std::filesystem::path& path, const FileOptions& options) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  FileDescriptor descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!descriptor) throw_open_error(errno, path.string());
  return adopt(std::move(descriptor), path.string(), options);
}

File File::adopt(FileDescriptor descriptor, std::string name, const FileOptions& options) {
  struct stat info {};
  if (fstat(descriptor.get(), &info) != 0) throw_open_error(errno, name);
  if (!S_ISREG(info.st_mode)) {
    throw Error(ErrorCode::kFileNotRegular,
                {.what = "not a regular file",
                 .file = std::move(name),
                 .expected = "a regular file",
                 .found = S_ISDIR(info.st_mode) ? "a directory" : "a special file"});
  }
  wait_for_next_tick(stamp_of(info));
  if (fstat(descriptor.get(), &info) != 0) throw_open_error(errno, name);

  File file(std::move(descriptor), std::move(name), stamp_of(info), options.read);
  if (options.access == FileAccess::kMap) file.map();
  return file;
}

File::File(FileDescriptor descriptor, std::string name, FileStamp stamp, ReadFunction read)
    : descriptor_(std::move(descriptor)),
      name_(std::move(name)),
      stamp_(stamp),
      read_(std::move(read)) {}

File::File(File&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      name_(std::move(other.name_)),
      stamp_(other.stamp_),
      read_(std::move(other.read_)),
      mapping_(std::exchange(other.mapping_, nullptr)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(name_, other.name_);
  std::swap(stamp_, other.stamp_);
  std::swap(read_, other.read_);
  std::swap(mapping_, other.mapping_);
  return *this;
}

File::~File() {
  if (mapping_ != nullptr) munmap(mapping_, stamp_.bytes);
}

// If the file system cannot map, the file stays readable and mapping() is empty.
void File::map() {
  if (stamp_.bytes == 0) return;
  void* memory = mmap(nullptr, stamp_.bytes, PROT_READ, MAP_PRIVATE, descriptor_.get(), 0);
  if (memory == MAP_FAILED) return;
  mapping_ = memory;
}

// Whole windows: neighbours that are still read come back by a fault, and what a fault at an edge
// mapped beside it would otherwise stay.
void File::release(uint64_t offset, uint64_t bytes) const noexcept {
  if (mapping_ == nullptr || bytes == 0) return;
  const uint64_t begin = offset / kFaultWindowBytes * kFaultWindowBytes;
  const uint64_t past =
      (offset + bytes + kFaultWindowBytes - 1) / kFaultWindowBytes * kFaultWindowBytes;
  const uint64_t end = past < stamp_.bytes ? past : stamp_.bytes;
  if (begin >= end) return;
  madvise(static_cast<std::byte*>(mapping_) + begin, end - begin, MADV_DONTNEED);
}

std::span<const std::byte> File::mapping() const noexcept {
  if (mapping_ == nullptr) return {};
  return {static_cast<const std::byte*>(mapping_), stamp_.bytes};
}

void File::read(uint64_t offset, std::span<std::byte> destination) const {
  const std::optional<uint64_t> end = checked_add<uint64_t>(offset, destination.size());
  if (!end || *end > stamp_.bytes) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = fmt::format("a read of {} bytes at offset {} leaves the file",
                                     destination.size(), offset),
                 .file = name_,
                 .limit = fmt::format("{} bytes", stamp_.bytes)});
  }
  while (!destination.empty()) {
    const size_t wanted = std::min(destination.size(), kMaxReadBytes);
    const ssize_t got =
        read_ ? read_(descriptor_.get(), destination.data(), wanted, static_cast<off_t>(offset))
              : pread(descriptor_.get(), destination.data(), wanted, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw Error(ErrorCode::kFileRead,
                  {.what = fmt::format("reading {} bytes at offset {} failed: {}", wanted, offset,
                                       std::generic_category().message(errno)),
                   .file = name_});
    }
    if (got == 0) {
      throw Error(ErrorCode::kFileChanged,
                  {.what = fmt::format("the file ends at offset {}", offset),
                   .file = name_,
                   .expected = fmt::format("{} bytes, as when it was opened", stamp_.bytes),
                   .hint = "another process truncated it"});
    }
    destination = destination.subspan(static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
  // The kernel moves a file's times before its bytes, so unchanged times after the read mean that
  // the bytes are those of the file that was opened.
  check_unchanged();
}

std::string File::read_all() const {
  std::string text(stamp_.bytes, '\0');
  read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void File::check_unchanged() const {
  struct stat info {};
  if (fstat(descriptor_.get(), &info) != 0) throw_open_error(errno, name_);
  const FileStamp now = stamp_of(info);
  // Unlinking moves the change time too, but leaves the bytes alone: a file that is replaced by
  // renaming another over it stays readable.
  const bool same = now.bytes == stamp_.bytes && now.modified_ns == stamp_.modified_ns &&
                    (now.changed_ns == stamp_.changed_ns || now.links != stamp_.links);
  if (!same) {
    throw Error(ErrorCode::kFileChanged,
                {.what = "the file was modified while it was being read",
                 .file = name_,
                 .expected = fmt::format("{} bytes, as when it was opened", stamp_.bytes),
                 .found = fmt::format("{} bytes{}", now.bytes,
                                      now.bytes == stamp_.bytes ? ", written to since" : ""),
                 .hint = "load it again when no other process writes to it"});
  }
}

}  // namespace conclave::inline v0::io
