#include "output/durable_file.h"

#include "conclave/error.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <system_error>
#include <unistd.h>

namespace conclave::tool {

void write_durably(const std::filesystem::path& path, std::string_view text) {
  const int file =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
  bool good = file >= 0;
  while (good && !text.empty()) {
    const ssize_t put = ::write(file, text.data(), text.size());
    good = put >= 0 || errno == EINTR;
    text.remove_prefix(static_cast<size_t>(std::max<ssize_t>(put, 0)));
  }
  good = good && ::fsync(file) == 0;
  const int reason = errno;
  if (file >= 0) ::close(file);
  if (good) return;
  throw Error(ErrorCode::kFileWrite, {.what = "cannot write the file",
                                      .file = path.string(),
                                      .found = std::generic_category().message(reason)});
}

}  // namespace conclave::tool
