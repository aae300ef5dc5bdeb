#include "io/path_walk.h"

#include "io/open_error.h"

#include <array>
#include <cerrno>
#include <climits>
#include <deque>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace conclave::inline v0::io {
namespace {

constexpr int kMaxLinks = 40;  // the kernel's own limit
constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;

void push_components(std::deque<std::string>& components, std::string_view path) {
  std::deque<std::string> parts;
  while (!path.empty()) {
    const size_t slash = std::min(path.find('/'), path.size());
    if (slash > 0) parts.emplace_back(path.substr(0, slash));
    path.remove_prefix(std::min(slash + 1, path.size()));
  }
  components.insert(components.begin(), parts.begin(), parts.end());
}

std::string read_link(const FileDescriptor& link, const std::string& shown) {
  std::array<char, PATH_MAX> target{};
  const ssize_t bytes = readlinkat(link.get(), "", target.data(), target.size());
  if (bytes <= 0 || static_cast<size_t>(bytes) == target.size()) throw_open_error(ELOOP, shown);
  return {target.data(), static_cast<size_t>(bytes)};
}

// Re-opens for reading a name that `looked_at` showed is no link; a swap in between is refused.
FileDescriptor open_for_reading(int directory, const std::string& name,
                                const struct stat& looked_at, const std::string& shown) {
  FileDescriptor opened(openat(directory, name.c_str(), kReadFlags | O_NOFOLLOW));
  if (!opened) throw_open_error(errno, shown);
  struct stat info {};
  if (fstat(opened.get(), &info) != 0) throw_open_error(errno, shown);
  if (info.st_ino != looked_at.st_ino || info.st_dev != looked_at.st_dev) {
    throw_open_error(EXDEV, shown);
  }
  return opened;
}

}  // namespace

FileDescriptor open_beneath_by_kernel(const FileDescriptor& root, const std::string& path,
                                      const std::string& shown) {
  open_how how{};
  how.flags = kReadFlags;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  constexpr int kMaxRaces = 16;
  for (int i = 0; i < kMaxRaces; ++i) {
    const long fd = syscall(SYS_openat2, root.get(), path.c_str(), &how, sizeof(how));
    if (fd >= 0) return FileDescriptor(static_cast<int>(fd));
    // EPERM: older container sandboxes refuse calls that they do not know.
    if (errno == ENOSYS || errno == EPERM) return {};
    // EAGAIN: something was renamed meanwhile and the kernel could not be sure.
    if (errno != EAGAIN && errno != EINTR) throw_open_error(errno, shown);
  }
  throw_open_error(EAGAIN, shown);
}

FileDescriptor open_beneath_by_walk(const FileDescriptor& root, std::string_view path,
                                    const std::string& shown) {
  std::deque<std::string> components;
  push_components(components, path);
  std::vector<FileDescriptor> below;  // directories entered so far, beneath the root
  int links = 0;
  while (!components.empty()) {
    const std::string name = std::move(components.front());
    components.pop_front();
    if (name == ".") continue;
    if (name == "..") {
      if (below.empty()) throw_open_error(EXDEV, shown);
      below.pop_back();
      continue;
    }
    const int directory = below.empty() ? root.get() : below.back().get();
    FileDescriptor entry(openat(directory, name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    if (!entry) throw_open_error(errno, shown);
    struct stat info {};
    if (fstat(entry.get(), &info) != 0) throw_open_error(errno, shown);
    if (S_ISLNK(info.st_mode)) {
      if (++links > kMaxLinks) throw_open_error(ELOOP, shown);
      const std::string target = read_link(entry, shown);
      if (target.starts_with('/')) throw_open_error(EXDEV, shown);
      push_components(components, target);
    } else if (components.empty()) {
      return open_for_reading(directory, name, info, shown);
    } else if (S_ISDIR(info.st_mode)) {
      below.push_back(std::move(entry));
    } else {
      throw_open_error(ENOTDIR, shown);
    }
  }
  throw_open_error(EISDIR, shown);  // the path ended at a directory
}

}  // namespace conclave::inline v0::io
