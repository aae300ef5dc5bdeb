#include "io/file.h"

#include "conclave/error.h"
#include "conclave/tuning.h"

#include <string>

namespace conclave::inline v0 {

TuningTable TuningTable::load(const std::filesystem::path& path) {
  // A table of every existing model takes a fraction of this.
  constexpr uint64_t kMostBytes = uint64_t{64} << 20;
  const io::File file = io::File::open(path);
  if (file.bytes() > kMostBytes) {
    throw Error(ErrorCode::kTuningSyntax, {.what = "this file is too large for a tuning table",
                                           .file = path.string(),
                                           .found = std::to_string(file.bytes()) + " bytes",
                                           .limit = std::to_string(kMostBytes) + " bytes"});
  }
  return parse(file.read_all(), path.string());
}

}  // namespace conclave::inline v0
