#include "checkpoint/gguf/place.h"

#include <algorithm>

namespace conclave::inline v0::checkpoint {

void GgufPlace::read(uint64_t offset, std::span<std::byte> destination) const {
  if (is_in_file()) return io::GgufFile::read({part, tensor}, offset, destination);
  std::ranges::copy(bytes.subspan(offset, destination.size()), destination.begin());
}

std::span<const std::byte> GgufPlace::in_memory() const noexcept {
  return is_in_file() ? io::GgufFile::mapped({part, tensor}) : bytes;
}

std::string GgufPlace::name() const {
  return is_in_file() ? part->file.name() + ": " + tensor->name : tensor->name;
}

}  // namespace conclave::inline v0::checkpoint
