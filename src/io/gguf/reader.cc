#include "io/gguf/file.h"

#include "conclave/error.h"
#include "conclave/gguf.h"

#include <utility>

namespace conclave::inline v0 {

struct GgufReader::Impl {
  explicit Impl(io::GgufFile opened) : file(std::move(opened)) {
    for (const io::GgufFile::Part& part : file.parts()) {
      paths.emplace_back(part.file.name());
      for (const io::GgufTensor& tensor : part.header.tensors) {
        const auto shape = tensor.shape();
        tensors.push_back({.name = tensor.name,
                           .type = tensor.type->name,
                           .shape = {shape.begin(), shape.end()},
                           .bytes = tensor.bytes});
        places.push_back({&part, &tensor});
      }
    }
  }

  io::GgufFile file;
  std::vector<std::filesystem::path> paths;
  std::vector<GgufTensorInfo> tensors;
  std::vector<io::GgufFile::Place> places;  // as `tensors` has them
};

GgufReader::GgufReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GgufReader::GgufReader(GgufReader&&) noexcept = default;
GgufReader& GgufReader::operator=(GgufReader&&) noexcept = default;
GgufReader::~GgufReader() = default;

GgufReader GgufReader::open(const std::filesystem::path& path) {
  return GgufReader(std::make_unique<Impl>(io::GgufFile::open(path)));
}

GgufReader GgufReader::open_part(const std::filesystem::path& path) {
  return GgufReader(std::make_unique<Impl>(io::GgufFile::open_part(path)));
}

std::span<const std::filesystem::path> GgufReader::paths() const noexcept { return impl_->paths; }
std::span<const GgufTensorInfo> GgufReader::tensors() const noexcept { return impl_->tensors; }

const GgufTensorInfo* GgufReader::find(std::string_view name) const noexcept {
  const io::GgufFile::Place place = impl_->file.find_tensor(name);
  for (size_t i = 0; place && i < impl_->places.size(); ++i) {
    if (impl_->places[i].tensor == place.tensor) return &impl_->tensors[i];
  }
  return nullptr;
}

uint64_t GgufReader::alignment() const noexcept {
  return impl_->file.parts().front().header.alignment;
}

std::vector<GgufKey> GgufReader::keys() const {
  const io::GgufFile::Part& part = impl_->file.parts().front();
  std::vector<GgufKey> keys;
  for (const io::GgufEntry& entry : part.header.entries) {
    GgufKey key{.name = entry.key, .value = std::vector<std::byte>(entry.value_bytes)};
    part.file.read(entry.value_offset, key.value);
    keys.push_back(std::move(key));
  }
  return keys;
}

void GgufReader::read(const GgufTensorInfo& tensor, uint64_t offset,
                      std::span<std::byte> destination) const {
  const auto index = static_cast<size_t>(&tensor - impl_->tensors.data());
  io::GgufFile::read(impl_->places[index], offset, destination);
}

}  // namespace conclave::inline v0
