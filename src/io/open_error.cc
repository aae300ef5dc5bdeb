#include "io/open_error.h"

#include "conclave/error.h"

#include <cerrno>
#include <system_error>
#include <utility>

namespace conclave::inline v0::io {

void throw_open_error(int error_number, std::string file) {
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
      throw Error(ErrorCode::kFileNotFound,
                  {.what = "no such file or directory", .file = std::move(file)});
    case EXDEV:
      throw Error(ErrorCode::kPathEscape,
                  {.what = "the name is a link that leaves the model directory",
                   .file = std::move(file),
                   .hint = "copy the model with 'cp -rL', or name the directory the files are in"});
    case ELOOP:
      throw Error(ErrorCode::kPathEscape, {.what = "the name is a link that leads nowhere: too "
                                                   "many links, or a link the system refuses",
                                           .file = std::move(file)});
    case ENXIO:  // a socket, or a device that is not there
      throw Error(ErrorCode::kFileNotRegular, {.what = "not a regular file",
                                               .file = std::move(file),
                                               .expected = "a regular file",
                                               .found = "a special file"});
    default:
      throw Error(ErrorCode::kFileAccess,
                  {.what = "cannot open: " + std::generic_category().message(error_number),
                   .file = std::move(file)});
  }
}

}  // namespace conclave::inline v0::io
